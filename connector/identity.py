"""Who speaks: engine ids with incarnations, and transfer ids."""

from __future__ import annotations

import secrets

import msgspec


class EngineId(msgspec.Struct, frozen=True, order=True):
    """A worker's name and its incarnation: 64 random bits, new at every start.

    A worker that comes back is another peer. Never host:port, never a request id.
    """

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}@{self.incarnation:016x}"


def new_engine_id(name: str) -> EngineId:
    """A fresh incarnation of the worker called `name`."""
    return EngineId(name, secrets.randbits(64))


def new_transfer_id() -> str:
    """Minted by the consumer, once per attempt: a retry is a new transfer."""
    return secrets.token_hex(16)
