from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.lease import Lease


def test_it_ends_lease_s_after_the_last_renewal() -> None:
    lease = Lease(100.0, 30.0)
    assert not lease.expired(129.9)
    assert lease.expired(130.0)
    lease.renew(120.0)
    assert not lease.expired(149.9)
    assert lease.expired(150.0)


def test_nothing_brings_an_ended_lease_back() -> None:
    lease = Lease(100.0, 30.0)
    lease.end()
    lease.renew(100.0)
    assert lease.expired(100.0)


@given(
    skew=st.floats(-1e6, 1e6),
    steps=st.lists(st.tuples(st.floats(0, 40), st.floats(0, 60)), max_size=20),
)
def test_the_consumers_deadline_is_never_later_than_the_producers(
    skew: float, steps: list[tuple[float, float]]
) -> None:
    """The clocks have different epochs; every message takes its time, and renewals may overtake each other."""
    consumer_now = 0.0
    consumer, producer = Lease(consumer_now, 30.0), Lease(consumer_now + skew, 30.0)
    for pause, delay in steps:
        consumer_now += pause
        producer.renew(consumer_now + delay + skew)
        consumer.renew(consumer_now)
        assert consumer.deadline + skew <= producer.deadline + 1e-6
