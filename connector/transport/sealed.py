"""Descriptions that travel with a digest of themselves.

UCX parses addresses and keys without checking them, so that a damaged byte would crash this process. The digest keeps
damage away from it; it does not prove who wrote the description.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from connector.errors import UnreachableError

T = TypeVar("T")


class _Sealed(msgspec.Struct, frozen=True):
    body: bytes
    digest: bytes


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()


def seal(description: msgspec.Struct) -> bytes:
    """`description` as bytes."""
    body = msgspec.msgpack.encode(description)
    return msgspec.msgpack.encode(_Sealed(body, _digest(body)))


def unseal(sealed: bytes, kind: type[T], transport: str) -> T:
    """What `seal` was given. `transport` names the transport in the error.

    Raises:
        UnreachableError: the bytes are damaged, or are no such description.
    """
    try:
        opened = msgspec.msgpack.decode(sealed, type=_Sealed)
        if opened.digest != _digest(opened.body):
            raise UnreachableError(f"the peer's {transport} description is damaged: its digest does not match")
        return msgspec.msgpack.decode(opened.body, type=kind)
    except msgspec.MsgspecError as error:
        raise UnreachableError(f"the peer's {transport} description is damaged: {error}") from error
