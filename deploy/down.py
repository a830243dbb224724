"""`kvferry down`: ends a cluster and waits until everything of it is gone, with or without its owner's help."""

from __future__ import annotations

import contextlib
import signal
import sys
import time

import psutil

from deploy import paths
from deploy.errors import EXIT_OK, StartFailed
from deploy.guard import clean_up
from deploy.processes import ProcessIdentity, session_processes
from deploy.reporting import Progress, Terminal
from deploy.state import StateFile

POLL_S = 0.1
RAY_END_S = 45.0
KILL_S = 10.0


def down(cluster: str) -> int:
    """Stop `cluster`. Returns 0 when nothing of it is left, also when it was not up.

    The owner stops it in order; asked a second time it kills, and an owner that does not answer is killed itself.

    Raises:
        StartFailed: something could not be ended.
    """
    state_file = StateFile(paths.state_dir(cluster))
    state = state_file.read()
    if state is None:
        print(f"no cluster called {cluster!r} is up")
        return EXIT_OK
    terminal = Terminal(sys.stdout, sys.stderr)
    terminal.report(Progress(cluster, "stopping"))
    try:
        # Gateways, decode and prefill drain one after the other.
        for number, patience_s in (
            (signal.SIGTERM, 3 * state.stop_grace_s + RAY_END_S),
            (signal.SIGTERM, KILL_S),
            (signal.SIGKILL, KILL_S),
        ):
            owner = state.owner.process()
            if owner is None:
                break
            with contextlib.suppress(psutil.NoSuchProcess):
                owner.send_signal(number)
            _wait_for_end(state.owner, patience_s)
        remaining = clean_up(state.session, state.session_dir, state_file)
    finally:
        terminal.finish()
    if remaining or session_processes(state.session):
        raise StartFailed(f"{cluster}: these processes could not be ended: {', '.join(map(str, remaining))}")
    print(f"{cluster} is down")
    return EXIT_OK


def _wait_for_end(owner: ProcessIdentity, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while owner.process() is not None and time.monotonic() < deadline:
        time.sleep(POLL_S)
