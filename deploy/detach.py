"""`kvferry up --detach`: the owner in the background, in a session of its own, followed until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys

from deploy import paths
from deploy.errors import EXIT_FAILED, EXIT_OK
from deploy.log_tail import log_tail
from deploy.processes import python_environment
from deploy.reporting import Ended, EventReader, Ready, Terminal
from deploy.settings import Settings

FAREWELL_S = 60.0


def up_detached(settings: Settings, arguments: list[str]) -> int:
    """Start `kvferry` with `arguments` in the background; returns 0 when it is ready, its exit code when it is not.

    A Ctrl-C on the way stops what was started; a second one kills it.
    """
    logs = paths.logs_dir(settings.cluster, settings.log.folder)
    logs.mkdir(parents=True, exist_ok=True)
    output = logs / "detached.out"
    reading, writing = os.pipe()
    with output.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "deploy.cli", *arguments, "--report-fd", str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            pass_fds=[writing],
            env=python_environment(),
            start_new_session=True,
        )
    os.close(writing)
    terminal = Terminal(sys.stdout, sys.stderr)
    with EventReader(reading) as events:
        while True:
            try:
                code = _follow(events, terminal)
                break
            except KeyboardInterrupt:
                child.terminate()
    if code is None:
        terminal.finish()
        code = child.wait() or EXIT_FAILED
        print(f"kvferry: the cluster's owner ended with exit code {code}:\n{log_tail(output)}", file=sys.stderr)
    elif code != EXIT_OK:
        child.wait(timeout=FAREWELL_S)
    return abs(code)


def _follow(events: EventReader, terminal: Terminal) -> int | None:
    for event in events:
        terminal.report(event)
        match event:
            case Ready():
                return EXIT_OK
            case Ended(exit_code):
                return exit_code
    return None
