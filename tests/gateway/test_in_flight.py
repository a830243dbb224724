from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.in_flight import InFlight
from tests.clock import in_virtual_time


@in_virtual_time
async def test_an_empty_one_drains_at_once() -> None:
    await InFlight().drain(0)


@in_virtual_time
async def test_nobody_gets_in_while_it_drains() -> None:
    in_flight = InFlight()
    await in_flight.drain(0)
    with pytest.raises(ApiError) as caught, in_flight.enter():
        raise AssertionError("let in")
    assert caught.value.status == 503
    assert caught.value.headers == {"retry-after": "1"}


@in_virtual_time
async def test_those_inside_are_told_after_the_grace() -> None:
    in_flight = InFlight()
    with in_flight.enter() as cut:
        await in_flight.drain(3.0)
        assert cut.result().status == 503
