"""What two connectors say to each other: typed frames, length-prefixed msgpack over one TCP connection.

Only the consumer opens a connection, to the producer's listener. Pages never travel here.

    consumer                        producer
    Hello(nonce) ───────────────►
                 ◄─────────────── Challenge(nonce)
    Proof ──────────────────────►                     each proof: HMAC over role, version, both ids, both nonces
                 ◄─────────────── Proof
    Record ─────────────────────►
                 ◄─────────────── Record              or `Refused` from either end, at any step
    Renew … ────────────────────►
                 ◄─────────────── RenewReply …
    Ack … ──────────────────────►
                 ◄─────────────── AckReply …
    Cancel … ───────────────────►                     of a WRITE; repeated after a reconnection until it is answered
                 ◄─────────────── Commit …            or Failed, or Stopped; repeated until the consumer has ACKed
                                  Bye                 whoever leaves says so
"""

from __future__ import annotations

import hmac
from typing import Annotated, TypeAlias

import msgspec

from connector.compatibility import CompatibilityRecord, Differences
from connector.errors import WireError
from connector.identity import EngineId
from connector.pages import PoolGeometry
from connector.source import AckStatus

PROTOCOL_VERSION = 2
PREFIX_BYTES = 4
MAX_FRAME_BYTES = 4 << 20
MAX_GREETING_BYTES = 4096
"""A stranger's frames are small until it has proved the token."""
NONCE_BYTES = 32
TAG_BYTES = 16
MAX_IDS_PER_FRAME = 32768
MAX_ID_LENGTH = 64
MAX_DETAIL_LENGTH = 1024

TransferId: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
Detail: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_DETAIL_LENGTH)]
Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]


class _Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="frame", tag=True):
    pass


class Hello(_Frame, frozen=True, kw_only=True):
    """A consumer introduces itself and names the incarnation that it means to reach."""

    version: int
    consumer: EngineId
    producer: EngineId
    nonce: bytes


class Challenge(_Frame, frozen=True, kw_only=True):
    """The producer's nonce."""

    nonce: bytes


class Proof(_Frame, frozen=True, kw_only=True):
    """Knowledge of the cluster token."""

    mac: bytes


class Record(_Frame, frozen=True, kw_only=True):
    """What one end is. `transports` maps a transport's name to its description of the registered regions."""

    compatibility: CompatibilityRecord
    geometry: PoolGeometry
    lease_s: float
    transports: dict[str, bytes]


class Refused(_Frame, frozen=True, kw_only=True):
    """Why the sender ends this connection. `differences` maps a field to (the sender's value, the receiver's), `engine`
    is who it is, when another one was meant."""

    reason: Word
    detail: str
    differences: Differences = msgspec.field(default_factory=dict)
    engine: EngineId | None = None


class _Addressed(_Frame, frozen=True, kw_only=True):
    """Names the incarnations of both ends."""

    consumer: EngineId
    producer: EngineId


class Renew(_Addressed, frozen=True, kw_only=True):
    """The consumer still wants these; sent without any, it shows that the consumer is alive."""

    sequence: int
    transfer_ids: Annotated[list[TransferId], msgspec.Meta(max_length=MAX_IDS_PER_FRAME)]


class RenewReply(_Addressed, frozen=True, kw_only=True):
    """Which leases count again from now, and which sources have ended. Ids in neither are not known (yet)."""

    sequence: int
    renewed: list[TransferId]
    ended: list[TransferId]


class Ack(_Addressed, frozen=True, kw_only=True):
    """One rank of the consumer, of `world_size` that read this source, needs its blocks no more."""

    transfer_id: TransferId
    rank: int
    world_size: int
    outcome: Word


class AckReply(_Addressed, frozen=True, kw_only=True):
    """The ACK has arrived; whatever the status, it need not be sent again."""

    transfer_id: TransferId
    status: AckStatus


class Cancel(_Addressed, frozen=True, kw_only=True):
    """The consumer of a WRITE does not want it any more, and keeps its blocks until it hears that nothing comes."""

    transfer_id: TransferId


class Commit(_Addressed, frozen=True, kw_only=True):
    """Every page of a WRITE has arrived in the consumer's memory."""

    transfer_id: TransferId


class Failed(_Addressed, frozen=True, kw_only=True):
    """A WRITE will not be finished, and nothing of it is in flight any more."""

    transfer_id: TransferId
    detail: Detail


class Stopped(_Addressed, frozen=True, kw_only=True):
    """The answer to a `Cancel`: nothing of that WRITE is in flight, nor ever will be."""

    transfer_id: TransferId


class Bye(_Frame, frozen=True, kw_only=True):
    """The sender leaves on purpose."""

    reason: Word


Frame: TypeAlias = (
    Hello
    | Challenge
    | Proof
    | Record
    | Refused
    | Renew
    | RenewReply
    | Ack
    | AckReply
    | Cancel
    | Commit
    | Failed
    | Stopped
    | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    """A frame with its length in front.

    Raises:
        WireError: larger than any peer would accept.
    """
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a {type(frame).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


class Seal:
    """Tags frames of one direction of one session: each is bound to its place in the stream."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def tag(self, body: bytes) -> bytes:
        """The tag of the next frame."""
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + body, "sha256")[:TAG_BYTES]


def sealed(data: bytes, seal: Seal) -> bytes:
    """An encoded frame with its tag."""
    body = data[PREFIX_BYTES:]
    return (len(body) + TAG_BYTES).to_bytes(PREFIX_BYTES, "big") + body + seal.tag(body)


def unsealed(data: bytes, seal: Seal) -> bytes:
    """The body of a frame whose tag is right.

    Raises:
        WireError: it was added, changed, repeated or moved by somebody on the way, or one before it was dropped.
    """
    body, tag = data[:-TAG_BYTES], data[-TAG_BYTES:]
    if len(data) < TAG_BYTES or not hmac.compare_digest(tag, seal.tag(body)):
        raise WireError("a frame is not the next one of this session; somebody on the way may have meddled with it")
    return body


def body_length(prefix: bytes, limit: int) -> int:
    """The length of the body that follows.

    Raises:
        WireError: it is over `limit`; nothing after it can be read.
    """
    length = int.from_bytes(prefix, "big")
    if length > limit:
        raise WireError(f"a frame of {length} bytes is over the limit of {limit}")
    return length


def decode(body: bytes) -> Frame:
    """The frame in `body`.

    Raises:
        WireError: it is not one.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a frame of {len(body)} bytes is malformed: {error}") from error
