"""Do the two ends' pages mean the same? Each sends its record and compares, after both have proved themselves.

An end that refuses says why in a `Refused` frame before it closes, so that the reason stands in both logs.
"""

from __future__ import annotations

from typing import NoReturn

from connector.compatibility import find_differences
from connector.connection import Connection
from connector.errors import HandshakeError, IncompatibleError, PlanError
from connector.geometry import check_geometry
from connector.handshake import Identity, expect
from connector.identity import EngineId
from connector.wire import MAX_FRAME_BYTES, Hello, Record, Refused


async def offer_record(connection: Connection, us: Identity, producer: EngineId, timeout_s: float) -> Record:
    """The consumer's part. Returns the producer's record. The answer has to come within `timeout_s`.

    Raises:
        WrongIncarnationError: another incarnation listens there.
        IncompatibleError: the compatibility records differ.
        HandshakeError: either end refused the other for another reason.
        WireError: the connection broke, or the answer was malformed, oversized or late.
    """
    await connection.send(us.record, timeout_s)
    record = await expect(Record, connection, str(producer), timeout_s, MAX_FRAME_BYTES)
    await _compare(connection, us.record, record, str(producer))
    return record


async def answer_record(connection: Connection, us: Identity, hello: Hello, timeout_s: float) -> Record:
    """The producer's part, towards whoever has proved `hello`. Returns the consumer's record.

    Raises:
        IncompatibleError: the compatibility records differ.
        HandshakeError: either end refused the other for another reason.
        WireError: the connection broke, or a frame was malformed, oversized or late.
    """
    consumer = str(hello.consumer)
    if hello.producer != us.engine_id:
        detail = f"{consumer} asked for {hello.producer}, but this is {us.engine_id}"
        await connection.say_last(Refused(reason="incarnation", detail=detail, engine=us.engine_id))
        raise HandshakeError(f"refused (incarnation): {detail}")
    record = await expect(Record, connection, consumer, timeout_s, MAX_FRAME_BYTES)
    await _compare(connection, us.record, record, consumer)
    await connection.send(us.record, timeout_s)
    return record


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
