"""The far end of a transport in a process of its own: memory with known bytes, told what to do by JSON lines.

It never touches its transport once it has described itself: what a peer does to its memory must need nothing from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pytest

from connector.transport.base import Memory, Transport
from connector.transport.nixl import NixlTransport
from connector.transport.nixl_agent import MODULE as NIXL_MODULE
from connector.transport.shm import ShmTransport
from connector.transport.ucx import UcxTransport

Kind = Literal["shm", "ucx", "nixl"]
needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec(NIXL_MODULE) is None, reason=f"{NIXL_MODULE} is not installed (extra nixl)"
)
SIZES = (48 << 20, 64 << 10)
"""Bytes of the two regions on either side."""


def make_transport(kind: Kind, name: str) -> Transport:
    """A transport of that kind."""
    match kind:
        case "shm":
            return ShmTransport(name)
        case "ucx":
            return UcxTransport(name)
        case "nixl":
            return NixlTransport(name)


def pattern(seed: int, length: int) -> npt.NDArray[np.uint8]:
    """Bytes that depend on the seed only."""
    return np.frombuffer(np.random.default_rng(seed).bytes(length), dtype=np.uint8)


def digest(data: npt.NDArray[np.uint8]) -> str:
    """Of some bytes."""
    return hashlib.blake2b(data.tobytes(), digest_size=16).hexdigest()


class Regions:
    """Two memfds, mapped, with the bytes of `seed` and `seed + 1`."""

    def __init__(self, seed: int) -> None:
        self.arrays: list[npt.NDArray[np.uint8]] = []
        self.memories: list[Memory] = []
        for number, size in enumerate(SIZES):
            fd = os.memfd_create("kvferry-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            array = np.frombuffer(mmap.mmap(fd, size), dtype=np.uint8)
            array[:] = pattern(seed + number, size)
            self.arrays.append(array)
            self.memories.append(Memory(address=int(array.ctypes.data), length=size, fd=fd))

    def close(self) -> None:
        """Close the descriptors; the memory goes with the arrays."""
        for memory in self.memories:
            assert memory.fd is not None
            os.close(memory.fd)


class Far:
    """The test's end of the process."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.connector.far_process", kind, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.pid = self._process.pid
        self.description = bytes.fromhex(self.ask("describe"))

    def ask(self, do: str) -> Any:
        """One command and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(do) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the far process has ended instead of answering {do}"
        return json.loads(line)

    def digests(self) -> list[str]:
        """Of both regions as they are now."""
        return [str(one) for one in self.ask("digests")]

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Whatever state it is in, it is gone afterwards."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def far_process(kind: Kind, seed: int = 100) -> Iterator[Far]:
    """A far end; it is gone afterwards, whatever happened."""
    far = Far(kind, seed)
    try:
        yield far
    finally:
        far.end()


def serve(kind: Kind, seed: int) -> None:
    """Answer commands until the input ends."""
    regions = Regions(seed)
    transport = make_transport(kind, "far")
    for memory in regions.memories:
        transport.register(memory)
    for line in sys.stdin:
        command = json.loads(line)
        answer = transport.describe().hex() if command == "describe" else [digest(one) for one in regions.arrays]
        print(json.dumps(answer), flush=True)
    transport.close()


if __name__ == "__main__":
    serve(cast(Kind, sys.argv[1]), int(sys.argv[2]))
