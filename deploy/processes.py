"""Which processes belong to a run, and ending all of them.

Every process that a run starts inherits one environment variable with the run's id. That tells them apart wherever they
were reparented to, and a reused process id can never be mistaken for one of them: the kernel shows a process's initial
environment. (Ray's processes write their titles over it unless `SPT_NOENV` is set, so it is set with the id.)
A process *identity* is its id with its start time.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec
import psutil

SESSION_VARIABLE = "_KVFERRY_SESSION"
POLL_S = 0.05


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process id that cannot be confused with a later process of the same id."""

    pid: int
    started: float

    def process(self) -> psutil.Process | None:
        """The process, or None when it is gone."""
        try:
            process = psutil.Process(self.pid)
            if process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE:
                return process
        except psutil.NoSuchProcess:
            pass
        return None


def session_environment(session: str) -> dict[str, str]:
    """What the children of a run have to inherit."""
    return {SESSION_VARIABLE: session, "SPT_NOENV": "1"}


def python_environment() -> dict[str, str]:
    """The environment for a Python child that imports these packages, to be run with `-P`: from where we were imported,
    and not from whatever the current folder holds under the same names."""
    root = str(Path(__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{inherited}" if inherited else root}


def identify(pid: int) -> ProcessIdentity:
    """The identity of the running process `pid`."""
    return ProcessIdentity(pid, psutil.Process(pid).create_time())


def session_processes(session: str) -> list[psutil.Process]:
    """The running processes of one run, this one not among them."""
    wanted = f"{SESSION_VARIABLE}={session}".encode()
    found = []
    for pid in psutil.pids():
        try:
            with open(f"/proc/{pid}/environ", "rb") as environment:
                if pid != os.getpid() and wanted in environment.read().split(b"\0"):
                    found.append(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def end_session(session: str, *, grace_s: float, deadline_s: float = 10.0) -> list[psutil.Process]:
    """End every process of a run: SIGTERM, then SIGKILL after `grace_s`. Returns what still runs after `deadline_s`.

    Looks again until nothing is found: a process may have been starting another one.
    """
    started = time.monotonic()
    termed: set[int] = set()
    while True:
        remaining = session_processes(session)
        elapsed = time.monotonic() - started
        if not remaining or elapsed > grace_s + deadline_s:
            return remaining
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                if elapsed >= grace_s:
                    process.kill()
                elif process.pid not in termed:
                    termed.add(process.pid)
                    process.terminate()
        # Not psutil's wait: it would take exit codes from whoever started these.
        time.sleep(POLL_S)
