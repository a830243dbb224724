"""Who are you, and do you know the token?

Both ends prove the cluster token by an HMAC over fresh nonces of both, bound to both engine ids (name and incarnation)
and to the role, so a proof can be neither replayed, nor reflected, nor used towards another worker. The consumer proves
first, for the producer that it names: a stranger learns nothing of a listener but its protocol version. Both proofs
made, every further frame carries a tag under keys of this session, so that nobody on the way can add, change, repeat or
drop one unseen. Only then are refusals given reasons, and `connector.records` exchanged.

What comes before the proofs could be anybody's: it is never an `IncompatibleError` nor a `WrongIncarnationError` (which
means that a process has ended), and no line of a log is made of it as it is.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal, TypeVar

import msgspec

from connector.connection import Connection
from connector.errors import HandshakeError, IncompatibleError, WireError, WrongIncarnationError
from connector.identity import EngineId
from connector.wire import (
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
Role = Literal["consumer", "producer", "consumer's frames", "producer's frames"]

UNAUTHORIZED = Refused(reason="unauthorized", detail="the cluster token is not known")
SPEAKS_TLS = Refused(reason="tls", detail="this end speaks TLS")
SPEAKS_PLAIN = Refused(reason="tls", detail="this end does not speak TLS")
TLS_ADVICE = "both workers need the same connector.tls_cert, tls_key and tls_ca settings, or none"
MAX_QUOTED = 200


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This end. `token` is the cluster's shared secret."""

    engine_id: EngineId
    token: bytes
    record: Record

    def __repr__(self) -> str:
        return f"Identity({self.engine_id})"  # a log is no place for the token


async def greet(connection: Connection, us: Identity, producer: EngineId, timeout_s: float) -> None:
    """The consumer's proof, and the producer's. Every answer has to come within `timeout_s`.

    Raises:
        HandshakeError: either end refused the other.
        WireError: the connection broke, or an answer was malformed, oversized or late.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Hello(version=PROTOCOL_VERSION, consumer=us.engine_id, producer=producer, nonce=nonce)
    await connection.send(hello, timeout_s)
    challenge = await expect(Challenge, connection, str(producer), timeout_s, MAX_GREETING_BYTES)
    await connection.send(Proof(mac=_mac(us.token, "consumer", hello, challenge)), timeout_s)
    proof = await expect(Proof, connection, str(producer), timeout_s, MAX_GREETING_BYTES)
    if not hmac.compare_digest(proof.mac, _mac(us.token, "producer", hello, challenge)):
        await connection.say_last(UNAUTHORIZED)
        raise HandshakeError(f"refused (unauthorized): {producer} does not know the cluster token")
    ours, theirs = _frame_keys(us.token, hello, challenge)
    connection.seal(ours, theirs)


async def answer(connection: Connection, us: Identity, timeout_s: float) -> Hello:
    """The producer's part. Returns who has proved itself, and whom it means to reach.

    Raises:
        HandshakeError: either end refused the other.
        WireError: the connection broke, or a frame was malformed, oversized or late.
    """
    hello = await expect(Hello, connection, connection.peer, timeout_s, MAX_GREETING_BYTES)
    if hello.version != PROTOCOL_VERSION:
        detail = f"version {PROTOCOL_VERSION} of the protocol is spoken here, not version {hello.version}"
        await connection.say_last(Refused(reason="protocol_version", detail=f"{detail}; run the same release on both"))
        raise HandshakeError(f"refused (protocol_version): {detail}")
    challenge = Challenge(nonce=secrets.token_bytes(NONCE_BYTES))
    await connection.send(challenge, timeout_s)
    proof = await expect(Proof, connection, connection.peer, timeout_s, MAX_GREETING_BYTES)
    known = hmac.compare_digest(proof.mac, _mac(us.token, "consumer", hello, challenge))
    if not known or len(hello.nonce) != NONCE_BYTES:
        await connection.say_last(UNAUTHORIZED)
        raise HandshakeError(
            f"refused (unauthorized): who calls itself {printable(str(hello.consumer))} does not know the cluster token"
        )
    await connection.send(Proof(mac=_mac(us.token, "producer", hello, challenge)), timeout_s)
    theirs, ours = _frame_keys(us.token, hello, challenge)
    connection.seal(ours, theirs)
    return hello


async def expect(kind: type[F], connection: Connection, peer: str, timeout_s: float, limit: int) -> F:
    """The next frame, which is due to be a `kind`.

    Raises:
        HandshakeError: the peer has refused; of which kind, if it has proved itself.
        WireError: it is something else, or did not come.
    """
    frame = await connection.receive(timeout_s, limit)
    if isinstance(frame, Refused):
        raise _refusal(frame, peer) if connection.sealed else _unproved_refusal(frame, peer)
    if not isinstance(frame, kind):
        raise WireError(f"{peer} sent a {type(frame).__name__} where a {kind.__name__} was due")
    return frame


def printable(text: str) -> str:
    """What somebody unknown has said, so that it is one short line of a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_QUOTED])


def _mac(token: bytes, role: Role, hello: Hello, challenge: Challenge) -> bytes:
    bound = msgspec.msgpack.encode((role, hello.version, hello.consumer, hello.producer, hello.nonce, challenge.nonce))
    return hmac.digest(token, bound, "sha256")


def _frame_keys(token: bytes, hello: Hello, challenge: Challenge) -> tuple[bytes, bytes]:
    """The keys that this session's frames are tagged with: the consumer's, and the producer's."""
    return _mac(token, "consumer's frames", hello, challenge), _mac(token, "producer's frames", hello, challenge)


def _refusal(refused: Refused, peer: str) -> HandshakeError:
    if refused.reason == "incompatible":
        return IncompatibleError(peer, {field: (ours, theirs) for field, (theirs, ours) in refused.differences.items()})
    named = None if refused.engine is None else refused.engine.name
    if refused.reason == "incarnation" and named == peer.rpartition("@")[0]:
        return WrongIncarnationError(f"{peer} is gone: {refused.detail}")
    return HandshakeError(f"{peer} refused ({refused.reason}): {refused.detail}")


def _unproved_refusal(refused: Refused, peer: str) -> HandshakeError:
    if refused == SPEAKS_TLS:
        return HandshakeError(f"{peer} speaks TLS and this end does not; {TLS_ADVICE}")
    return HandshakeError(f"{peer} refused ({printable(refused.reason)}): {printable(refused.detail)}")
