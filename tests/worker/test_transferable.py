"""What cannot be handed over is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from connector import ConnectorConfig
from engine import EngineConfig, EngineError, ModelError, inspect_model
from engine.layers import Attention, Layer
from tests.tiny_model import save_tiny_model
from worker import WorkerConfig, WorkerCore
from worker.transferable import require_transferable


def attention(window: int) -> Layer:
    return Layer(
        attention=Attention(num_kv_heads=2, key_dim=8, value_dim=8, kind="window" if window else "full", window=window)
    )


def test_layers_that_see_everything_are_handed_over(tmp_path: Path) -> None:
    info = inspect_model(save_tiny_model(tmp_path))
    require_transferable(info, EngineConfig(speculation="prompt_lookup"))


@pytest.mark.parametrize(("windows", "named"), [((64, 0, 128), "0, 64, 128"), ((64, 64), "64")])
def test_layers_with_windows_are_refused(tmp_path: Path, windows: tuple[int, ...], named: str) -> None:
    info = inspect_model(save_tiny_model(tmp_path))
    windowed = msgspec.structs.replace(info, layers=tuple(attention(window) for window in windows))
    with pytest.raises(ModelError, match=f"layers with windows of {named} tokens"):
        require_transferable(windowed, EngineConfig())


async def test_a_worker_with_a_draft_model_does_not_open(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    engine = EngineConfig(speculation="draft_model", draft_model=str(model))
    config = WorkerConfig(
        name="one",
        host="127.0.0.1",
        model_path=str(model),
        engine=engine,
        connector=ConnectorConfig(transport="shm"),
        token="secret",
    )
    core = WorkerCore(config, "decode")
    with pytest.raises(EngineError, match="'draft_model', whose pages are not handed over"):
        await core.open()
