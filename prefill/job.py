"""One prompt on its way from the call to the held source, and who owns its blocks at each moment.

    submitted ──first token──► held ──source's end──► over
        └──source's end, call cancelled, engine failed──► over

While it is submitted the engine owns the blocks. It hands them over with the first token, on its own thread; the loop
takes them in `_take`, one callback without an await in it, so that there is no moment at which a cancelled call could
lose them: either the source still wants them and holds them, or they are freed right there. From then on the source's
end frees them, and nothing else does.
"""

from __future__ import annotations

import asyncio
import logging

from connector import ConnectorError, SourceEnd, SourceRef, Sources
from engine import Engine, EngineRequest, Failed, Output, SamplingParams, Token

logger = logging.getLogger(__name__)


class Prefilled:
    """What a finished job answers."""

    def __init__(self, token: Token, source: SourceRef) -> None:
        self.token = token
        self.source = source


class PrefillFailed(Exception):
    """The prompt was not computed; the message says why."""


class GivenUp(PrefillFailed):
    """Its consumer does not want it any more, or has gone silent: no fault of this worker."""


class Job:
    """See the module. Lives on the event loop; only `_from_engine` is called on the engine's thread."""

    def __init__(self, engine: Engine, sources: Sources, transfer_id: str) -> None:
        self._engine = engine
        self._sources = sources
        self._transfer_id = transfer_id
        self._loop = asyncio.get_running_loop()
        self._request: EngineRequest | None = None
        self._over = False
        self._held = False
        self._failing = False
        self.done: asyncio.Future[Prefilled] = self._loop.create_future()

    def ended(self, end: SourceEnd) -> None:
        """The source is over: whatever there is of it is given back."""
        self._over = True
        if self._held:
            assert self._request is not None
            assert self._request.table is not None
            self._engine.free(self._request.table)
        elif self._request is not None:
            self._engine.abort(self._transfer_id)
        if not self.done.done():
            failure = PrefillFailed if self._failing else GivenUp
            self.done.set_exception(failure(f"the source ended: {end.detail}"))
            self.done.exception()  # whoever waited may have been cancelled

    def submit(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Have the prompt computed.

        Raises:
            EngineError: the engine refuses it.
            GivenUp: the source has ended already.
        """
        if self._over:
            raise GivenUp("the source ended before its prompt was computed")
        self._request = EngineRequest(
            request_id=self._transfer_id,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            max_tokens=1,
            stop_token_ids=frozenset(),
            sink=self._from_engine,
            retain=True,
        )
        self._engine.submit(self._request)

    def cancel(self, detail: str) -> None:
        """The call is gone. A source that is held already stays: its consumer ACKs it, or its lease ends."""
        if not self._held and not self._over:
            self._fail(detail)

    def _fail(self, detail: str) -> None:
        self._failing = True
        self._sources.fail(self._transfer_id, detail)

    def _from_engine(self, output: Output) -> None:
        self._loop.call_soon_threadsafe(self._take, output)

    def _take(self, output: Output) -> None:
        request = self._request
        assert request is not None
        if isinstance(output, Failed):
            if not self._over:
                self._fail(output.message)
            return
        assert request.table is not None
        if self._over:
            self._engine.free(request.table)
            return
        blocks = request.table.by_group()
        try:
            self._held = True
            source = self._sources.hold(self._transfer_id, blocks, len(request.prompt_token_ids))
        except ConnectorError as error:
            logger.exception("transfer %s cannot be held", self._transfer_id)
            self._held = False
            self._engine.free(request.table)
            self._fail(str(error))
            return
        if not self.done.done():
            self.done.set_result(Prefilled(output, source))
