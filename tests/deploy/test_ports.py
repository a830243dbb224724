import socket
from collections.abc import Iterator

import pytest

from deploy.errors import PortBusyError, SettingError
from deploy.ports import gateway_ports, refuse_busy_ports
from deploy.settings import GatewaySettings


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_gateways_take_consecutive_ports() -> None:
    assert gateway_ports(GatewaySettings(count=3, port=9000)) == [9000, 9001, 9002]
    assert gateway_ports(GatewaySettings(count=2, port=0)) == [0, 0]


def test_ports_that_do_not_exist_are_refused() -> None:
    with pytest.raises(SettingError, match="would need port 65536"):
        gateway_ports(GatewaySettings(count=2, port=65535))


def test_a_busy_port_is_refused_by_its_number(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(PortBusyError, match=f"port {port} on 127.0.0.1 is already in use"):
        refuse_busy_ports(GatewaySettings(port=port))


def test_every_gateway_s_port_is_looked_at(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    with pytest.raises(PortBusyError) as refusal:
        refuse_busy_ports(GatewaySettings(count=2, port=port - 1))
    assert refusal.value.port in (port - 1, port)


def test_a_free_port_is_free_again_after_looking(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    listener.close()
    refuse_busy_ports(GatewaySettings(port=port))
    refuse_busy_ports(GatewaySettings(port=port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingError, match=r"cannot listen on gateway.host '192.0.2.77'"):
        refuse_busy_ports(GatewaySettings(host="192.0.2.77", port=9000))
