"""Whether two processes share a host, in the sense that one can open the other's files under /proc.

The boot id names the running kernel, the inode of the pid namespace says whether both mean the same process by a pid.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class HostIdentity(msgspec.Struct, frozen=True):
    """Equal in two processes exactly when they see the same pids of the same kernel."""

    boot_id: str
    pid_namespace: int


def this_host() -> HostIdentity:
    """Where this process runs."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return HostIdentity(boot_id, os.stat("/proc/self/ns/pid").st_ino)
