"""A contender's two processes as one thing that does one operation when told to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from bench.transfer import process
from bench.transfer.contender import Entry, Timing
from bench.transfer.memory import MappedMemory, Pages
from bench.transfer.side import NotHere, Side
from connector.transport.base import Op

QUIET = {
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "2",
    "MC_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}
"""Their logs go to files that are shown when something fails; a value that the user has set stays."""


class Sample(msgspec.Struct, frozen=True):
    """One operation, in µs: until the initiator knew its end, and until the target had seen the notice."""

    done_us: float
    notified_us: float | None


def environment_of(entry: Entry, environment: Mapping[str, str]) -> dict[str, str]:
    """What a contender's processes get: this process's, with UCX_TLS as the entry says."""
    kept = {key: value for key, value in environment.items() if key != "UCX_TLS"}
    if entry.tcp_only:
        kept["UCX_TLS"] = "tcp"
    return {**QUIET, **kept}


class Pair:
    """See the module. `target` is None where a contender is one process."""

    def __init__(self, entry: Entry, initiator: Side, target: Side | None) -> None:
        self.entry = entry
        self._initiator = initiator
        self._target = target
        self._next_notice = 1

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its processes, the initiator's first."""
        return tuple(side.pid for side in (self._initiator, self._target) if side is not None)

    def connect(self) -> None:
        """Wait until both run, and let each know the other.

        Raises:
            NotHere: the contender cannot run on this machine.
            ContenderFailed: it broke.
        """
        sides = [self._initiator] if self._target is None else [self._initiator, self._target]
        for side in sides:
            side.ready()
        descriptions = [side.ask(process.Describe(), process.Described).description for side in sides]
        for side, description in zip(sides, reversed(descriptions), strict=True):
            side.tell(process.Connect(description))
        for side in sides:
            side.hear(process.Done)

    def prepare(self, page_bytes: int) -> None:
        """Get ready for pages of that size."""
        self._initiator.ask(process.Prepare(page_bytes), process.Done)

    def operate(self, op: Op, local: Pages, remote: Pages) -> Sample:
        """One operation. A WRITE ends with the target's notice where the contender has one.

        Raises:
            ContenderFailed: it broke, or was late.
        """
        awaiting = self._target if op == "write" and self.entry.notifies else None
        serving = self._target if awaiting is None and self.entry.target_serves else None
        number = self._next_notice
        self._next_notice += 1
        if awaiting is not None:
            awaiting.ask(process.AwaitNotice(number), process.Done)
        if serving is not None:
            serving.ask(process.Serve(), process.Done)
        command = process.Operate(op, local.tobytes(), remote.tobytes(), None if awaiting is None else number)
        moved = self._initiator.ask(command, process.Moved)
        done_us = Timing(moved.started_ns, moved.ended_ns).microseconds
        if serving is not None:
            serving.ask(process.Ping(), process.Done)
        if awaiting is None:
            return Sample(done_us, None)
        return Sample(done_us, (awaiting.hear(process.Noticed).at_ns - moved.started_ns) / 1e3)


@contextlib.contextmanager
def open_pairs(
    entries: Sequence[Entry], here: MappedMemory, there: MappedMemory, environment: Mapping[str, str]
) -> Iterator[tuple[list[Pair], dict[str, str]]]:
    """Every contender that can run here, open at the same time, and why the others cannot.

    Raises:
        ContenderFailed: one broke while it was started.
    """
    with contextlib.ExitStack() as every:

        def start(entry: Entry) -> Pair:
            its = environment_of(entry, environment)
            initiator = Side(entry.name, "initiator", here, there, its)
            every.callback(initiator.close)
            if not entry.has_target:
                return Pair(entry, initiator, None)
            target = Side(entry.name, "target", there, here, its)
            every.callback(target.close)
            return Pair(entry, initiator, target)

        pairs, missing = [], {}
        for pair in [start(entry) for entry in entries]:
            try:
                pair.connect()
            except NotHere as reason:
                missing[pair.entry.name] = str(reason)
            else:
                pairs.append(pair)
        yield pairs, missing
