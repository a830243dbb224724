"""Converted models in the user's cache: whole or not there.

A model is produced next to its place and renamed into it, after everything has reached the disk. Its manifest, written
last, lists every file with size and hash; a folder that does not match it is not used but produced again. One file lock
per model lets only one process produce it; whatever lies beside it while the lock is ours was left by a killed one.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from deploy.errors import ConversionFailed
from deploy.model.catalog import KnownModel
from deploy.model.fetch import Report, produce

MANIFEST = "kvferry-model.json"
FORMAT = 1
"""Raised when the conversion changes, so that older folders are produced again."""

Producer = Callable[[KnownModel, Path, Path, Report], Awaitable[None]]


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a converted model."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a converted folder consists of, and of what it was made."""

    format: int
    requirement: str
    files: dict[str, FileRecord]


class ModelStore:
    """The converted models under one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, model: KnownModel) -> Path:
        """Where `model` lies when it has been converted."""
        return self.root / model.name

    def complete(self, model: KnownModel, *, hashes: bool = False) -> bool:
        """Whether the folder is there and matches its manifest, by sizes or also by hashes."""
        folder = self.folder(model)
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
            if (manifest.format, manifest.requirement) != (FORMAT, model.requirement) or not manifest.files:
                return False
            for name, record in manifest.files.items():
                if (folder / name).stat().st_size != record.size:
                    return False
                if hashes and _sha256(folder / name) != record.sha256:
                    return False
        except (OSError, msgspec.DecodeError):
            return False
        return True

    async def ensure(
        self, model: KnownModel, report: Report, *, hashes: bool = False, producer: Producer = produce
    ) -> Path:
        """The folder of `model`, produced first if it is missing or broken.

        Raises:
            ConversionFailed: it could not be produced; nothing is left behind.
        """
        if await asyncio.to_thread(self.complete, model, hashes=hashes):
            return self.folder(model)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            async with self._lock(model, report):
                self._clean(model)
                if not await asyncio.to_thread(self.complete, model, hashes=hashes):
                    await self._produce(model, report, producer)
        except OSError as error:
            raise ConversionFailed(f"cannot write the model into {self.root}: {error}") from error
        return self.folder(model)

    async def _produce(self, model: KnownModel, report: Report, producer: Producer) -> None:
        workspace = Path(tempfile.mkdtemp(prefix=f".{model.name}.tmp-", dir=self.root))
        try:
            fresh = workspace / "model"
            fresh.mkdir()
            await producer(model, workspace, fresh, report)
            await asyncio.to_thread(_seal, model, fresh)
            if self.folder(model).exists():
                self.folder(model).rename(workspace / "broken")
            fresh.rename(self.folder(model))
            _sync(self.root)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)

    def _clean(self, model: KnownModel) -> None:
        for leftover in self.root.glob(f".{model.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    @asynccontextmanager
    async def _lock(self, model: KnownModel, report: Report) -> AsyncIterator[None]:
        # Ends with its holder, whatever happens to it: the wait is as long as the other conversion.
        descriptor = os.open(self.root / f".{model.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waiting = False
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waiting:
                        report("waiting for another process that is converting the model")
                        waiting = True
                    await asyncio.sleep(0.2)
            yield
        finally:
            os.close(descriptor)


def _seal(model: KnownModel, folder: Path) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _sync(path)
            files[path.relative_to(folder).as_posix()] = FileRecord(path.stat().st_size, _sha256(path))
    manifest = Manifest(FORMAT, model.requirement, files)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    _sync(folder / MANIFEST)
    _sync(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
