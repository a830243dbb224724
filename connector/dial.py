"""Opening a session with a producer: TCP, the handshake, and a transport that reaches its pages."""

from __future__ import annotations

import asyncio
import os
import ssl

import msgspec

from connector.connection import READ_AHEAD_BYTES, Connection
from connector.errors import HandshakeError, UnreachableError, WireError
from connector.handshake import TLS_ADVICE, Identity, greet
from connector.identity import EngineId
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.ports import Endpoint
from connector.records import offer_record
from connector.wire import Record, Refused

ANSWERED_PLAIN = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
"""What OpenSSL says when the answer is not TLS; which of them depends on its version."""


class Session(msgspec.Struct, frozen=True):
    """A producer that has proved itself and can be read from."""

    connection: Connection
    record: Record
    data_peer: PeerKey


async def dial(
    us: Identity,
    producer: EngineId,
    endpoint: Endpoint,
    lanes: Lanes,
    data_peer: PeerKey | None,
    timeout_s: float,
    tls: ssl.SSLContext | None,
) -> Session:
    """Open a session. `data_peer` is kept if there is one (the pages of one incarnation do not move); otherwise the
    first transport that reaches the producer is connected. The producer has to prove itself within `timeout_s`, and
    then to answer with its record within as long.

    Raises:
        WrongIncarnationError: another incarnation listens there.
        HandshakeError: nothing listens there, either end refused the other, or an answer was malformed or late.
        UnreachableError: no transport reaches the producer.
    """
    connection = await _prove(us, producer, endpoint, timeout_s, tls)
    try:
        record = await offer_record(connection, us, producer, timeout_s)
        return Session(connection, record, data_peer or lanes.connect(record.transports, str(producer)))
    except UnreachableError as error:
        await connection.say_last(Refused(reason="unreachable", detail=str(error)))
        raise
    except WireError as error:
        await connection.say_last(Refused(reason="malformed", detail=str(error)))
        raise HandshakeError(f"the handshake with {producer} at {endpoint} broke off: {error}") from error
    except BaseException:
        await connection.close()
        raise


async def _prove(
    us: Identity, producer: EngineId, endpoint: Endpoint, timeout_s: float, tls: ssl.SSLContext | None
) -> Connection:
    """A connection both of whose ends have proved themselves, within one deadline. Who does not is told nothing."""
    connection: Connection | None = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await _reach(producer, endpoint, tls)
            await greet(connection, us, producer, timeout_s)
            return connection
    except BaseException as error:
        if connection is not None:
            connection.abort()
        if isinstance(error, TimeoutError) and connection is None:
            raise HandshakeError(
                f"{producer} cannot be reached at {endpoint}: no answer within {timeout_s:g} s"
            ) from None
        if isinstance(error, TimeoutError):
            raise HandshakeError(
                f"{producer} at {endpoint} has not proved itself within {timeout_s:g} s; is it stopped, or overloaded?"
            ) from None
        if isinstance(error, WireError):
            raise HandshakeError(
                f"the handshake with {producer} at {endpoint} broke off: {error}{_why_a_stranger_hangs_up(tls)}"
            ) from error
        raise


async def _reach(producer: EngineId, endpoint: Endpoint, tls: ssl.SSLContext | None) -> Connection:
    try:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls, limit=READ_AHEAD_BYTES)
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(
            f"the certificate of {producer} at {endpoint} is not good: {error.verify_message}; {TLS_ADVICE}"
        ) from error
    except ssl.SSLError as error:
        if error.reason in ANSWERED_PLAIN:
            raise HandshakeError(f"this end speaks TLS and {producer} at {endpoint} does not; {TLS_ADVICE}") from error
        raise HandshakeError(
            f"{producer} at {endpoint} does not agree on TLS ({error.reason}); {TLS_ADVICE}"
        ) from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = f"; {TLS_ADVICE}" if tls is not None and isinstance(error, ConnectionResetError) else ""
        raise HandshakeError(f"{producer} cannot be reached at {endpoint}: {why or 'it hung up'}{hint}") from error
    return Connection(reader, writer, str(producer))


def _why_a_stranger_hangs_up(tls: ssl.SSLContext | None) -> str:
    """A listener tells a stranger nothing: what to look at is all that can be said on this side."""
    if tls is None:
        return ""
    return "; if it has refused this end's certificate, its log says why: " + TLS_ADVICE
