"""Shared memory on one host: the peer's pool is mapped, and a READ is a memory copy on a native thread.

The pool lies in a memfd, which has no name. A peer opens it through /proc/<pid>/fd, so the kernel checks that both run
as the same user, and the mapping is verified (inode, length) against what the peer described. It must be sealed against
shrinking: touching a page that has been cut off is a SIGBUS, which nobody survives. Passing the descriptor
over a socket would need a second listener; a named file would outlive a killed process.

The mapping is not populated ahead of its use. Measured, that costs as much as the faults that it saves (0.3 ms for each
MiB, on the loop that connects), and it would allocate pages that the peer may never use.

A copy from a dead process's memory succeeds. Its death is therefore watched through a pidfd, and a batch that ends
after its peer has died ends with an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import weakref

import msgspec
import numpy as np

from connector._native import Copier, OutOfBounds
from connector.errors import OutOfBoundsError, PeerLostError, UnreachableError
from connector.transport.base import Completed, Event, Fenced, Memory, Op, PeerDown, Runs
from connector.transport.host import HostIdentity, this_host
from connector.transport.registration import refusal, why_unusable


class _Region(msgspec.Struct, frozen=True):
    fd: int
    inode: int
    length: int


class _Description(msgspec.Struct, frozen=True):
    host: HostIdentity
    pid: int
    started: int
    regions: tuple[_Region, ...]


class _Mapping:
    """One region of a peer, mapped for as long as nobody copies from it any more."""

    def __init__(self, pid: int, region: _Region) -> None:
        path = f"/proc/{pid}/fd/{region.fd}"
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (found.st_ino, found.st_size) != (region.inode, region.length):
                raise UnreachableError(
                    f"{path} is not the pool that the peer described: inode {found.st_ino} of {found.st_size} bytes, "
                    f"described as inode {region.inode} of {region.length} bytes"
                )
            if not _cannot_shrink(fd):
                raise UnreachableError(
                    f"{path} is not sealed against shrinking, so that a copy from it could crash this process; the "
                    "peer has to add F_SEAL_SHRINK to its memfd"
                )
            self._map = mmap.mmap(fd, region.length)
        finally:
            os.close(fd)
        self.length = region.length
        array = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(array.ctypes.data)

    def close(self) -> None:
        self._map.close()


class _Peer:
    """A peer's process and its mapped regions."""

    def __init__(self, pid: int, started: int, regions: tuple[_Region, ...]) -> None:
        self.mappings: list[_Mapping] = []
        self.down = False
        self.pidfd = os.pidfd_open(pid)
        try:
            if start_time(pid) != started:
                raise UnreachableError(f"process {pid} is not the peer any more; it has ended")
            for region in regions:
                self.mappings.append(_Mapping(pid, region))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for mapping in self.mappings:
            mapping.close()
        os.close(self.pidfd)


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memfd has no seals
        return False


def _why_unmappable(memory: Memory) -> str:
    """Empty when other processes can map it."""
    if memory.fd is None:
        return "it lies in no memfd, so that no other process can map it; use another transport for it"
    try:
        found = os.fstat(memory.fd)
    except OSError as error:
        return f"descriptor {memory.fd} is not open: {error}"
    if found.st_size != memory.length:
        return f"descriptor {memory.fd} has {found.st_size} bytes"
    if not _cannot_shrink(memory.fd):
        return (
            f"descriptor {memory.fd} is not sealed against shrinking, so that no peer will map it; create it with "
            "MFD_ALLOW_SEALING and add F_SEAL_SHRINK"
        )
    return ""


