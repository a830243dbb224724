from __future__ import annotations

import pytest

from connector import ConnectorConfig, RegistrationError, TransportError, UnreachableError
from connector.choice import builders, choose, open_transports
from connector.transport.base import Transport
from tests.connector.fabric import Fabric
from tests.connector.pool import Pool


def unusable() -> Transport:
    raise TransportError("no such hardware")


def not_built() -> Transport:
    raise ImportError("no native core")


def test_shared_memory_comes_first_and_a_required_transport_alone() -> None:
    assert list(builders("decode-0", ConnectorConfig())) == ["shm", "ucx"]
    assert list(builders("decode-0", ConnectorConfig(transport="ucx"))) == ["ucx"]
    assert list(builders("decode-0", ConnectorConfig(transport="nixl"))) == ["nixl"]


def test_what_cannot_be_used_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    end = Fabric().transport("near")
    usable = open_transports({"shm": not_built, "ucx": unusable, "fabric": lambda: end}, Pool().memory)
    assert usable == {"fabric": end}
    assert len(end.regions) == 1
    assert "shm cannot be used by this worker: no native core" in caplog.text
    assert "ucx cannot be used by this worker: no such hardware" in caplog.text


def test_nothing_usable_is_an_error_with_every_reason() -> None:
    with pytest.raises(RegistrationError, match=r"\(shm: no native core; ucx: no such hardware\)"):
        open_transports({"shm": not_built, "ucx": unusable}, Pool().memory)


def test_the_first_that_reaches_the_peer_is_taken() -> None:
    island, mainland = Fabric(), Fabric()
    far = mainland.transport("far")
    ours: dict[str, Transport] = {"first": island.transport("near"), "second": mainland.transport("near")}
    offered = {"first": far.describe(), "second": far.describe()}
    assert choose(ours, offered, "far") == ("second", 0)


def test_an_unreachable_peer_is_an_error_with_every_reason() -> None:
    ours: dict[str, Transport] = {"shm": Fabric().transport("near"), "ucx": Fabric().transport("near")}
    far = Fabric().transport("far")
    with pytest.raises(UnreachableError, match=r"reaches far \(shm: far is not .*; ucx: the peer offers only shm\)"):
        choose(ours, {"shm": far.describe()}, "far")
