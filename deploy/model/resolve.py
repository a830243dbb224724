"""From `model` in the settings to a folder that can be served."""

from __future__ import annotations

from pathlib import Path

import msgspec

from deploy.errors import ModelRefused
from deploy.model.catalog import CATALOG, advice
from deploy.model.fetch import Report
from deploy.model.store import ModelStore


class ResolvedModel(msgspec.Struct, frozen=True):
    """A model's folder, and the name under which it is served."""

    path: Path
    served_name: str


async def resolve_model(model: str, served_name: str, store: ModelStore, report: Report) -> ResolvedModel:
    """The folder of a known name (fetched and converted when it is not there yet), or the folder at a path.

    Raises:
        ModelRefused: it is neither.
        ConversionFailed: a known model could not be made available.
    """
    if model in CATALOG:
        return ResolvedModel(await store.ensure(CATALOG[model], report), served_name or model)
    path = _folder(model)
    return ResolvedModel(path, served_name or path.name)


def _folder(model: str) -> Path:
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelRefused(f"model {model!r} is neither a folder nor a known name; {advice(model)}")
    return path.resolve()


def inspect(model: ResolvedModel) -> None:
    """Look at the folder as the engine will, before anything is started for it.

    Raises:
        ModelRefused: it is incomplete, or nothing that separate workers can serve.
    """
    from engine.errors import ModelError
    from engine.model_info import inspect_model
    from worker.transferable import require_whole_context

    try:
        require_whole_context(inspect_model(model.path))
    except ModelError as error:
        raise ModelRefused(str(error)) from error
