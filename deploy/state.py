"""What is known of a running cluster, in one file; and the lock that makes the name exclusive.

The owner, i.e. the process of `kvferry up`, holds a file lock for its whole life, so a name is free exactly when the
lock is. A state file whose owner is gone is what an owner left that was killed: it tells what has to be cleaned up.
The file is readable by its user only, since it has the cluster's token, and replaced atomically.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from deploy.errors import AlreadyRunning
from deploy.processes import ProcessIdentity

Phase = Literal["STARTING", "READY", "STOPPING"]


class GatewayRecord(msgspec.Struct, frozen=True):
    """One gateway."""

    name: str
    url: str
    pid: int


class WorkerRecord(msgspec.Struct, frozen=True):
    """One worker; `rpc` is "host:port"."""

    name: str
    role: Literal["prefill", "decode"]
    incarnation: int
    rpc: str
    pid: int
    host: str


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster as its owner wrote it down. `session` marks its processes, `session_dir` holds Ray's files."""

    cluster: str
    phase: Phase
    owner: ProcessIdentity
    session: str
    session_dir: str
    logs_dir: str
    token: str
    stop_grace_s: float
    gateways: tuple[GatewayRecord, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()


class StateFile:
    """`state.json` and `lock` in the state folder of one cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._lock = folder / "lock"

    def read(self) -> ClusterState | None:
        """The state, or None when there is none (an unreadable one counts as none: it was never published whole)."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=ClusterState)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def write(self, state: ClusterState) -> None:
        """Replace the state; other readers see the old or the new one."""
        descriptor, name = tempfile.mkstemp(dir=self.folder, prefix=".state-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state)))
        os.replace(name, self._file)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Hold the name; the state and the lock are removed at the end.

        Raises:
            AlreadyRunning: somebody else holds it.
        """
        descriptor = self._acquire()
        try:
            yield
        finally:
            self.clear()
            self._lock.unlink(missing_ok=True)
            os.close(descriptor)
            # Without a run-time directory the logs are in there, and stay.
            with suppress(OSError):
                self.folder.rmdir()

    def clear(self) -> None:
        """Remove the state, and what an interrupted `write` left."""
        self._file.unlink(missing_ok=True)
        for leftover in self.folder.glob(".state-*"):
            leftover.unlink(missing_ok=True)

    def _acquire(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise AlreadyRunning(self._running_message()) from None
            # The previous owner may have removed the file between our open and our lock: then it locks nothing.
            try:
                if os.fstat(descriptor).st_ino == os.stat(self._lock).st_ino:
                    return descriptor
            except FileNotFoundError:
                pass
            os.close(descriptor)

    def _running_message(self) -> str:
        state = self.read()
        name = self.folder.name
        owner = f" (process {state.owner.pid})" if state else ""
        return (
            f"a cluster called {name!r} is already up{owner}; stop it with `kvferry down --cluster {name}` "
            "or start this one under another name with --cluster"
        )
