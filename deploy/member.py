"""One actor of the cluster, as the owner sees it: calls whose errors say which worker, why, and the end of its log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from deploy.errors import StartFailed, WorkerDied
from deploy.log_tail import log_tail

logger = logging.getLogger(__name__)

PHASE_POLL_S = 0.2
KILL_AFTER_S = 10.0


class Member:
    """An actor with its name and its log file (on the host where it runs)."""

    def __init__(self, name: str, handle: Any, log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._handle = handle

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of the actor's `method`.

        Raises:
            StartFailed: the method failed; its own message.
            WorkerDied: the process is gone.
        """
        try:
            return await getattr(self._handle, method).remote(*arguments)
        except RayActorError as error:
            raise WorkerDied(self.name, death_reason(str(error)), log_tail(self.log_file)) from None
        except RayTaskError as error:
            if isinstance(error.cause, StartFailed):
                raise StartFailed(f"{error.cause} (log: {self.log_file})") from None
            raise StartFailed(f"{self.name}: {error.cause} (log: {self.log_file})") from error

    async def call_and_follow(self, method: str, report: Callable[[str, str], None]) -> Any:
        """`call`, with the worker's phases reported as (name, phase) meanwhile."""
        following = asyncio.create_task(self._follow(report))
        try:
            return await self.call(method)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def death(self) -> None:
        """Wait until the process dies, and raise `WorkerDied`."""
        await self.call("watch")

    async def stop(self, grace_s: float) -> None:
        """Ask it to finish within `grace_s` and stop; a worker that does not answer is killed."""
        try:
            async with asyncio.timeout(grace_s + KILL_AFTER_S):
                await self._handle.stop.remote(grace_s)
        except RayTaskError as error:
            logger.warning("%s failed to stop in order: %s (log: %s)", self.name, error.cause, self.log_file)
        except RayError as error:
            logger.warning("%s was gone before it was stopped: %s", self.name, death_reason(str(error)))
        except TimeoutError:
            logger.warning("%s did not stop within %g s and is killed", self.name, grace_s + KILL_AFTER_S)
        with suppress(RayError):
            ray.kill(self._handle)

    async def _follow(self, report: Callable[[str, str], None]) -> None:
        report(self.name, "starting its process")
        while True:
            report(self.name, await self._handle.phase.remote())
            await asyncio.sleep(PHASE_POLL_S)


def death_reason(ray_message: str) -> str:
    """Why an actor died, out of Ray's message: the sentence that says so, without its general advice."""
    for marker in ("Worker exit detail:", "The actor is dead because"):
        _, found, rest = ray_message.partition(marker)
        if found:
            return " ".join(rest.partition("\n")[0].partition("Some common causes include")[0].split())
    return " ".join(ray_message.split())
