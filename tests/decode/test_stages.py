"""Times of a request's stages."""

from __future__ import annotations

from decode.stages import Stage, Stages


def test_a_stage_is_timed_when_it_is_first_reached() -> None:
    now = [10.0]
    stages = Stages(lambda: now[0])
    now[0] = 10.5
    stages.reach(Stage.PREFILL_SENT)
    now[0] = 12.0
    stages.reach(Stage.FIRST_TOKEN)
    now[0] = 99.0
    stages.reach(Stage.FIRST_TOKEN)
    assert stages.between(Stage.PREFILL_SENT, Stage.FIRST_TOKEN) == 1.5
    assert stages.tell() == "received 0.0 ms, prefill_sent 500.0 ms, first_token 2000.0 ms"


def test_a_stage_that_was_not_reached_takes_no_time() -> None:
    assert Stages(lambda: 1.0).between(Stage.RECEIVED, Stage.PAGES_LANDED) == 0.0
