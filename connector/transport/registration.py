"""What is checked of memory before a transport takes it, and how a refusal is told.

Some ways of moving bytes (TCP, CMA) register anything and fail only when a peer reads, in the peer's process; an RDMA
device refuses with an error number. Both are told here with the region, and before anyone connects.
"""

from __future__ import annotations

import resource
from pathlib import Path

from connector.errors import RegistrationError
from connector.transport.base import Memory

MAPS = Path("/proc/self/maps")


def refusal(owner: str, transport: str, region: int, memory: Memory, cause: str) -> RegistrationError:
    """The error that says which region of whom could not be made reachable by what, and why."""
    return RegistrationError(
        f"{owner}: {transport} cannot register region {region}, memory at {memory.address:#x} ({memory.length} bytes): "
        f"{cause}"
    )


def why_unusable(memory: Memory, maps: str | None = None) -> str:
    """Empty when all of `memory` may be read and written by this process, else what is wrong with which part of it.

    `maps` is a text like /proc/self/maps, which is read by default.
    """
    if memory.length <= 0:
        return f"a region has at least one byte, not {memory.length}"
    reached, end = memory.address, memory.address + memory.length
    for line in (MAPS.read_text(encoding="utf-8", errors="replace") if maps is None else maps).splitlines():
        bounds, permissions = line.split(maxsplit=2)[:2]
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if last <= reached:
            continue
        if first > reached:
            break
        if not permissions.startswith("rw"):
            return f"{reached:#x} may not be read and written (it is mapped {permissions})"
        reached = last
        if reached >= end:
            return ""
    return f"nothing is mapped at {reached:#x}; register memory after it has been mapped, with its length"


def pinning_advice(length: int, limit: int | None = None) -> str:
    """What to do when a device cannot pin `length` bytes because the process may not lock that many; empty when it may.

    `limit` is RLIMIT_MEMLOCK in bytes, this process's by default.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY or limit >= length:
        return ""
    return (
        f"; an RDMA device has to pin it, and RLIMIT_MEMLOCK allows {limit} bytes: set it to unlimited (ulimit -l "
        "unlimited, LimitMEMLOCK=infinity in a systemd unit, or the container's ulimits)"
    )
