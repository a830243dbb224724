"""Opening a session with a producer: TCP, the handshake, and a transport that reaches its pages."""

from __future__ import annotations

import asyncio
import os
import ssl

import msgspec

from connector.connection import Connection
from connector.errors import HandshakeError, UnreachableError, WireError
from connector.handshake import Identity, greet
from connector.identity import EngineId
from connector.imports import PeerKey
from connector.lanes import Lanes
from connector.ports import Endpoint
from connector.wire import Record, Refused

_ADVICE = "both workers need the same connector.tls_cert, tls_key and tls_ca settings, or none"


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
    first transport that reaches the producer is connected. Each answer has to come within `timeout_s`.

    Raises:
        HandshakeError: nothing listens there, either end refused the other, or an answer was malformed or late.
        UnreachableError: no transport reaches the producer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
    except TimeoutError:
        raise HandshakeError(f"{producer} cannot be reached at {endpoint}: no answer within {timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise HandshakeError(f"{producer} at {endpoint} does not agree on TLS ({error.reason}); {_ADVICE}") from error
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = f"; {_ADVICE}" if tls is not None and isinstance(error, ConnectionResetError) else ""
        raise HandshakeError(f"{producer} cannot be reached at {endpoint}: {why or 'it hung up'}{hint}") from error
    connection = Connection(reader, writer, str(producer))
    try:
        record = await greet(connection, us, producer, timeout_s)
        return Session(connection, record, data_peer or lanes.connect(record.transports, str(producer)))
    except UnreachableError as error:
        await connection.say_last(Refused(reason="unreachable", detail=str(error)))
        raise
    except WireError as error:
        await connection.say_last(Refused(reason="malformed", detail=str(error)))
        hint = "" if connection.sealed else f"; {_ADVICE}"
        raise HandshakeError(f"the handshake with {producer} at {endpoint} broke off: {error}{hint}") from error
    except BaseException:
        await connection.close()
        raise
