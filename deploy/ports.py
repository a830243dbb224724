"""The gateways' ports: refused before anything starts when one is busy. The gateway's own bind has the last word."""

from __future__ import annotations

import errno
import socket

from deploy.errors import PortBusyError, SettingError
from deploy.settings import GatewaySettings


def gateway_ports(gateway: GatewaySettings) -> list[int]:
    """The consecutive ports of all gateways, or 0 for each.

    Raises:
        SettingError: they run past 65535.
    """
    if gateway.port == 0:
        return [0] * gateway.count
    last = gateway.port + gateway.count - 1
    if last > 65535:
        raise SettingError(
            f"{gateway.count} gateways from port {gateway.port} on would need port {last}; the last is 65535"
        )
    return list(range(gateway.port, last + 1))


def refuse_busy_ports(gateway: GatewaySettings) -> None:
    """Try to bind every gateway's port and let go of it again.

    Raises:
        PortBusyError: one is taken.
        SettingError: the host is no address of this machine, or the port is not for us.
    """
    for port in gateway_ports(gateway):
        try:
            family, _, _, _, address = socket.getaddrinfo(
                gateway.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # A port in TIME_WAIT is free for a server.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortBusyError(gateway.host, port) from None
            raise SettingError(
                f"cannot listen on gateway.host {gateway.host!r}, port {port}: {error.strerror}"
            ) from error
