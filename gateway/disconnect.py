"""Work for a client, for as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.errors import ApiError

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to tell."""


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], timeout_s: float, cut: asyncio.Future[ApiError]
) -> T:
    """The result of `work`. It is cancelled, and has ended when this returns, as soon as the client leaves, the time is
    up, or `cut` says why it has to end. The request's body must have been read.

    Raises:
        ClientGone: the client has left.
        ApiError: 504 after `timeout_s`, or what `cut` said.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        ends: set[asyncio.Future[Any]] = {working, watching, cut}
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if watching.done():
            raise ClientGone
        if cut.done():
            raise cut.result()
        raise ApiError(504, f"the request took longer than {timeout_s:g} s", code="timeout")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
