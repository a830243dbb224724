"""NIXL's agents, as far as this transport needs them: typed, and with errors of ours.

The bindings are used rather than the Python class above them, because that class fixes the pause of NIXL's progress
thread at 0: the thread would spin. Here it sleeps until UCX has something to do.

NIXL carries a UCX of its own. Two copies in one process crash each other, so NIXL is refused where another is loaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import uuid
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from connector._native import keep_ucx_to_itself
from connector.errors import RegistrationError, TransportError
from connector.transport.base import Memory, Op
from connector.transport.ucx_library import loaded_library

MODULE, DISTRIBUTION = "nixl_cu12", "nixl-cu12"
BACKEND = "UCX"
PROGRESS_PAUSE_US = 100_000
"""NIXL wakes its progress thread this often although nothing has happened, against descriptors that UCX forgets."""


class Library:
    """NIXL, loaded into this process.

    Raises:
        RegistrationError: it is not installed, cannot be loaded, or another UCX is in the process.
    """

    def __init__(self) -> None:
        present = loaded_library()
        if present is not None and f"{MODULE}.libs" not in Path(present).parts:
            raise RegistrationError(
                f"UCX is loaded from {present}, and NIXL's own copy cannot share the process with it; "
                "nixl has to be the only transport of a process that uses UCX"
            )
        keep_ucx_to_itself()
        # What goes wrong is reported by events; that an agent is destroyed with transfers under way is meant.
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        try:
            self.bindings: Any = importlib.import_module(f"{MODULE}._bindings")
            self.version = importlib.metadata.version(DISTRIBUTION)
        except ImportError as error:
            raise RegistrationError(
                f"NIXL cannot be loaded: {error}; install kvferry[nixl], or use another transport"
            ) from error
        own = [kind for kind in vars(self.bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *own)

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """NIXL's exceptions as `TransportError`: they are no subclasses of anything."""
        try:
            yield
        except self._errors as error:
            raise TransportError(f"NIXL {self.version}, {doing}: {type(error).__name__} {error}") from error


class Agent:
    """One NIXL agent with its own UCX worker, under a name that no other agent has.

    `served` gives it NIXL's progress thread: peers that connect need answers. Without it the agent moves only while
    one of its methods runs; all of them have to be called by one thread at a time.

    Raises:
        TransportError: from every method, when NIXL refuses.
    """

    def __init__(self, library: Library, name: str, served: bool) -> None:
        self._library, self._bindings = library, library.bindings
        self.name = f"{name}-{uuid.uuid4().hex}"
        config = self._bindings.nixlAgentConfig()
        config.useProgThread = served
        config.useListenThread = False
        config.pthrDelay = PROGRESS_PAUSE_US
        config.syncMode = self._bindings.NIXL_THREAD_SYNC_NONE
        self._regions: list[Any] = []
        with library.translated("creating an agent"):
            self._agent = self._bindings.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend(BACKEND, {})

    def register(self, memory: Memory) -> None:
        """Make `memory` usable as either end of a transfer."""
        region = self._bindings.nixlRegDList(self._bindings.DRAM_SEG, [(memory.address, memory.length, 0, "")])
        with self._library.translated("registering memory"):
            self._agent.registerMem(region, [self._backend])
        self._regions.append(region)

    def metadata(self) -> bytes:
        """What another agent needs to reach this one and its regions."""
        with self._library.translated("describing the agent"):
            return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> None:
        """Get to know a remote agent."""
        with self._library.translated("loading a remote agent"):
            self._agent.loadRemoteMD(metadata)

    def start(self, op: Op, local: npt.NDArray[np.int64], remote: npt.NDArray[np.int64], agent: str) -> int:
        """Start a transfer between rows of (address, length, device 0); returns its handle.

        It may be over when this returns: NIXL moves bytes here as long as it gets on with it.
        """
        segment, kind = self._bindings.DRAM_SEG, self._bindings.nixlXferDList
        operation = self._bindings.NIXL_WRITE if op == "write" else self._bindings.NIXL_READ
        with self._library.translated(f"starting a {op}"):
            handle = self._agent.createXferReq(
                operation, kind(segment, local), kind(segment, remote), agent, "", [self._backend]
            )
            try:
                self._agent.postXferReq(handle)
            except BaseException:
                self._agent.releaseXferReq(handle)
                raise
        return int(handle)

    def finished(self, handle: int) -> bool:
        """Whether every byte of a transfer has arrived. An error does not mean that its other bytes have stopped."""
        with self._library.translated("a transfer"):
            return bool(self._agent.getXferStatus(handle) == self._bindings.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Give a handle back. A transfer that is under way goes on."""
        with self._library.translated("releasing a transfer"):
            self._agent.releaseXferReq(handle)

    def destroy(self, handles: Sequence[int] = ()) -> None:
        """End the agent and its UCX worker with it. Nothing of it touches any memory when this returns.

        `handles` are of transfers that are under way. Twice is harmless.
        """
        if self._agent is None:
            return
        for handle in handles:
            self.release(handle)
        gone = weakref.ref(self._agent)
        self._agent = None
        if gone() is not None:
            raise TransportError(f"NIXL's agent {self.name} is still in use, so that what it does cannot be stopped")
        self._regions.clear()
