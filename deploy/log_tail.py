"""The end of a log file, for an error message."""

from __future__ import annotations

from pathlib import Path

LINES = 15
MAX_BYTES = 65536
CRASH = "Fatal Python error"
CRASHED_THREAD = "Current thread"
LINES_BEFORE_CRASH = 3


def log_tail(path: Path) -> str:
    """The last lines of a log, or where it is when it cannot be read from here.

    A crash report lists all threads and modules; of that, only what happened and the thread that did it are shown.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - MAX_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return f"  (not on this host: {path})"
    return "\n".join(f"  {line}" for line in _telling(lines)) or f"  (empty: {path})"


def _telling(lines: list[str]) -> list[str]:
    crash = next((index for index, line in enumerate(lines) if line.startswith(CRASH)), None)
    if crash is None:
        return lines[-LINES:]
    thread = next((index for index, line in enumerate(lines) if line.startswith(CRASHED_THREAD)), crash + 1)
    head = lines[max(0, crash - LINES_BEFORE_CRASH) : crash + 1]
    return head + lines[thread : thread + LINES - len(head)]
