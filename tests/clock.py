"""Time for tests: a clock that is set by hand, and an event loop that runs on it.

In virtual time, waiting costs nothing: when the loop has nothing to do until a timer, and no descriptor is readable,
the clock jumps there. A test of thirty-second leases takes milliseconds, and what a loaded machine delays is not time.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

PATIENCE_S = 0.002
"""Real seconds that descriptors get before the clock jumps: bytes on the loopback are there long before."""
STUCK_S = 60.0
"""Real seconds after which a loop without timers and without input is not going to go on."""
FIRST_STEP_S, LAST_STEP_S = 0.01, 1.0
"""Virtual seconds between two looks at a condition."""


class FakeClock:
    """Seconds; call it to read it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0
        self.now += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(STUCK_S)
            if not ready:
                raise RuntimeError(f"the loop has no timer, and nothing came in for {STUCK_S} real seconds")
            return ready
        ready = super().select(min(PATIENCE_S, timeout))
        if not ready:
            self._clock.advance(timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is a `FakeClock` that jumps from timer to timer."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(_JumpingSelector(clock))
        self._virtual_clock = clock

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_clock()


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a `VirtualTimeLoop`; `asyncio.get_running_loop().time` is its clock."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(FakeClock())) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    """Virtual seconds."""
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], bool], within_s: float = 1000.0) -> None:
    """Let virtual time pass until `condition` holds; `AssertionError` when it does not `within_s` virtual seconds."""
    loop = asyncio.get_running_loop()
    end, step_s = loop.time() + within_s, FIRST_STEP_S
    for _ in iter(condition, True):
        assert loop.time() < end, f"still not so after {within_s} virtual seconds"
        await asyncio.sleep(step_s)
        step_s = min(2 * step_s, LAST_STEP_S)
