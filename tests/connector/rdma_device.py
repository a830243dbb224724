"""The RDMA device as the kernel sees it: what it has carried, and what each process holds of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec

DEVICES = Path("/sys/class/infiniband")


class RdmaDevice(msgspec.Struct, frozen=True):
    """One Soft-RoCE device."""

    name: str

    def packets_sent(self) -> int:
        """By port 1, so far; what a device sends to itself counts."""
        return int((DEVICES / self.name / "ports/1/hw_counters/sent_pkts").read_text())

    def packet_bytes(self) -> int:
        """More than what one packet carries."""
        parent = (DEVICES / self.name / "parent").read_text().strip()
        return int((Path("/sys/class/net") / parent / "mtu").read_text())

    def registered_bytes(self, pid: int) -> list[int]:
        """The lengths of the memory regions that a process has registered."""
        return [int(region["mrlen"]) for region in self._held("mr", pid)]

    def connections(self, pid: int) -> list[str]:
        """The states of the reliable connections that a process has.

        UCX keeps a closed one in state ERR until the device says that its last receive has ended. Soft-RoCE never does,
        so that here they go with the transport; hardware does.
        """
        return [str(pair["state"]) for pair in self._held("qp", pid) if pair["type"] == "RC"]

    def _held(self, kind: str, pid: int) -> list[dict[str, Any]]:
        command = ["rdma", "-j", "resource", "show", kind, "link" if kind == "qp" else "dev", self.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        return [one for one in json.loads(shown or "[]") if one.get("pid") == pid]


def only_device() -> RdmaDevice:
    """The one device of this machine."""
    names = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    assert len(names) == 1, f"these checks are for a machine with one RDMA device, this one has {names}"
    return RdmaDevice(names[0])
