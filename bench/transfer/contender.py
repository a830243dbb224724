"""What a contender has to be able to do, and which ones there are.

A contender runs as an initiator and a target, each in a process of its own, because UCX reads its settings once per
process and two copies of UCX in one process crash each other.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Final, Literal, Protocol, runtime_checkable

import msgspec

from bench.errors import BadRequest
from bench.transfer.memory import Pages
from connector.transport.base import Op

Role = Literal["initiator", "target"]
DEADLINE_S: Final = 60.0
"""Of one operation, and of its notice."""


class Timing(msgspec.Struct, frozen=True):
    """CLOCK_MONOTONIC in ns, which is one clock on one host: before anything was done for an operation whose page ids
    were known, and when the initiator's Python code knew that it is complete."""

    started_ns: int
    ended_ns: int

    @property
    def microseconds(self) -> float:
        """How long it took."""
        return (self.ended_ns - self.started_ns) / 1e3


class Contender(Protocol):
    """One side of a contender. Whatever it raises is a failure of the measurement."""

    def describe(self) -> bytes:
        """What the other side needs to reach this one."""

    def connect(self, description: bytes) -> None:
        """Get ready to reach the other side, or to be reached by it."""

    def prepare(self, page_bytes: int) -> None:
        """What may be done once for pages of one size, before their ids are known."""

    def operate(self, op: Op, local: Pages, remote: Pages, notice: int | None) -> Timing:
        """Move pages and wait until it is done. With `notice` the target is told that number when the bytes are
        there. Called at the initiator."""

    def await_notice(self, number: int) -> int:
        """When this process's Python code saw the notice with that number. Called at the target."""


@runtime_checkable
class Serving(Contender, Protocol):
    """A contender whose target does nothing for the initiator unless its own code keeps calling the library."""

    def serve(self, until: Callable[[], bool]) -> None:
        """Keep calling until `until()`. Called at the target, during each operation that it awaits no notice of."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A contender, and how it is set up.

    `tcp_only` keeps UCX to TCP by UCX_TLS=tcp; elsewhere UCX_TLS is not set. `target_serves` says that it is a
    `Serving`. `own_cores` gives either process half of the cores to itself, for two processes that poll are put on the
    same core now and then, and take turns of many ms. `waits` says how its processes wait, `setup` how it is used;
    `distributions` are what it may be installed from.
    """

    name: str
    tcp_only: bool = False
    has_target: bool = True
    notifies: bool = True
    target_serves: bool = False
    own_cores: bool = False
    waits: str
    setup: str
    distributions: tuple[str, ...] = ()


_OWN_WAITS = "sleeps on the completion descriptor; the target sleeps on the socket"
_OWN_NOTICE = "after its completion one frame on a TCP connection"
_NIXL_WAITS = (
    "busy: polls check_xfer_state without a pause, as documented, and the target get_new_notifs, which progresses it; "
    "neither side looks between operations; either process is kept to its own half of the cores"
)
_NIXL_SETUP = (
    "UCX backend, no progress thread (the faster way, see bench/transfer/nixl.py), prepared descriptor lists "
    "(prep_xfer_dlist, make_prepped_xfer), the notice in the transfer (notif_msg)"
)

CONTENDERS: Final = {
    entry.name: entry
    for entry in (
        Entry(
            name="memcpy",
            has_target=False,
            notifies=False,
            waits="copies on the calling thread",
            setup="copy_runs of the native core between the two memories, within one process: the baseline",
        ),
        Entry(name="shm", waits=_OWN_WAITS, setup=f"the product's transport; notice: {_OWN_NOTICE}"),
        Entry(
            name="ucx",
            waits=_OWN_WAITS,
            setup=f"the product's transport, UCX_TLS unset; notice: {_OWN_NOTICE}",
            distributions=("libucx-cu12",),
        ),
        Entry(
            name="ucx-tcp",
            tcp_only=True,
            waits=_OWN_WAITS,
            setup=f"the product's transport, UCX_TLS=tcp; notice: {_OWN_NOTICE}",
            distributions=("libucx-cu12",),
        ),
        Entry(
            name="nixl",
            waits=_NIXL_WAITS,
            setup=f"{_NIXL_SETUP}, UCX_TLS unset",
            target_serves=True,
            own_cores=True,
            distributions=("nixl-cu12",),
        ),
        Entry(
            name="nixl-tcp",
            tcp_only=True,
            waits=_NIXL_WAITS,
            setup=f"{_NIXL_SETUP}, UCX_TLS=tcp",
            target_serves=True,
            own_cores=True,
            distributions=("nixl-cu12",),
        ),
        Entry(
            name="mooncake",
            waits="in its batch call; the target sleeps on the socket",
            setup=f"tcp protocol, batch_transfer_sync_read and _write; notice: {_OWN_NOTICE}",
            distributions=("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        ),
    )
}


def chosen(names: str | None) -> list[Entry]:
    """The contenders in a comma-separated list, or all of them, in the order of `CONTENDERS`.

    Raises:
        BadRequest: an unknown name, or none.
    """
    if names is None:
        return list(CONTENDERS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted:
        raise BadRequest(f"--transports names none; there are {', '.join(CONTENDERS)}")
    for name in wanted:
        if name not in CONTENDERS:
            near = difflib.get_close_matches(name, CONTENDERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CONTENDERS)}"
            raise BadRequest(f"unknown transport {name!r} (--transports); {hint}")
    return [entry for entry in CONTENDERS.values() if entry.name in wanted]
