"""TLS for the control connections: both ends show a certificate of the cluster's own authority.

It hides what is said, and keeps whoever has no certificate from saying anything at all; who is who, and that nobody
meddles, is what the handshake proves, with or without it. Certificates are not bound to addresses, which change.
"""

from __future__ import annotations

import ssl

import msgspec

from connector.config import ConnectorConfig
from connector.errors import ConnectorError


class Tls(msgspec.Struct, frozen=True):
    """What either side of a connection needs; both None without TLS."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


def load_tls(config: ConnectorConfig) -> Tls:
    """The contexts that `config` asks for.

    Raises:
        ConnectorError: a file cannot be read, or is not what it should be.
    """
    if not config.tls_ca:
        return Tls()
    return Tls(
        server=_context(ssl.PROTOCOL_TLS_SERVER, config),
        client=_context(ssl.PROTOCOL_TLS_CLIENT, config),
    )


def _context(protocol: int, config: ConnectorConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(config.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConnectorError(f"connector.tls_ca {config.tls_ca!r} cannot be used: {error}") from error
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConnectorError(
            f"connector.tls_cert {config.tls_cert!r} with tls_key {config.tls_key!r} cannot be used: {error}"
        ) from error
    return context
