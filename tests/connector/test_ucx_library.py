"""Which libucp is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

import connector.transport.ucx_library as module
from connector.errors import RegistrationError
from connector.transport.ucx_library import SYSTEM, find_library


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, loaded: str | None = None, devices: bool = False, system: bool = False
) -> None:
    monkeypatch.setattr(module, "loaded_library", lambda: loaded)
    monkeypatch.setattr(module, "has_rdma_devices", lambda: devices)
    monkeypatch.setattr(module, "_system_has_it", lambda: system)


def is_the_wheel(path: str) -> bool:
    return Path(path).is_file() and path.endswith("libucx/lib/libucp.so.0")


@pytest.mark.parametrize(("devices", "system"), [(False, False), (True, False), (False, True)])
def test_the_wheel_unless_there_are_devices_and_a_system_library(
    monkeypatch: pytest.MonkeyPatch, devices: bool, system: bool
) -> None:
    pretend(monkeypatch, devices=devices, system=system)
    assert is_the_wheel(find_library(""))


def test_the_system_library_where_there_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, devices=True, system=True)
    assert find_library("") == SYSTEM


def test_what_is_loaded_already_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, loaded="/opt/libucp.so.0", devices=True, system=True)
    assert find_library("") == "/opt/libucp.so.0"


def test_what_was_asked_for_comes_before_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, loaded="/opt/libucp.so.0", devices=True, system=True)
    own = tmp_path / "libucp.so"
    own.touch()
    assert find_library(str(own)) == str(own)
    assert find_library("system") == SYSTEM
    assert is_the_wheel(find_library("wheel"))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(RegistrationError, match=r"connector.ucx_library is '/nowhere/libucp.so', which is no file"):
        find_library("/nowhere/libucp.so")


def test_without_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(RegistrationError, match="UCX is not installed"):
        find_library("")
