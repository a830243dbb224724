"""Who are you, do you know the token, and do our pages mean the same?

Both ends prove the cluster token by an HMAC over fresh nonces of both, bound to both engine ids (name and incarnation)
and to the role, so a proof can be neither replayed, nor reflected, nor used towards another worker. The consumer proves
first: a stranger learns nothing of a listener but its protocol version. Both proofs made, every further frame carries a
tag under keys of this session, so that nobody on the way can add, change, repeat or drop one unseen. Only then are
records exchanged and compared, by both ends.

An end that refuses says why in a `Refused` frame before it closes, so that the reason stands in both logs. That another
incarnation answers counts only when it has proved itself: it means that the one that was meant is dead.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal, NoReturn, TypeVar

import msgspec

from connector.compatibility import find_differences
from connector.connection import Connection
from connector.errors import HandshakeError, IncompatibleError, PlanError, WireError, WrongIncarnationError
from connector.geometry import check_geometry
from connector.identity import EngineId
from connector.wire import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Challenge,
    Hello,
    Proof,
    Record,
    Refused,
)

F = TypeVar("F", Hello, Challenge, Proof, Record)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This end. `token` is the cluster's shared secret."""

    engine_id: EngineId
    token: bytes
    record: Record


async def greet(connection: Connection, us: Identity, producer: EngineId, timeout_s: float) -> Record:
    """The consumer's part. Returns the producer's record. Every answer has to come within `timeout_s`.

    Raises:
        WrongIncarnationError: another incarnation listens there.
        IncompatibleError: the compatibility records differ.
        HandshakeError: either end refused the other for another reason.
        WireError: the connection broke, or an answer was malformed, oversized or late.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Hello(version=PROTOCOL_VERSION, consumer=us.engine_id, producer=producer, nonce=nonce)
    await connection.send(hello, timeout_s)
    challenge = await _expect(Challenge, connection, str(producer), timeout_s, MAX_GREETING_BYTES)
    await connection.send(Proof(mac=_mac(us.token, "consumer", hello, challenge)), timeout_s)
    proof = await _expect(Proof, connection, str(producer), timeout_s, MAX_GREETING_BYTES)
    if not hmac.compare_digest(proof.mac, _mac(us.token, "producer", hello, challenge)):
        await _refuse(connection, "unauthorized", f"{producer} does not know the cluster token")
    frames = (
        _mac(us.token, "consumer's frames", hello, challenge),
        _mac(us.token, "producer's frames", hello, challenge),
    )
    connection.seal(*frames)
    await connection.send(us.record, timeout_s)
    record = await _expect(Record, connection, str(producer), timeout_s, MAX_FRAME_BYTES)
    await _compare(connection, us.record, record, str(producer))
    return record


async def answer(connection: Connection, us: Identity, timeout_s: float) -> tuple[EngineId, Record]:
    """The producer's part. Returns who the consumer is, and its record.

    Raises:
        IncompatibleError: the compatibility records differ.
        HandshakeError: either end refused the other for another reason.
        WireError: the connection broke, or a frame was malformed, oversized or late.
    """
    hello = await _expect(Hello, connection, connection.peer, timeout_s, MAX_GREETING_BYTES)
    if hello.version != PROTOCOL_VERSION:
        detail = f"{us.engine_id} speaks version {PROTOCOL_VERSION} of the protocol, {hello.consumer} version"
        await _refuse(connection, "protocol_version", f"{detail} {hello.version}; run the same release on both")
    consumer = str(hello.consumer)
    challenge = Challenge(nonce=secrets.token_bytes(NONCE_BYTES))
    await connection.send(challenge, timeout_s)
    proof = await _expect(Proof, connection, consumer, timeout_s, MAX_GREETING_BYTES)
    known = hmac.compare_digest(proof.mac, _mac(us.token, "consumer", hello, challenge))
    if not known or len(hello.nonce) != NONCE_BYTES:
        await connection.say_last(Refused(reason="unauthorized", detail="the cluster token is not known"))
        raise HandshakeError(f"refused (unauthorized): {consumer} does not know the cluster token of {us.engine_id}")
    await connection.send(Proof(mac=_mac(us.token, "producer", hello, challenge)), timeout_s)
    frames = (
        _mac(us.token, "producer's frames", hello, challenge),
        _mac(us.token, "consumer's frames", hello, challenge),
    )
    connection.seal(*frames)
    if hello.producer != us.engine_id:
        detail = f"{hello.consumer} asked for {hello.producer}, but this is {us.engine_id}"
        await connection.say_last(Refused(reason="incarnation", detail=detail, engine=us.engine_id))
        raise HandshakeError(f"refused (incarnation): {detail}")
    record = await _expect(Record, connection, consumer, timeout_s, MAX_FRAME_BYTES)
    await _compare(connection, us.record, record, consumer)
    await connection.send(us.record, timeout_s)
    return hello.consumer, record


Role = Literal["consumer", "producer", "consumer's frames", "producer's frames"]


def _mac(token: bytes, role: Role, hello: Hello, challenge: Challenge) -> bytes:
    bound = msgspec.msgpack.encode((role, hello.version, hello.consumer, hello.producer, hello.nonce, challenge.nonce))
    return hmac.digest(token, bound, "sha256")


def _frame_keys(token: bytes, hello: Hello, challenge: Challenge) -> tuple[bytes, bytes]:
    """The keys that this session's frames are tagged with: the consumer's, and the producer's."""
    return _mac(token, "consumer's frames", hello, challenge), _mac(token, "producer's frames", hello, challenge)


async def _expect(kind: type[F], connection: Connection, peer: str, timeout_s: float, limit: int) -> F:
    frame = await connection.receive(timeout_s, limit)
    if isinstance(frame, Refused):
        raise _refusal(frame, peer, proved=connection.sealed)
    if not isinstance(frame, kind):
        raise WireError(f"{peer} sent a {type(frame).__name__} where a {kind.__name__} was due")
    return frame


def _refusal(refused: Refused, peer: str, *, proved: bool) -> HandshakeError:
    """What the peer's words mean on this side. What has not been proved could be anybody's."""
    if refused.reason == "incompatible":
        return IncompatibleError(peer, {field: (ours, theirs) for field, (theirs, ours) in refused.differences.items()})
    named = None if refused.engine is None else refused.engine.name
    if refused.reason == "incarnation" and proved and named == peer.rpartition("@")[0]:
        return WrongIncarnationError(f"{peer} is gone: {refused.detail}")
    return HandshakeError(f"{peer} refused ({refused.reason}): {refused.detail}")


async def _refuse(connection: Connection, reason: str, detail: str) -> NoReturn:
    await connection.say_last(Refused(reason=reason, detail=detail))
    raise HandshakeError(f"refused ({reason}): {detail}")


async def _compare(connection: Connection, ours: Record, theirs: Record, peer: str) -> None:
    differences = find_differences(ours.compatibility, theirs.compatibility)
    if differences:
        await connection.say_last(Refused(reason="incompatible", detail="the records differ", differences=differences))
        raise IncompatibleError(peer, differences)
    try:
        check_geometry(theirs.geometry, peer)
    except PlanError as error:
        await _refuse(connection, "geometry", str(error))
    if theirs.lease_s <= 0:
        await _refuse(connection, "lease", f"{peer} grants leases of {theirs.lease_s} s")
