"""Where a cluster keeps its files, after the XDG base directory rules.

State (a token among it) lies in the run-time directory where there is one, logs in the state directory, converted
models in the cache. Ray's own files lie in a short temporary path: its sockets have to fit into 107 characters.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def _base(variable: str, *default: str) -> Path:
    configured = os.environ.get(variable, "")
    return Path(configured) if configured.startswith("/") else Path.home().joinpath(*default)


def models_dir() -> Path:
    """The folder of converted models."""
    return _base("XDG_CACHE_HOME", ".cache") / "kvferry" / "models"


def state_dir(cluster: str) -> Path:
    """The folder of a running cluster's state file."""
    run_time = os.environ.get("XDG_RUNTIME_DIR", "")
    if run_time.startswith("/") and Path(run_time).is_dir():
        return Path(run_time) / "kvferry" / cluster
    return _base("XDG_STATE_HOME", ".local", "state") / "kvferry" / cluster


def logs_dir(cluster: str, configured: str = "") -> Path:
    """The folder of a cluster's logs; they stay until its next start."""
    if configured:
        return Path(configured).expanduser().absolute()
    return _base("XDG_STATE_HOME", ".local", "state") / "kvferry" / cluster / "logs"


def new_session_dir() -> Path:
    """A fresh temporary folder with a short path, for Ray's files of one run."""
    configured = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="kvferry-", dir=configured if len(configured) <= 32 else "/tmp"))
