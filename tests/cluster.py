"""A real cluster for tests: `kvferry up --detach` in folders of its own, and everything that it may leave behind.

    with start_cluster({"engine.dtype": "float32", "connector.transport": "ucx"}) as cluster:
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none")

Starting one takes some ten seconds, so tests share it where they can.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from deploy import paths
from deploy.config import resolve
from deploy.model.catalog import CATALOG
from deploy.model.store import ModelStore
from deploy.processes import session_processes
from deploy.state import ClusterState, StateFile
from deploy.status import worker_status
from engine.model_info import inspect_model
from rpc.v1.worker_pb2 import WorkerStatus

START_TIMEOUT_S = 240.0
COMMAND_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 60.0
POLL_S = 0.05

# Ports nobody has to agree on, and pools that several clusters on one machine can afford.
SMALL = {"gateway.port": "0", "engine.kv_cache_bytes": "128MiB", "start_timeout_s": "180"}


def default_model() -> Path:
    """The default model's folder, downloaded and converted if it has not been yet."""
    model = CATALOG["smollm2-135m-instruct"]
    return asyncio.run(ModelStore(paths.models_dir()).ensure(model, lambda phase: None))


class ClusterHandle:
    """A cluster of its own name, with its state and logs in a temporary folder. `up`, then `stop`; `close` at last."""

    def __init__(self, settings: Mapping[str, object], environment: Mapping[str, str] | None = None) -> None:
        self.name = f"test-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="kvferry-test-"))
        # Converted models are shared with the user's; everything else of this cluster is in the folder.
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder),
            **(environment or {}),
        }
        flags = [(key, str(value), "test") for key, value in {**SMALL, **settings, "cluster": self.name}.items()]
        self.settings = resolve(flags=flags).settings
        self._set = [argument for key, value, _ in flags for argument in ("--set", f"{key}={value}")]
        self._last_state: ClusterState | None = None

    def __enter__(self) -> ClusterHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What it is

    @property
    def state(self) -> ClusterState:
        """What the owner has written down; the last of it once it is gone."""
        self._last_state = StateFile(self.folder / "kvferry" / self.name).read() or self._last_state
        assert self._last_state is not None, "the owner has not written anything down yet"
        return self._last_state

    @property
    def url(self) -> str:
        """The first gateway's URL."""
        return self.state.gateways[0].url

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return self.settings.served_name or Path(self.settings.model).name

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.settings.engine.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        model = self.settings.model
        info = inspect_model(paths.models_dir() / model if model in CATALOG else Path(model))
        itemsize = {"bfloat16": 2, "float32": 4}[self.settings.engine.dtype]
        rows = [layer.attention for layer in info.layers if layer.attention is not None]
        return sum(row.num_kv_heads * (row.key_dim + row.value_dim) for row in rows) * itemsize * self.block_size

    def pids(self) -> list[int]:
        """The processes of all workers and gateways."""
        return [worker.pid for worker in self.state.workers] + [gateway.pid for gateway in self.state.gateways]

    # What it is asked

    def popen(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """Start a `kvferry` command about this cluster, as the leader of a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", command, *self._set, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def kvferry(self, command: str, *arguments: str, timeout_s: float = COMMAND_TIMEOUT_S) -> tuple[int, str, str]:
        """Run a `kvferry` command to its end: exit code, standard output, standard error."""
        with self.popen(command, *arguments) as process:
            try:
                out, err = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, err

    def up(self) -> str:
        """Start it in the background; returns what is printed for people when it is ready."""
        code, out, err = self.kvferry("up", "--detach", timeout_s=START_TIMEOUT_S)
        assert code == 0, f"kvferry up ended with {code}:\n{err}\n{self.logs()}"
        assert self.state.phase == "READY"
        return out

    def status(self) -> dict[str, Any]:
        """`kvferry status --json`."""
        code, out, err = self.kvferry("status", "--json")
        assert code == 0, err
        status: dict[str, Any] = json.loads(out)
        return status

    def worker_status(self, role: Literal["prefill", "decode"]) -> WorkerStatus:
        """What the first worker of a pool says of itself, its counters included."""
        record = next(record for record in self.state.workers if record.role == role)
        return worker_status(record, self.state.token)

    async def wait_until_idle(self) -> None:
        """Wait until no worker has a request, a source, an import or a block in use."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while busy := await asyncio.to_thread(self._busy):
            assert time.monotonic() < deadline, f"still busy after {IDLE_TIMEOUT_S:g} s: {busy}"
            await asyncio.sleep(POLL_S)

    def _busy(self) -> list[WorkerStatus]:
        states = [worker_status(record, self.state.token) for record in self.state.workers]
        return [
            status
            for status in states
            if status.blocks_free < status.blocks_total
            or status.requests_running + status.requests_waiting + status.sources_held + status.imports_active
        ]

    # How it ends

    def stop(self) -> None:
        """`kvferry down`; nothing may be left."""
        code, _, err = self.kvferry("down")
        assert code == 0, f"kvferry down ended with {code}:\n{err}\n{self.logs()}"
        assert self.left_behind() == []

    def left_behind(self) -> list[str]:
        """What is still there of it: processes, its state, Ray's files."""
        state = self.state
        found = [f"process {process.pid} ({process.name()})" for process in session_processes(state.session)]
        found += [str(path) for path in self.folder.rglob("state.json")]
        return found + [path for path in (state.session_dir,) if Path(path).exists()]

    def logs(self) -> str:
        """All logs, for the message of a failed test."""
        folder = self.folder / "kvferry" / self.name / "logs"
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("*")))

    def close(self) -> None:
        """End whatever still runs, and remove the folder."""
        try:
            self.kvferry("down")
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def start_cluster(settings: Mapping[str, object]) -> ClusterHandle:
    """A running cluster with `settings` (by key, over small defaults); the caller stops or closes it."""
    handle = ClusterHandle(settings)
    try:
        handle.up()
    except BaseException:
        handle.close()
        raise
    return handle
