"""Where a process's output goes: everything that it prints, its native code included, into its log file.

In the owner, only the reporter keeps a way to the person's terminal: Ray writes whole paragraphs to standard output.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import TextIO


def redirect_output(log_file: Path, level: str) -> None:
    """From now on standard output, standard error, logging and crash reports of this process go to `log_file`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stream = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stderr = stream
    faulthandler.enable(stream)
    logging.basicConfig(
        level=level.upper(), stream=stream, force=True, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def private_copy(stream: TextIO) -> TextIO:
    """The same place as `stream`, whatever happens to the standard descriptors."""
    return os.fdopen(os.dup(stream.fileno()), "w", buffering=1, encoding=stream.encoding, errors="backslashreplace")
