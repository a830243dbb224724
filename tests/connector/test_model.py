"""The hand-off under model-based testing: hypothesis chooses every event, and shrinks what fails to a few.

The same worlds and invariants as in `test_handoff`, which goes deeper into single runs; here failures come small. A
failure prints its steps; `@reproduce_failure` or `--hypothesis-seed` plays it again. KVFERRY_MODEL_EVENTS says how many
events a run plays, 100,000 by default; a night is worth a million.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.connector.simulation import Simulation
from tests.connector.simulation_actions import Actions

EVENTS = int(os.environ.get("KVFERRY_MODEL_EVENTS", "100000"))
STEPS = 100

Draw = Callable[[st.SearchStrategy[int]], int]


class Handoff(RuleBasedStateMachine):
    """Two workers, a network, a fabric. Some events are there twice: they have to happen more often than faults."""

    world: Simulation
    played = 0

    @initialize(mode=st.sampled_from(["read", "write"]), import_timeout_s=st.sampled_from([10.0, 100.0]))
    def begin(self, mode: Any, import_timeout_s: float) -> None:
        self.world = Simulation(import_timeout_s, mode)

    def _play(self, name: str, data: Any, *arguments: Any) -> None:
        actions = Actions(self.world, lambda count: int(data.draw(st.integers(0, count - 1))))
        getattr(actions, name)(*arguments)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.heal()
        finally:
            Handoff.played += self.world.steps
            self.world.close()


def _rule(name: str) -> Any:
    def play(self: Handoff, data: Any) -> None:
        self._play(name, data)

    return rule(data=st.data())(play)


OFTEN = ("admit", "deliver", "compute", "read", "succeed")
SELDOM = (
    "deliver_again",
    "move",
    "fail",
    "lose",
    "repeat",
    "fail_step",
    "give_up",
    "pass_time",
    "jump",
    "disconnect",
    "lose_data_connection",
    "cut_off",
    "kill_producer",
    "restart_producer",
)
for _name in [*OFTEN, *SELDOM]:
    setattr(Handoff, _name, _rule(_name))
for _name in OFTEN:
    setattr(Handoff, f"{_name}_too", _rule(_name))


@pytest.mark.timeout(1800)
def test_no_sequence_of_events_breaks_the_protocol() -> None:
    logging.getLogger("connector").setLevel(logging.CRITICAL)
    Handoff.played = 0
    try:
        run_state_machine_as_test(
            Handoff,
            settings=settings(
                max_examples=max(1, EVENTS // (3 * STEPS)),
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        logging.getLogger("connector").setLevel(logging.NOTSET)
    assert Handoff.played >= EVENTS
