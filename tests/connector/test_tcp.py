"""TCP streams between processes, and with strangers and faulty peers that speak by hand."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from connector.errors import RegistrationError, UnreachableError
from connector.transport.base import Memory, Runs
from connector.transport.tcp import SECRET_BYTES, TcpTransport
from tests.connector import tcp_client as wire
from tests.connector.far_process import SIZES, digest, pattern
from tests.connector.near import PATIENCE_S, Near, near_end, runs
from tests.connector.tcp_client import Client
from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures

BIG, SMALL = SIZES


@pytest.mark.process
class TestConformance(TransportConformance):
    kind = "tcp"


@pytest.mark.process
class TestFailures(TransportFailures):
    kind = "tcp"


@pytest.fixture
def near() -> Iterator[Near]:
    with near_end("tcp") as near:
        yield near


@pytest.fixture
def target(near: Near) -> TcpTransport:
    return cast(TcpTransport, near.transport)


def digests(near: Near) -> list[str]:
    return [digest(array) for array in near.regions.arrays]


def assert_serves(near: Near) -> None:
    """Peers that are let in still are."""
    peer = near.transport.connect(near.transport.describe())
    assert near.wait([near.transport.post(peer, "read", 0, 1, runs((0, 0, 4096)), PATIENCE_S)]) == [None]
    assert np.array_equal(near.regions.arrays[0][:4096], near.regions.arrays[1][:4096])
    near.fence(peer)


def test_a_client_that_speaks_by_hand(near: Near, target: TcpTransport) -> None:
    client = Client(target)
    client.send(wire.request(wire.READ, (5, 3), (100, 4)) + wire.request(wire.WRITE, (7, 2), region=1) + b"\x01\x02")
    expected = pattern(1, BIG)
    assert client.receive(wire.REPLY_BYTES) == wire.reply(wire.DONE, 7, 7)
    assert client.receive(7) == expected[5:8].tobytes() + expected[100:104].tobytes()
    assert client.receive(wire.REPLY_BYTES) == wire.reply(wire.DONE, 7, 0)
    assert near.regions.arrays[1][7:9].tolist() == [1, 2]
    client.close()


@pytest.mark.parametrize("secret", [bytes(SECRET_BYTES), b"\xff" * SECRET_BYTES], ids=["zeros", "ones"])
def test_a_wrong_secret(near: Near, target: TcpTransport, secret: bytes) -> None:
    client = Client(target, secret)
    assert client.is_closed()
    client.close()
    peer = near.transport.connect(wire.changed(target.describe(), secret=secret))
    near.wait(down=[peer])
    assert near.down[peer].gone
    assert digests(near) == [digest(pattern(1, BIG)), digest(pattern(2, SMALL))]
    assert_serves(near)


def test_a_secret_that_is_right_but_for_its_last_bit(target: TcpTransport) -> None:
    secret = wire.opened(target.describe()).secret
    client = Client(target, secret[:-1] + bytes([secret[-1] ^ 1]))
    assert client.is_closed()
    client.close()


@pytest.mark.parametrize(
    "said", [b"KVFTCP1", b"GET / HTTP/1.1\r\nHost: a-worker-that-is-not-one\r\n\r\n"], ids=["half a hello", "http"]
)
def test_strangers_are_sent_away(near: Near, target: TcpTransport, said: bytes) -> None:
    client = Client(target, secret=None)
    client.send(said)
    assert_serves(near)
    assert client.is_closed()  # at once, or after the few seconds that a hello may take
    client.close()


def test_half_a_request_and_then_silence(near: Near, target: TcpTransport) -> None:
    before = digests(near)
    halves = [wire.request(wire.READ, (0, 4096))[:40], wire.request(wire.READ, (0, 4096), (8192, 4096))[:70]]
    halves.append(wire.request(wire.WRITE, (0, 4096)))
    clients = []
    for half in halves:
        clients.append(Client(target))
        clients[-1].send(half)
    assert digests(near) == before
    assert_serves(near)
    for client in clients:
        client.close()
    assert_serves(near)


REFUSED = [
    wire.request(wire.READ, (0, BIG + 1)),
    wire.request(wire.READ, (1, BIG)),
    wire.request(wire.READ, (BIG, 1)),
    wire.request(wire.READ, (-1, 1)),
    wire.request(wire.READ, (0, 16), (2**63 - 1, 2**63 - 1), total=16),
    wire.request(wire.READ, (0, -1)),
    wire.request(wire.READ, (0, 0)),
    wire.request(wire.READ, (0, 1), region=2),
    wire.request(wire.READ, (0, 1), region=-1),
    wire.request(wire.READ, (0, SMALL + 1), region=1),
    wire.request(wire.READ, (0, 16), total=17),
    wire.request(3, (0, 16)),
    wire.request(wire.WRITE, (0, 16), (BIG - 15, 16)) + b"x" * 32,
    wire.request(wire.WRITE, (0, 16), total=8) + b"x" * 16,
    wire.request(wire.WRITE, (2**62, 2**62), (2**62, 2**62), (0, 16), total=16) + b"x" * 16,
]


@pytest.mark.parametrize("bad", REFUSED, ids=range(len(REFUSED)))
def test_a_request_that_leaves_its_region_moves_nothing(near: Near, target: TcpTransport, bad: bytes) -> None:
    before, other, client = digests(near), Client(target), Client(target)
    client.send(bad)
    answer = client.receive(wire.REPLY_BYTES)
    # The reply may be lost when bytes that nobody reads were on their way.
    assert answer in (wire.reply(wire.REFUSED, 7, 0), b"")
    assert client.is_closed()
    other.send(wire.request(wire.READ, (0, 16)))
    assert other.receive(wire.REPLY_BYTES) == wire.reply(wire.DONE, 7, 16)
    assert digests(near) == before
    client.close()
    other.close()


@pytest.mark.parametrize(
    "bad",
    [
        b"\x00" * 48,
        wire.request(wire.READ, count=0),
        wire.request(wire.READ, count=-1),
        wire.request(wire.READ, count=(1 << 16) + 1),
        wire.request(wire.WRITE, count=2**63 - 1),
    ],
    ids=["zeros", "no pieces", "fewer than none", "too many", "far too many"],
)
def test_what_is_no_request_ends_its_connection(near: Near, target: TcpTransport, bad: bytes) -> None:
    client = Client(target)
    client.send(bad)
    assert client.is_closed()
    client.close()
    assert_serves(near)


def test_a_thousand_strangers_keep_no_peer_out(near: Near, target: TcpTransport) -> None:
    peer = near.transport.connect(target.describe())
    assert near.wait([near.post(peer, "read", runs((0, 0, 1)))]) == [None]
    strangers = []
    for number in range(1000):
        try:
            strangers.append(Client(target, secret=None))
        except OSError:  # this process has no more descriptors: both ends are its own
            while len(strangers) > 100:
                strangers.pop().close()
        if number % 100 == 0:
            assert_serves(near)
    assert_serves(near)
    assert near.wait([near.post(peer, "read", runs((0, 0, BIG)))]) == [None]
    assert strangers[0].is_closed()
    for stranger in strangers:
        stranger.close()


class FalseTarget:
    """Accepts one connection and answers its first request with what it was told to."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(PATIENCE_S)
        self.port = self._listening.getsockname()[1]
        self.connection: socket.socket | None = None

    def answer(self, data: bytes) -> None:
        self.connection, _ = self._listening.accept()
        self.connection.settimeout(PATIENCE_S)
        assert self.connection.recv(1)
        self.connection.sendall(data)

    def close(self) -> None:
        self._listening.close()
        if self.connection is not None:
            self.connection.close()