def start_time(pid: int) -> int:
    """When a process was started, in the kernel's ticks since boot: tells a reused pid apart."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


class ShmTransport:
    """See the module, and `connector.transport.base.Transport`."""

    name = "shm"

    def __init__(self, name: str) -> None:
        self._owner = name
        self._copier = Copier(f"shm-{name}")
        # Nothing is being copied any more when memory goes, be it that the process ends.
        weakref.finalize(self, self._copier.close)
        self._regions: list[Memory] = []
        self._peers: dict[int, _Peer] = {}
        self._fencing: dict[int, _Peer] = {}
        self._poller = select.epoll()
        self._poller.register(self._copier.fileno(), select.EPOLLIN)
        self._by_pidfd: dict[int, int] = {}
        self._closed = False

    def register(self, memory: Memory) -> int:
        """See `Transport.register`."""
        number = len(self._regions)
        if wrong := _why_unmappable(memory) or why_unusable(memory):
            raise refusal(self._owner, self.name, number, memory, wrong)
        self._regions.append(memory)
        return number

    def describe(self) -> bytes:
        """See `Transport.describe`."""
        regions = []
        for memory in self._regions:
            assert memory.fd is not None
            regions.append(_Region(memory.fd, os.fstat(memory.fd).st_ino, memory.length))
        pid = os.getpid()
        return msgspec.msgpack.encode(_Description(this_host(), pid, start_time(pid), tuple(regions)))

    def connect(self, description: bytes) -> int:
        """See `Transport.connect`."""
        if self._closed:
            raise UnreachableError(f"{self._owner}: this transport is closed")
        try:
            described = msgspec.msgpack.decode(description, type=_Description)
        except msgspec.MsgspecError as error:
            raise UnreachableError(f"the peer's shm description is damaged: {error}") from error
        here = this_host()
        if described.host != here:
            raise UnreachableError(
                f"the peer runs on another host or in another pid namespace ({described.host}, this one is {here}); "
                "use ucx"
            )
        try:
            peer = _Peer(described.pid, described.started, described.regions)
        except (OSError, ValueError, OverflowError) as error:
            raise UnreachableError(f"the pool of process {described.pid} cannot be mapped: {error}") from error
        number = self._copier.add_peer(peer.pidfd, [(mapping.address, mapping.length) for mapping in peer.mappings])
        self._peers[number] = peer
        self._by_pidfd[peer.pidfd] = number
        self._poller.register(peer.pidfd, select.EPOLLIN)
        return number

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """See `Transport.post`."""
        known = self._peers.get(peer)
        if known is None or known.down:
            raise PeerLostError(f"peer {peer} is {'down' if known else 'fenced or unknown'}; connect to it again")
        if not 0 <= local_region < len(self._regions) or not 0 <= remote_region < len(known.mappings):
            raise OutOfBoundsError(
                f"local region {local_region} of {len(self._regions)}, remote region {remote_region} of "
                f"{len(known.mappings)}: there is no such region; nothing was posted"
            )
        local, remote = self._regions[local_region], known.mappings[remote_region]
        try:
            return self._copier.post(
                peer,
                op == "write",
                local.address,
                local.length,
                remote.address,
                remote.length,
                runs.local,
                runs.remote,
                runs.length,
                timeout_s,
            )
        except OutOfBounds as error:
            raise OutOfBoundsError(str(error)) from None

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._poller.fileno()

    def poll(self) -> list[Event]:
        """See `Transport.poll`."""
        events = self._drained()
        if events or self._closed:  # a process that has ended shows again, with the next call
            return events
        for fd, _ in self._poller.poll(0):
            number = self._by_pidfd.get(fd)
            if number is not None:
                self._mark_down(number)
                events.append(PeerDown(peer=number, cause="its process has ended", gone=True))
        return events

    def fence(self, peer: int) -> None:
        """See `Transport.fence`."""
        known = self._peers.pop(peer, None)
        if known is None:
            return
        del self._by_pidfd[known.pidfd]
        if not known.down:
            self._poller.unregister(known.pidfd)
        self._fencing[peer] = known
        self._copier.fence(peer)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as every:
            every.callback(self._unmap)
            every.callback(self._poller.close)
            every.callback(self._copier.close)
            for peer in list(self._peers):
                every.callback(self.fence, peer)

    def _drained(self) -> list[Event]:
        events: list[Event] = []
        for kind, peer, batch, text in self._copier.drain():
            if kind == "completed":
                events.append(Completed(batch=batch, error=text or None))
            elif kind == "fenced":
                if known := self._fencing.pop(peer, None):
                    known.close()
                events.append(Fenced(peer=peer))
            elif peer in self._peers and not self._peers[peer].down:
                self._mark_down(peer)
                events.append(PeerDown(peer=peer, cause=text, gone=False))
        return events

    def _unmap(self) -> None:
        for peer in self._fencing.values():
            peer.close()
        self._fencing.clear()

    def _mark_down(self, peer: int) -> None:
        self._peers[peer].down = True
        self._poller.unregister(self._peers[peer].pidfd)
