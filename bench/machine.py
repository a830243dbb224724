"""What machine a measurement was made on, without anything that names it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`load` is the average number of runnable tasks over the minute before; above 0.1 a core others were at work."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load: float


def this_machine() -> Machine:
    """As the kernel describes it."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        kernel=platform.release(),
        python=platform.python_version(),
        load=round(os.getloadavg()[0], 2),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
