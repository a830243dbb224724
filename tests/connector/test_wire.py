from __future__ import annotations

import msgspec
import pytest

from connector import WireError, wire
from connector.wire import (
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    Ack,
    AckReply,
    Bye,
    Challenge,
    Frame,
    Hello,
    Proof,
    Record,
    Refused,
    Renew,
    RenewReply,
)
from tests.connector.pool import D, P, Pool, compatibility

FRAMES: list[Frame] = [
    Hello(version=1, consumer=D, producer=P, nonce=b"n" * 32),
    Challenge(nonce=b"m" * 32),
    Proof(mac=b"p" * 32),
    Record(
        compatibility=compatibility(),
        geometry=Pool(2).geometry,
        lease_s=30.0,
        transports={"shm": b"\x00\xff", "ucx": b""},
    ),
    Refused(reason="incompatible", detail="", differences={"dtype": ("bfloat16", "float32"), "tp_size": (1, None)}),
    Renew(consumer=D, producer=P, sequence=7, transfer_ids=["a", "b"]),
    RenewReply(consumer=D, producer=P, sequence=7, renewed=["a"], ended=["b"]),
    Ack(consumer=D, producer=P, transfer_id="a", rank=0, world_size=1, outcome="published"),
    AckReply(consumer=D, producer=P, transfer_id="a", status="duplicate"),
    Bye(reason="closing"),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    data = wire.encode(frame)
    assert wire.body_length(data[:PREFIX_BYTES], MAX_FRAME_BYTES) == len(data) - PREFIX_BYTES
    assert wire.decode(data[PREFIX_BYTES:]) == frame


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1\r\n",
        msgspec.msgpack.encode({"frame": "Nonsense"}),
        msgspec.msgpack.encode({"frame": "Ack", "transfer_id": "t"}),
        msgspec.msgpack.encode({"frame": "Bye", "reason": 7}),
        msgspec.msgpack.encode({"frame": "Bye", "reason": "x" * 65}),
        msgspec.msgpack.encode([1, 2, 3]),
        wire.encode(Bye(reason="closing"))[PREFIX_BYTES:] + b"more",
        b"\xdf" + b"\xff" * 4,
        b"\x81" * 5000,
        b"\x83" + wire.encode(Bye(reason="nested"))[PREFIX_BYTES + 1 :] + b"\xa5extra" + b"\x91" * 4000,
    ],
)
def test_a_malformed_frame_is_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        wire.decode(body)


def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    with pytest.raises(WireError, match=r"a frame of 1195725856 bytes is over the limit of 4096"):
        wire.body_length(b"GET ", 4096)


def test_a_frame_that_no_peer_accepts_is_not_sent() -> None:
    with pytest.raises(WireError, match="over the limit"):
        wire.encode(Refused(reason="too long", detail="x" * MAX_FRAME_BYTES))
