"""Which transports this worker has, and which one reaches a peer.

`auto` prefers shared memory and takes what works; a required transport that does not work is an error that says why,
never a silent fall-back to a slower one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from connector.config import ConnectorConfig
from connector.errors import RegistrationError, TransportError, UnreachableError
from connector.imports import PeerKey
from connector.transport.base import Memory, Transport

logger = logging.getLogger(__name__)

AUTO = "auto"
Builder = Callable[[], Transport]


def _build_shm(name: str) -> Transport:
    from connector.transport.shm import ShmTransport  # not before it is used: importing pages must not load UCX

    return ShmTransport(name)


def _build_ucx(name: str, library: str) -> Transport:
    from connector.transport.ucx import UcxTransport

    return UcxTransport(name, library)


def _build_nixl(name: str) -> Transport:
    from connector.transport.nixl import NixlTransport

    return NixlTransport(name)


def builders(name: str, config: ConnectorConfig) -> dict[str, Builder]:
    """The transports that `config` allows, in order of preference. `name` is for diagnostics."""
    every: dict[str, Builder] = {
        "shm": lambda: _build_shm(name),
        "ucx": lambda: _build_ucx(name, config.ucx_library),
        "nixl": lambda: _build_nixl(name),
    }
    # NIXL's UCX and ours exclude each other, so that it is never one of several.
    wanted = ("shm", "ucx") if config.transport == AUTO else (config.transport,)
    return {one: every[one] for one in wanted}


def open_transports(wanted: Mapping[str, Builder], memory: Memory) -> dict[str, Transport]:
    """Build each transport and register `memory` with it. Those that this host does not offer are left out, and logged.

    Raises:
        RegistrationError: none works; the message says why for each.
    """
    usable: dict[str, Transport] = {}
    unusable: dict[str, str] = {}
    for name, build in wanted.items():
        try:
            transport = build()
            try:
                transport.register(memory)
            except BaseException:
                transport.close()
                raise
        except (TransportError, ImportError) as error:
            unusable[name] = str(error)
            logger.warning("transport %s cannot be used by this worker: %s", name, error)
        else:
            usable[name] = transport
    if not usable:
        raise RegistrationError(f"no transport can be used by this worker ({_reasons(unusable)})")
    return usable


def choose(transports: Mapping[str, Transport], offered: Mapping[str, bytes], peer: str) -> PeerKey:
    """Connect to a peer by the first of our transports that reaches it. `offered` are its descriptions.

    Raises:
        UnreachableError: none does; the message says why for each.
    """
    reasons: dict[str, str] = {}
    for name, transport in transports.items():
        if name not in offered:
            reasons[name] = f"the peer offers only {', '.join(offered) or 'nothing'}"
            continue
        try:
            return name, transport.connect(offered[name])
        except UnreachableError as error:
            reasons[name] = str(error)
    raise UnreachableError(f"no transport reaches {peer} ({_reasons(reasons)})")


def _reasons(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())
