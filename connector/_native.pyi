"""The native core: byte runs copied or transferred with the interpreter lock released. Sources in connector/native/."""

from typing import Literal

import numpy as np
import numpy.typing as npt

from connector.transport.base import Offsets

Happened = tuple[Literal["completed", "lost", "late", "fenced"], int, int, str]
"""(kind, peer, batch or -1, text): "completed": a batch is terminal, the text is its error, empty when all of it
succeeded; "lost": the peer cannot be reached any more, and why; "late": the peer has missed a batch's deadline, and
which; of these two a peer has at most one, once; "fenced": no operation of the peer touches memory any more, and this
is the last that is said of it."""

class OutOfBounds(ValueError):
    """A run leaves its region; nothing was posted."""

def copy_runs(
    destination: int,
    destination_bytes: int,
    source: int,
    source_bytes: int,
    to: Offsets,
    from_: Offsets,
    length: Offsets,
) -> None:
    """Copy runs within this process, on the calling thread: the baseline that transports are measured against.

    Raises `OutOfBounds`.
    """

def merged_runs(
    local: Offsets, remote: Offsets, length: Offsets, local_bytes: int, remote_bytes: int
) -> npt.NDArray[np.int64]:
    """Runs checked against both regions: rows of (local offset, remote offset, length), neighbours merged, none empty.

    Raises `OutOfBounds`.
    """

class Copier:
    """Copies between this process's memory and mapped memory of peers on the same host, on one native thread."""

    def __init__(self, name: str) -> None: ...
    def add_peer(self, pidfd: int, mapped: list[tuple[int, int]]) -> int:
        """A peer whose process `pidfd` names, and the memory of it (address, bytes) that is mapped here; both have to
        stay until the peer is fenced. The memory is touched in idle moments, so that its first use is not slow."""

    def post(
        self,
        peer: int,
        write: bool,
        local_address: int,
        local_bytes: int,
        remote_address: int,
        remote_bytes: int,
        local: Offsets,
        remote: Offsets,
        length: Offsets,
        timeout_s: float,
    ) -> int:
        """Queue a batch. Raises `OutOfBounds`; `RuntimeError` for a peer that is fenced or unknown; `ValueError` for a
        timeout that is not positive."""

    def fence(self, peer: int) -> None:
        """Stop copying; "fenced" follows soon. Unknown and fenced peers are left alone."""

    def close(self) -> None:
        """Fence every peer, and wait for it."""

    def fileno(self) -> int:
        """Readable while `drain` has something to return."""

    def drain(self) -> list[Happened]:
        """What has happened since the last call."""

def keep_ucx_to_itself() -> None:
    """Set UCX's environment so that a UCX loaded later leaves signal handlers, memory functions and output alone."""

def ucx_version(library: str) -> tuple[str, str]:
    """Load libucp from a path or a loader's name; its version and path. `RuntimeError` when it cannot be."""

class UcpWorker:
    """One UCP worker with a progress thread of its own."""

    def __init__(self, library: str, name: str, config: list[tuple[str, str]]) -> None:
        """`RuntimeError` when UCX cannot be loaded or initialised with `config`."""

    def register_memory(self, address: int, length: int) -> int: ...
    def address(self) -> bytes: ...
    def packed_key(self, region: int) -> bytes: ...
    def connect(self, address: bytes, regions: list[tuple[int, int, bytes]]) -> int:
        """`regions` are (base address, length in bytes, packed key). `RuntimeError` when UCX refuses."""

    def post(
        self,
        peer: int,
        write: bool,
        local_region: int,
        remote_region: int,
        local: Offsets,
        remote: Offsets,
        length: Offsets,
        timeout_s: float,
    ) -> int:
        """Start a batch. Raises `OutOfBounds`; `RuntimeError` for a peer that is down, fenced or unknown; `ValueError`
        for a timeout that is not positive."""

    def fence(self, peer: int) -> None:
        """Close the endpoint by force; "fenced" follows when UCX has let go. Unknown and fenced peers are left as they
        are."""

    def close(self, timeout_s: float) -> None:
        """Fence every peer, and wait for it. `RuntimeError` if UCX does not let go in time."""

    def fileno(self) -> int:
        """Readable while `drain` has something to return."""

    def drain(self) -> list[Happened]:
        """What has happened since the last call."""

class TcpEngine:
    """Data connections over TCP, served and used, on one native thread that sleeps while nothing happens."""

    def __init__(self, name: str, listener: int, secret: bytes) -> None:
        """Owns `listener`, a listening socket; `secret` (32 bytes) lets initiators in."""

    def register_memory(self, address: int, length: int) -> int: ...
    def add_peer(self, fd: int, secret: bytes, region_bytes: list[int], timeout_s: float) -> int:
        """Owns `fd`, a socket that is connected or about to be. `RuntimeError` when this engine is closed."""

    def post(
        self,
        peer: int,
        write: bool,
        local_region: int,
        remote_region: int,
        local: Offsets,
        remote: Offsets,
        length: Offsets,
        timeout_s: float,
    ) -> int:
        """Start a batch. Raises `OutOfBounds`; `RuntimeError` for a peer that is down, fenced or unknown; `ValueError`
        for a timeout that is not positive."""

    def fence(self, peer: int) -> None:
        """Close the connection; "fenced" has followed when it returns. Unknown and fenced peers are left alone."""

    def close(self) -> None:
        """Fence every peer, close every connection and the listener."""

    def fileno(self) -> int:
        """Readable while `drain` has something to return."""

    def drain(self) -> list[Happened]:
        """What has happened since the last call."""
