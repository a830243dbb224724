"""Cleans up after an owner that was killed: `python -m deploy.guard SESSION SESSION_DIR STATE_DIR [EXIT_CODE]`.

Nothing can run in a process that gets SIGKILL, and Ray's agents take a minute to notice. So the owner starts this small
process first and holds the other end of its standard input. When the owner has ended properly it says so; when the pipe
just closes, every process of the run is ended, and its files are removed.

An owner that has to end at once, while a thread of it is still starting Ray, turns into this program itself (with the
exit code as the last argument): that ends the thread, which would go on making processes and files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from deploy.processes import SESSION_VARIABLE, end_session, python_environment
from deploy.state import StateFile

FAREWELL = b"done"


class Guard:
    """The owner's side."""

    def __init__(self, session: str, session_dir: str, state_dir: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.guard", session, session_dir, str(state_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment(),
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Tell it that nothing is left to do."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(FAREWELL)
            self._child.stdin.close()
        except BrokenPipeError:
            # Somebody killed it; then there is nobody to tell.
            pass
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def clean_up(session: str, session_dir: str, state_file: StateFile) -> list[int]:
    """End what is left of a run and remove its files. Returns the ids of processes that could not be ended."""
    remaining = end_session(session, grace_s=0.0)
    shutil.rmtree(session_dir, ignore_errors=True)
    state = state_file.read()
    if state is not None and state.session == session:
        state_file.clear()
    return [process.pid for process in remaining]


def become_guard(session: str, session_dir: str, state_dir: Path, exit_code: int) -> NoReturn:
    """Turn this process into one that cleans up and exits with `exit_code`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    environment = python_environment()
    environment.pop(SESSION_VARIABLE, None)
    arguments = [session, session_dir, str(state_dir), str(exit_code)]
    os.execve(sys.executable, [sys.executable, "-P", "-m", "deploy.guard", *arguments], environment)


def main(arguments: list[str]) -> int:
    """The guard's side."""
    session, session_dir, state_dir, *exit_code = arguments
    if exit_code or sys.stdin.buffer.read() != FAREWELL:
        clean_up(session, session_dir, StateFile(Path(state_dir)))
    return int(exit_code[0]) if exit_code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
