"""Every edge of a listener's way from a wish to an endpoint."""

from __future__ import annotations

import errno
import os

import pytest

from connector import Endpoint, ListenerError, ListenOn
from connector.ports import ListenerState, PortSearch


def search(*ports: int) -> PortSearch:
    return PortSearch(ListenOn("10.0.0.1", range(ports[0], ports[-1] + 1)))


def busy() -> OSError:
    return OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def test_there_is_no_endpoint_before_it_listens() -> None:
    one = search(0)
    assert (one.next_port(), one.endpoint) == (0, None)
    assert one.listening(43210) == one.endpoint == Endpoint("10.0.0.1", 43210)
    assert one.state is ListenerState.LISTENING


def test_a_range_is_tried_in_order_and_to_its_end() -> None:
    one = search(9000, 9002)
    tried = []
    for _ in range(2):
        tried.append(one.next_port())
        one.refused(busy())
    tried.append(one.next_port())
    with pytest.raises(ListenerError, match=r"every port from 9000 to 9002 on 10\.0\.0\.1 is in use; widen"):
        one.refused(busy())
    assert tried == [9000, 9001, 9002]
    assert one.state is ListenerState.REFUSED


@pytest.mark.parametrize(
    ("port", "number", "message"),
    [
        (9000, errno.EADDRINUSE, r"port 9000 on 10\.0\.0\.1 is in use"),
        (0, errno.EADDRINUSE, r"no free port on 10\.0\.0\.1"),
        (80, errno.EACCES, "ports below 1024 need privileges"),
        (9000, errno.EADDRNOTAVAIL, "is not an address of this host"),
        (9000, errno.ENOBUFS, "No buffer space"),
    ],
)
def test_a_refusal_is_told_at_once(port: int, number: int, message: str) -> None:
    with pytest.raises(ListenerError, match=message):
        search(port).refused(OSError(number, os.strerror(number)))


def test_what_no_other_port_would_mend_ends_a_range_too() -> None:
    with pytest.raises(ListenerError, match="is not an address of this host"):
        search(9000, 9100).refused(OSError(errno.EADDRNOTAVAIL, "no"))


@pytest.mark.parametrize("over", ["listening", "refused", "closed"])
def test_nothing_is_allocated_when_it_is_over(over: str) -> None:
    one = search(9000)
    if over == "listening":
        one.listening(9000)
    elif over == "refused":
        with pytest.raises(ListenerError):
            one.refused(busy())
    else:
        one.close()
        one.close()
    with pytest.raises(ListenerError, match=f"is {over}; nothing is allocated any more"):
        one.next_port()
    with pytest.raises(ListenerError):
        one.listening(9000)
