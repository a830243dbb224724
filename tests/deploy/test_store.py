import asyncio
from pathlib import Path

import pytest

from deploy.errors import ConversionFailed
from deploy.model.catalog import CATALOG, KnownModel
from deploy.model.fetch import Report
from deploy.model.store import MANIFEST, ModelStore

MODEL = CATALOG["smollm2-135m-instruct"]


class Recorder:
    """A producer that writes two small files, counts its runs, and can be told to break off."""

    def __init__(self) -> None:
        self.runs = 0
        self.fail: Exception | None = None
        self.started = asyncio.Event()
        self.proceed: asyncio.Event | None = None

    async def __call__(self, model: KnownModel, workspace: Path, folder: Path, report: Report) -> None:
        self.runs += 1
        report("producing")
        (workspace / "download.whl").write_bytes(b"wheel")
        (folder / "config.json").write_text("{}")
        self.started.set()
        if self.proceed is not None:
            await self.proceed.wait()
        if self.fail is not None:
            raise self.fail
        (folder / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def silent(_: str) -> None:
    pass


def visible(store: ModelStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir() if not path.name.endswith(".lock"))


async def test_a_model_is_produced_once(store: ModelStore) -> None:
    producer = Recorder()
    folder = await store.ensure(MODEL, silent, producer=producer)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    assert await store.ensure(MODEL, silent, producer=producer) == folder
    assert producer.runs == 1
    assert visible(store) == [MODEL.name]


async def test_a_failed_production_leaves_nothing_and_the_next_one_works(store: ModelStore) -> None:
    producer = Recorder()
    producer.fail = ConversionFailed("the disk is on fire")
    with pytest.raises(ConversionFailed, match="on fire"):
        await store.ensure(MODEL, silent, producer=producer)
    assert visible(store) == []
    producer.fail = None
    assert store.complete(MODEL) is False
    assert (await store.ensure(MODEL, silent, producer=producer)).is_dir()


async def test_a_cancelled_production_leaves_nothing(store: ModelStore) -> None:
    producer = Recorder()
    producer.proceed = asyncio.Event()
    task = asyncio.create_task(store.ensure(MODEL, silent, producer=producer))
    await producer.started.wait()
    assert len(visible(store)) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert visible(store) == []


async def test_what_a_killed_production_left_is_removed(store: ModelStore) -> None:
    leftover = store.root / f".{MODEL.name}.tmp-killed" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    await store.ensure(MODEL, silent, producer=Recorder())
    assert visible(store) == [MODEL.name]


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "other conversion"])
async def test_a_broken_folder_is_produced_again(store: ModelStore, damage: str) -> None:
    producer = Recorder()
    folder = await store.ensure(MODEL, silent, producer=producer)
    match damage:
        case "truncate":
            (folder / "model.safetensors").write_bytes(b"weight")
        case "remove":
            (folder / "config.json").unlink()
        case "manifest":
            (folder / MANIFEST).write_text("{")
        case "other conversion":
            (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"format": 1', '"format": 0'))
    assert store.complete(MODEL) is False
    await store.ensure(MODEL, silent, producer=producer)
    assert producer.runs == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert visible(store) == [MODEL.name]


async def test_flipped_bytes_are_found_when_hashes_are_asked_for(store: ModelStore) -> None:
    producer = Recorder()
    folder = await store.ensure(MODEL, silent, producer=producer)
    (folder / "model.safetensors").write_bytes(b"weighty")
    assert store.complete(MODEL)
    await store.ensure(MODEL, silent, hashes=True, producer=producer)
    assert (folder / "model.safetensors").read_bytes() == b"weights"


async def test_two_at_once_produce_it_once_and_the_second_says_that_it_waits(store: ModelStore) -> None:
    producer = Recorder()
    producer.proceed = asyncio.Event()
    waits = asyncio.Event()
    first = asyncio.create_task(store.ensure(MODEL, silent, producer=producer))
    await producer.started.wait()
    second = asyncio.create_task(store.ensure(MODEL, lambda phase: waits.set(), producer=producer))
    await waits.wait()
    producer.proceed.set()
    assert await first == await second
    assert producer.runs == 1


async def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file in the way")
    with pytest.raises(ConversionFailed, match="cannot write the model into"):
        await ModelStore(tmp_path / "models").ensure(MODEL, silent, producer=Recorder())
