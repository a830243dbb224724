from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from connector import Endpoint, ListenerError, Listeners, ListenOn

LOCAL = "127.0.0.1"
ANY = range(1)


@pytest.fixture
def listeners() -> Iterator[Listeners]:
    listeners = Listeners()
    yield listeners
    listeners.close()


def connects(endpoint: Endpoint) -> bool:
    with socket.socket() as client:
        return client.connect_ex((endpoint.host, endpoint.port)) == 0


def test_any_port_is_reachable_as_soon_as_it_is_known(listeners: Listeners) -> None:
    (listener,) = listeners.allocate(ListenOn(LOCAL, ANY))
    assert listener.endpoint.host == LOCAL
    assert listener.endpoint.port != 0
    assert connects(listener.endpoint)


def test_a_busy_fixed_port_fails_at_once_and_names_it(listeners: Listeners) -> None:
    (busy,) = listeners.allocate(ListenOn(LOCAL, ANY))
    port = busy.endpoint.port
    with pytest.raises(ListenerError, match=f"port {port} on {LOCAL} is in use; choose another one"):
        Listeners().allocate(ListenOn(LOCAL, range(port, port + 1)))


def test_a_port_that_is_bound_but_does_not_listen_yet_is_no_success(listeners: Listeners) -> None:
    """SO_REUSEADDR lets two sockets bind the same port; only one of them can listen."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((LOCAL, 0))
        port = other.getsockname()[1]
        (listener,) = listeners.allocate(ListenOn(LOCAL, range(port, port + 1)))
        with pytest.raises(OSError, match="Address already in use"):
            other.listen()
        assert connects(listener.endpoint)


def test_a_range_is_tried_in_order_until_a_port_is_free(listeners: Listeners) -> None:
    (first,) = listeners.allocate(ListenOn(LOCAL, ANY))
    ports = range(first.endpoint.port, min(first.endpoint.port + 20, 65536))
    (second,) = Listeners().allocate(ListenOn(LOCAL, ports))
    try:
        assert second.endpoint.port in ports
        assert second.endpoint.port != first.endpoint.port
        assert connects(second.endpoint)
    finally:
        second.socket.close()


def test_a_range_without_a_free_port_says_so(listeners: Listeners) -> None:
    (first,) = listeners.allocate(ListenOn(LOCAL, ANY))
    port = first.endpoint.port
    second_port = port + 1
    with socket.socket() as other:
        try:
            other.bind((LOCAL, second_port))
            other.listen()
        except OSError:
            pass  # somebody else has it: just as busy
        with pytest.raises(ListenerError, match=f"every port from {port} to {second_port} on {LOCAL} is in use"):
            Listeners().allocate(ListenOn(LOCAL, range(port, second_port + 1)))


def test_several_listeners_are_all_or_nothing(listeners: Listeners) -> None:
    first, second = listeners.allocate(ListenOn(LOCAL, ANY), ListenOn(LOCAL, ANY))
    assert first.endpoint != second.endpoint
    port = first.endpoint.port
    second.socket.close()
    with pytest.raises(ListenerError, match=str(port)):
        Listeners().allocate(
            ListenOn(LOCAL, range(second.endpoint.port, second.endpoint.port + 1)),
            ListenOn(LOCAL, range(port, port + 1)),
        )
    assert not connects(second.endpoint)


def test_closing_twice_is_harmless_and_ends_every_listener() -> None:
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn(LOCAL, ANY))
    listeners.close()
    listeners.close()
    assert not connects(listener.endpoint)


def test_allocating_after_the_close_is_refused() -> None:
    listeners = Listeners()
    listeners.close()
    with pytest.raises(ListenerError, match="were closed"):
        listeners.allocate(ListenOn(LOCAL, ANY))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_never_advertised(listeners: Listeners, host: str) -> None:
    with pytest.raises(ListenerError, match="cannot connect to a wildcard"):
        listeners.allocate(ListenOn(host, ANY))


def test_an_address_of_another_host_is_refused(listeners: Listeners) -> None:
    with pytest.raises(ListenerError, match=r"192\.0\.2\.1 is not an address of this host"):
        listeners.allocate(ListenOn("192.0.2.1", ANY))


def test_a_name_that_nobody_knows_is_refused(listeners: Listeners) -> None:
    with pytest.raises(ListenerError, match=r"cannot listen on 'no such host'"):
        listeners.allocate(ListenOn("no such host", ANY))


def test_a_port_can_be_taken_again_right_after_its_connections_were_closed() -> None:
    """Connections in TIME_WAIT do not keep a restarted worker from its fixed port."""
    port = _free_port()
    first = Listeners()
    (listener,) = first.allocate(ListenOn(LOCAL, range(port, port + 1)))
    with socket.create_connection((LOCAL, port)) as client:
        listener.socket.setblocking(True)
        accepted, _ = listener.socket.accept()
        accepted.close()
        assert client.recv(1) == b""
    first.close()
    second = Listeners()
    assert second.allocate(ListenOn(LOCAL, range(port, port + 1)))[0].endpoint.port == port
    second.close()


def _free_port() -> int:
    listeners = Listeners()
    (listener,) = listeners.allocate(ListenOn(LOCAL, ANY))
    listeners.close()
    return listener.endpoint.port


ALLOCATE = """
import sys
from connector.listener import Listeners
from connector.ports import ListenOn
print("ready", flush=True)
sys.stdin.readline()
(listener,) = Listeners().allocate(ListenOn("127.0.0.1", range(int(sys.argv[1]), int(sys.argv[2]))))
print(listener.endpoint.port, flush=True)
sys.stdin.readline()
"""


@pytest.mark.process
@pytest.mark.parametrize("ports", [ANY, range(21000, 21100)])
def test_processes_that_allocate_at_once_get_distinct_reachable_ports(ports: range) -> None:
    command = [sys.executable, "-c", ALLOCATE, str(ports.start), str(ports.stop)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(32)]
    try:
        assert [_read_line(process) for process in processes] == ["ready"] * 32
        for process in processes:
            _write_line(process)
        taken = [int(_read_line(process)) for process in processes]
        assert len(set(taken)) == 32
        assert ports == ANY or all(port in ports for port in taken)
        assert all(connects(Endpoint(LOCAL, port)) for port in taken)
    finally:
        for process in processes:
            process.communicate("done\n", timeout=60)
    assert [process.returncode for process in processes] == [0] * 32


def _read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _write_line(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
