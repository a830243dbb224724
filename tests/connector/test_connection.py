"""Sealed connections: whatever somebody on the way does to the frames, none of it is taken for a frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from connector import WireError, wire
from connector.connection import Connection
from connector.wire import MAX_FRAME_BYTES, PREFIX_BYTES, TAG_BYTES, Ack, Commit, Frame, Refused, Renew
from tests.clock import in_virtual_time
from tests.connector.pool import D, P

WAIT_S = 10.0
RENEW = Renew(consumer=D, producer=P, sequence=1, transfer_ids=["t"])
ACK = Ack(consumer=D, producer=P, transfer_id="t", rank=0, world_size=1, outcome="published")
COMMIT = Commit(consumer=D, producer=P, transfer_id="t")


class Path:
    """A consumer and a producer with somebody in between, who has everything that the consumer sends."""

    def __init__(self, consumer: Connection, producer: Connection, sent: asyncio.StreamReader) -> None:
        self.consumer = consumer
        self.producer = producer
        self._sent = sent
        self.to_producer = asyncio.StreamReader()

    async def taken(self, frame: Frame) -> bytes:
        """The bytes of this frame, which the producer does not get."""
        _, data = await asyncio.gather(self.consumer.send(frame, WAIT_S), self._next())
        return data

    async def _next(self) -> bytes:
        prefix = await self._sent.readexactly(PREFIX_BYTES)
        return prefix + await self._sent.readexactly(int.from_bytes(prefix, "big"))


@asynccontextmanager
async def somebody_on_the_way(sealed: bool = True) -> AsyncIterator[Path]:
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    async with await asyncio.start_server(lambda *ends: accepted.put_nowait(ends), "127.0.0.1", 0) as server:
        consumer = Connection(*await asyncio.open_connection(*server.sockets[0].getsockname()), "producer")
        sent, writer = await accepted.get()
        path = Path(consumer, consumer, sent)
        path.producer = Connection(path.to_producer, writer, "consumer")
        if sealed:
            path.consumer.seal(b"consumer's", b"producer's")
            path.producer.seal(b"producer's", b"consumer's")
        yield path
        path.to_producer.feed_eof()
        for connection in (path.consumer, path.producer):
            connection.abort()


@in_virtual_time
async def test_frames_in_their_order_arrive() -> None:
    async with somebody_on_the_way() as path:
        for frame in (RENEW, ACK, RENEW):
            path.to_producer.feed_data(await path.taken(frame))
            assert await path.producer.receive(WAIT_S) == frame


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def with_body_of(data: bytes, other: bytes) -> bytes:
    return other[:-TAG_BYTES] + data[-TAG_BYTES:]


@pytest.mark.parametrize(
    "meddled",
    [
        pytest.param(lambda renew, ack: flipped(renew, PREFIX_BYTES + 5), id="flipped in the body"),
        pytest.param(lambda renew, ack: flipped(renew, len(renew) - 1), id="flipped in the tag"),
        pytest.param(lambda renew, ack: ack, id="the one before was dropped"),
        pytest.param(lambda renew, ack: with_body_of(renew, ack), id="another's tag"),
        pytest.param(lambda renew, ack: flipped(renew, PREFIX_BYTES - 1) + b"x", id="another length"),
        pytest.param(
            lambda renew, ack: (len(renew) - PREFIX_BYTES - TAG_BYTES).to_bytes(4, "big") + renew[4:-TAG_BYTES],
            id="without a tag",
        ),
        pytest.param(lambda renew, ack: (3).to_bytes(4, "big") + b"abc", id="shorter than a tag"),
    ],
)
@in_virtual_time
async def test_a_frame_that_was_meddled_with_is_refused(meddled: Callable[[bytes, bytes], bytes]) -> None:
    async with somebody_on_the_way() as path:
        path.to_producer.feed_data(meddled(await path.taken(RENEW), await path.taken(ACK)))
        with pytest.raises(WireError, match="not the next one of this session"):
            await path.producer.receive(WAIT_S)


@in_virtual_time
async def test_a_frame_counts_once() -> None:
    async with somebody_on_the_way() as path:
        data = await path.taken(ACK)
        path.to_producer.feed_data(data + data)
        assert await path.producer.receive(WAIT_S) == ACK
        with pytest.raises(WireError, match="not the next one of this session"):
            await path.producer.receive(WAIT_S)


@in_virtual_time
async def test_frames_out_of_order_are_refused() -> None:
    async with somebody_on_the_way() as path:
        first, second = await path.taken(RENEW), await path.taken(ACK)
        path.to_producer.feed_data(second + first)
        with pytest.raises(WireError, match="not the next one of this session"):
            await path.producer.receive(WAIT_S)


@in_virtual_time
async def test_an_end_does_not_believe_its_own_frames() -> None:
    async with somebody_on_the_way() as path:
        data = await path.taken(COMMIT)
        reflected = asyncio.StreamReader()
        reflected.feed_data(data)
        path.consumer._reader = reflected
        with pytest.raises(WireError, match="not the next one of this session"):
            await path.consumer.receive(WAIT_S)


@in_virtual_time
async def test_a_frame_of_an_earlier_session_is_refused() -> None:
    async with somebody_on_the_way() as earlier, somebody_on_the_way() as path:
        path.producer.seal(b"producer's new", b"consumer's new")
        path.to_producer.feed_data(await earlier.taken(RENEW))
        with pytest.raises(WireError, match="not the next one of this session"):
            await path.producer.receive(WAIT_S)


@pytest.mark.parametrize("sealed", [False, True])
@in_virtual_time
async def test_the_largest_frame_that_can_be_sent_can_be_received(sealed: bool) -> None:
    smaller = Refused(reason="large", detail="x" * (MAX_FRAME_BYTES - 1024))
    spare = MAX_FRAME_BYTES + PREFIX_BYTES - len(wire.encode(smaller))
    frame = Refused(reason="large", detail=smaller.detail + "x" * spare)
    async with somebody_on_the_way(sealed) as path:
        path.to_producer.feed_data(await path.taken(frame))
        assert await path.producer.receive(WAIT_S) == frame
        with pytest.raises(WireError, match="is over the limit"):
            await path.consumer.send(Refused(reason="large", detail=frame.detail + "x"), WAIT_S)


@in_virtual_time
async def test_what_a_peer_sends_unasked_is_not_kept_without_end() -> None:
    """What comes before it is wanted stays with the kernel, and so with whoever sends it."""
    async with somebody_on_the_way() as path:
        with pytest.raises(WireError, match=r"has not read for 10 s"):
            await send_on(path.consumer)
        assert len(path._sent._buffer) < 1 << 20  # type: ignore[attr-defined]


async def send_on(connection: Connection) -> None:
    while True:
        await connection.send(RENEW, WAIT_S)
