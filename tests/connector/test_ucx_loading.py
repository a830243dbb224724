"""One UCX in a process, whoever loaded it. Each case needs a process that has loaded none yet."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

REPORT = """
import ctypes, json, sys
from connector.errors import RegistrationError
from connector.transport.ucx import UcxTransport
loaded, *wanted = sys.argv[1:]
if loaded:
    keep = ctypes.CDLL(loaded)
found = []
for library in wanted:
    try:
        transport = UcxTransport("one", library)
    except RegistrationError as error:
        found.append(["refused", str(error)])
        continue
    found.append([transport.version, transport.path])
    transport.close()
print(json.dumps(found))
"""


def report(loaded: Path | str, *wanted: Path | str) -> list[list[str]]:
    """What transports say that ask for `wanted` one after the other, in a process where `loaded` was loaded before."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(loaded), *map(str, wanted)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, f"UCX wrote to the process's output: {done.stdout}"
    return [list(one) for one in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def wheel() -> Path:
    package = importlib.util.find_spec("libucx")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "lib"


@pytest.fixture(scope="module")
def other(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another installation."""
    folder = tmp_path_factory.mktemp("ucx") / "lib"
    folder.mkdir()
    for library in wheel.glob("lib*.so.0"):
        shutil.copy(library, folder)
    bundled = wheel.parents[1] / "libucx_cu12.libs"
    if bundled.is_dir():
        shutil.copytree(bundled, folder.parents[1] / "libucx_cu12.libs")
    return folder


@pytest.mark.process
def test_the_wheel_is_used_under_each_of_its_names(wheel: Path) -> None:
    names = ("wheel", "", wheel / "libucp.so.0.0.0", "wheel")
    assert {path for _, path in report("", *names)} == {str(wheel / "libucp.so.0")}


@pytest.mark.process
def test_what_another_package_has_loaded_is_used(wheel: Path, other: Path) -> None:
    theirs = str(other / "libucp.so.0")
    assert [path for _, path in report(theirs, "", theirs)] == [theirs, theirs]
    by_another_name = str(wheel / "libucp.so")
    assert [path for _, path in report(by_another_name, "wheel", "")] == [by_another_name] * 2


@pytest.mark.process
def test_a_second_library_beside_another_packages_is_refused(wheel: Path, other: Path) -> None:
    theirs = other / "libucp.so.0"
    refused, used = report(theirs, "wheel", "")
    assert refused == [
        "refused",
        f"one: UCX is loaded from {theirs}; a second one, {wheel / 'libucp.so.0'}, cannot share the process with it",
    ]
    assert used[1] == str(theirs)


@pytest.mark.process
def test_a_second_library_beside_our_own_is_refused(wheel: Path, other: Path) -> None:
    (version, path), by_path, by_name = report("", "wheel", other / "libucp.so.0", "system")
    assert path == str(wheel / "libucp.so.0")
    for refused, wanted in ((by_path, other / "libucp.so.0"), (by_name, "libucp.so.0")):
        assert refused == [
            "refused",
            f"one: UCX {version} is loaded from {path}; a second one, {wanted}, cannot share the process with it",
        ]


@pytest.mark.process
def test_a_library_that_is_not_ucp_is_refused(wheel: Path) -> None:
    assert report("", wheel / "libucs.so.0") == [["refused", "one: UCX lacks the function ucp_get_version_string"]]
