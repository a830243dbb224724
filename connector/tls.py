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
        ConnectorError: a file cannot be read or is not what it should be, or the certificate is not one of `tls_ca` or
            its time is over.
    """
    if not config.tls_ca:
        return Tls()
    server, client = _context(ssl.PROTOCOL_TLS_SERVER, config), _context(ssl.PROTOCOL_TLS_CLIENT, config)
    server.num_tickets = 0  # sessions are not resumed: every connection shows its certificates
    _check_own(server, client, config)
    return Tls(server=server, client=client)


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
        context.load_cert_chain(config.tls_cert, config.tls_key, password=_no_password)
    except (OSError, ssl.SSLError, _Encrypted) as error:
        why = error if str(error) else "the key is encrypted; store it without a password, readable by this user only"
        raise ConnectorError(
            f"connector.tls_cert {config.tls_cert!r} with tls_key {config.tls_key!r} cannot be used: {why}"
        ) from error
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted  # or OpenSSL would ask on the terminal, and wait


def _check_own(server: ssl.SSLContext, client: ssl.SSLContext, config: ConnectorConfig) -> None:
    """Shake hands with ourselves: what we would refuse of a peer, every peer would refuse of us."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    try:
        while ends:
            end = ends.pop(0)
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                ends.append(end)
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        raise ConnectorError(
            f"connector.tls_cert {config.tls_cert!r} is not good for peers that trust tls_ca {config.tls_ca!r}: {why}"
        ) from error
