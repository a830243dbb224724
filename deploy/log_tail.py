"""The end of a log file, for an error message."""

from __future__ import annotations

from pathlib import Path


def log_tail(path: Path, lines: int = 15, max_bytes: int = 16384) -> str:
    """The last `lines` lines of a log, or where it is when it cannot be read from here."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return f"  (not on this host: {path})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or f"  (empty: {path})"
