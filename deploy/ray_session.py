"""The owner's connection to Ray: a local one that ends with it, or a cluster that it joins.

Starting Ray takes seconds and does not listen to anybody meanwhile, so it happens on a thread of its own and the
owner's loop stays free for a Ctrl-C. That thread lives until the process ends: Ray's local servers are told by the
kernel to die with the *thread* that started them.

Ray authenticates every call with a token. For a local Ray it is a fresh one in the environment, which keeps Ray from
writing one into the home directory; a cluster that is joined has its own (`RAY_AUTH_TOKEN`, `~/.ray/auth_token`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from deploy.errors import StartFailed
from deploy.processes import session_environment
from deploy.settings import RaySettings

T = TypeVar("T")

REACH_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0


class LastingThread:
    """Runs functions one after the other on one daemon thread that never ends."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Run `function` there; its result or exception arrives in the returned future."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return asyncio.wrap_future(future)

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class RaySession:
    """Ray for one run. `start` may be cancelled; `stop` is harmless then, and twice."""

    def __init__(self, settings: RaySettings, session: str, session_dir: str) -> None:
        self._settings = settings
        self._session = session
        self._session_dir = session_dir
        self._thread = LastingThread("ray")
        self._starting: asyncio.Future[None] | None = None

    @property
    def local(self) -> bool:
        """Whether this Ray is our own."""
        return not self._settings.address

    async def start(self) -> None:
        """Start or join Ray.

        Raises:
            StartFailed: with Ray's reason.
        """
        # Everything that is started from here on inherits these; Ray reads its own when it is imported.
        os.environ.update(session_environment(self._session))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        if self.local:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            os.environ.pop("RAY_AUTH_TOKEN_PATH", None)
            # Ray would give its workers the lowest priority on the machine, behind whatever else runs there.
            os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - that is its name
        what = "start a local Ray" if self.local else f"join the Ray cluster at {self._settings.address}"
        try:
            if ":" in self._settings.address:
                await self._reach(self._settings.address)
            self._starting = self._thread.call(self._init)
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._starting)
        except TimeoutError:
            raise StartFailed(f"could not {what}: no answer within {START_TIMEOUT_S:g} s") from None
        except Exception as error:
            raise StartFailed(f"could not {what}: {error}") from error

    async def _reach(self, address: str) -> None:
        # Ray itself would try for minutes.
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
        await writer.wait_closed()

    def _init(self) -> None:
        import ray

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        if self.local:
            options |= {
                "address": "local",
                "num_cpus": self._settings.num_cpus or os.cpu_count(),
                "include_dashboard": False,
                "object_store_memory": self._settings.object_store_bytes,
                "_temp_dir": self._session_dir,
            }
        else:
            options |= {"address": self._settings.address}
        ray.init(**options)

    async def stop(self, timeout_s: float = 20.0) -> bool:
        """Leave Ray, ending a local one.

        False when that was not possible: it was just starting, or did not end in time. Then its processes have to be
        killed, and this process must end without waiting for its threads.
        """
        if self._starting is None:
            return True
        if not self._starting.done():
            return False
        self._starting = None
        try:
            async with asyncio.timeout(timeout_s):
                await self._thread.call(self._shutdown)
        except TimeoutError:
            return False
        return True

    def _shutdown(self) -> None:
        import ray

        ray.shutdown()