@pytest.mark.parametrize(
    "answer",
    [
        wire.reply(wire.REFUSED, 0, 0),
        wire.reply(wire.DONE, 1, 16) + b"x" * 16,
        wire.reply(wire.DONE, 0, 15) + b"x" * 16,
        wire.reply(wire.DONE, 0, 17) + b"x" * 17,
        wire.reply(wire.DONE, 0, 16, magic=1) + b"x" * 16,
        b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n",
    ],
    ids=["refused", "another batch", "too short", "too long", "no reply", "http"],
)
def test_a_false_answer_takes_the_peer_down(near: Near, answer: bytes) -> None:
    false = FalseTarget()
    peer = near.transport.connect(wire.changed(near.transport.describe(), port=false.port))
    batch = near.post(peer, "read", runs((0, 0, 16)))
    false.answer(answer)
    (error,) = near.wait([batch], down=[peer])
    assert error is not None
    assert not near.down[peer].gone
    assert "does not speak this protocol" in near.down[peer].cause
    assert digests(near) == [digest(pattern(1, BIG)), digest(pattern(2, SMALL))]
    near.fence(peer)
    false.close()


def test_batches_of_more_pieces_than_a_request_has(near: Near) -> None:
    peer = near.transport.connect(near.transport.describe())
    count = (1 << 17) + 3
    order = np.random.default_rng(3).permutation(count)
    here, there = np.arange(count) * 24, BIG // 2 + order * 24
    expected = near.regions.arrays[0].copy()
    for byte in range(11):
        expected[here + byte] = expected[there + byte]
    batch = Runs(local=here, remote=there, length=np.full(count, 11, dtype=np.int64))
    assert near.wait([near.post(peer, "read", batch)]) == [None]
    assert np.array_equal(near.regions.arrays[0], expected)
    back = Runs(local=there, remote=here, length=batch.length)
    assert near.wait([near.post(peer, "write", back)]) == [None]
    assert np.array_equal(near.regions.arrays[0], expected)


