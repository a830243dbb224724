"""Synchronous loads: pages that arrive while the step that needs them runs.

A load overwrites blocks that were taken in the same step, and so may have been recorded for zeroing. A transfer waits
for no queue of kernels: a fill that is carried out late would wipe pages that have already landed. So what a load
overwrites completely is not zeroed, and nothing else is left out: not a block that is written in part, not one of
another group, not a state slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, TypeAlias

from engine.errors import LoadFailed
from engine.page_work import PageWork

logger = logging.getLogger(__name__)

LoadMode: TypeAlias = Literal["layerwise", "all_first"]
"""Whether each layer waits for its own pages, or everything is waited for before the forward pass, which a captured
graph cannot interrupt."""


class Load(Protocol):
    """One request's load. Whoever makes it has lent the table to the transfer, and ends every wait by a deadline."""

    @property
    def request_id(self) -> str:
        """Whose."""

    @property
    def covered(self) -> Mapping[str, frozenset[int]]:
        """By group, the attention blocks every byte of which it writes (`connector.coverage`)."""

    def start(self) -> None:
        """Begin to write. Called after zeroing and copies. Raises `LoadFailed`."""

    def wait_for_states(self) -> None:
        """Until the state slots have landed. Raises `LoadFailed`."""

    def wait_for_layer(self, layer: int) -> None:
        """Until this layer's pages have landed. Raises `LoadFailed`."""

    def wait_for_all(self) -> None:
        """Until everything has landed. Raises `LoadFailed`."""


def sync_load_block_ids(work: PageWork) -> dict[str, set[int]]:
    """By group, the blocks that this step's loads overwrite completely: zeroing has to skip them."""
    found: dict[str, set[int]] = {}
    for load in work.loads:
        for group, blocks in load.covered.items():
            if blocks:
                found.setdefault(group, set()).update(blocks)
    return found


def exclude_loaded(work: PageWork) -> None:
    """Take what the loads overwrite out of what is zeroed and copied. The order of what remains is kept.

    A block that is loaded whole needs no copy either: the load wins.
    """
    loaded = sync_load_block_ids(work)
    if not loaded:
        return
    work.new_block_ids_to_zero = {
        group: [block for block in blocks if block not in loaded.get(group, ())]
        for group, blocks in (work.new_block_ids_to_zero or {}).items()
    }
    work.copies = [copy for copy in work.copies if copy.destination not in loaded.get(copy.group, ())]


class LoadBarriers:
    """What the forward pass waits at. A load that fails spoils its own request only; the others go on.

    `failed` says by request what went wrong.
    """

    def __init__(self, loads: Sequence[Load], mode: LoadMode) -> None:
        self._loads = list(loads)
        self._mode = mode
        self.failed: dict[str, str] = {}

    def start(self) -> None:
        """Begin all loads; the states, and in mode `all_first` everything, are waited for."""
        for load in self._loads:
            self._try(load, load.start)
        for load in self._loads:
            self._try(load, load.wait_for_all if self._mode == "all_first" else load.wait_for_states)

    def before_layer(self, layer: int) -> None:
        """This layer's pages are about to be read."""
        if self._mode == "layerwise":
            for load in self._loads:
                self._try(load, partial(load.wait_for_layer, layer))

    def finish(self) -> None:
        """The forward pass has ended: whatever it did not wait for has to have landed, too."""
        for load in self._loads:
            self._try(load, load.wait_for_all)

    def _try(self, load: Load, wait: Callable[[], None]) -> None:
        if load.request_id in self.failed:
            return
        try:
            wait()
        except LoadFailed as error:
            logger.warning("the load of %s has failed: %s", load.request_id, error)
            self.failed[load.request_id] = str(error)