def test_more_batches_than_a_target_takes_in_at_once(near: Near) -> None:
    peer = near.transport.connect(near.transport.describe())
    big, tiny = runs((0, BIG // 2, BIG // 2)), runs((0, 0, 16))
    posted = [near.post(peer, "read", big), *(near.post(peer, "read", tiny, region=1) for _ in range(3000))]
    assert set(near.wait(posted)) == {None}


def test_hosts_by_name_and_hosts_that_cannot_be_told(near: Near) -> None:
    named = TcpTransport("named", "localhost")
    assert named.endpoint.host == "localhost"
    near.wait([near.post(near.transport.connect(wire.changed(named.describe(), regions=(SMALL,))), "read", runs())])
    named.close()
    for host, why in (("0.0.0.0", "wildcard"), ("192.0.2.1", "is not an address of this host")):
        with pytest.raises(RegistrationError, match=f"elsewhere: tcp cannot be used: .*{why}"):
            TcpTransport("elsewhere", host)
    with pytest.raises(UnreachableError, match="cannot be connected to"):
        near.transport.connect(wire.changed(near.transport.describe(), host="a host with no name"))


def test_the_secret_is_new_each_time_and_never_shown(near: Near, target: TcpTransport) -> None:
    described = wire.opened(target.describe())
    with near_end("tcp") as other:
        assert wire.opened(other.transport.describe()).secret != described.secret
    assert repr(described) == str(target.endpoint)
    refused = wire.changed(target.describe(), host="a host with no name")
    with pytest.raises(UnreachableError) as caught:
        near.transport.connect(refused)
    assert repr(described.secret)[2:-1] not in str(caught.value)


def test_memory_that_cannot_be_registered(near: Near) -> None:
    with pytest.raises(RegistrationError, match=r"tcp cannot register region 2, .* nothing is mapped at 0x1000"):
        near.transport.register(Memory(address=4096, length=4096, fd=None))
    whole = near.regions.memories[0]
    assert near.transport.register(Memory(address=whole.address, length=whole.length, fd=None)) == 2
    near.transport.close()
    with pytest.raises(RegistrationError, match="is closed"):
        near.transport.register(whole)
