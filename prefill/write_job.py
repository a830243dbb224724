"""One prompt whose pages are written to the consumer as they are computed, and who owns its blocks at each moment.

    submitted ──first layer──► lent ──first token──► written ──nothing in flight──► over
        └──stopped, call cancelled, engine failed──► over

The engine owns the blocks until the request ends, and frees them itself when it is aborted. Operations that read them
may still be in flight then, so from the first layer on they are also lent: they come back to the pool when both the
engine and the transfer have let go of them. Layers are told on the engine's thread and posted on the loop, in order.
"""

from __future__ import annotations

import asyncio

from connector import ConnectorError, DestinationRef, SourceEnd, Sources
from engine import BlockTable, Engine, EngineRequest, Failed, Output, SamplingParams, Token
from prefill.job import GivenUp, PrefillFailed


class WriteJob:
    """See the module. Lives on the event loop; only `_on_layer` and `_from_engine` are called on the engine's thread.

    Raises:
        ConnectorError: the consumer cannot be written to.
    """

    def __init__(self, engine: Engine, sources: Sources, destination: DestinationRef) -> None:
        self._engine = engine
        self._sources = sources
        self._destination = destination
        self._transfer_id = destination.transfer_id
        self._loop = asyncio.get_running_loop()
        self._lending = False
        self._lent: BlockTable | None = None
        self._submitted = False
        self._stopped = False
        self._over = False
        self._failing = False
        self.done: asyncio.Future[Token] = self._loop.create_future()
        sources.open_write(destination, self.ended, self.stopped)

    def submit(self, prompt_token_ids: list[int], sampling: SamplingParams) -> None:
        """Have the prompt computed.

        Raises:
            EngineError: the engine refuses it.
            GivenUp: nobody wants it any more.
        """
        if self._over or self._stopped:
            raise GivenUp("the transfer ended before its prompt was computed")
        self._submitted = True
        self._engine.submit(
            EngineRequest(
                request_id=self._transfer_id,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                max_tokens=1,
                stop_token_ids=frozenset(),
                sink=self._from_engine,
                on_layer=self._on_layer,
            )
        )

    def cancel(self, detail: str) -> None:
        """The call is gone. What has been computed already is still delivered."""
        if not self.done.done() and not self._over:
            self._fail(detail)

    def stopped(self, detail: str) -> None:
        """Nobody wants the pages any more: nothing more is computed."""
        self._stopped = True
        if self._submitted:
            self._engine.abort(self._transfer_id)
        self._give_up(detail)

    def ended(self, end: SourceEnd) -> None:
        """Nothing of this transfer is in flight any more."""
        self._over = True
        if self._submitted:
            self._engine.abort(self._transfer_id)  # harmless when it has ended
        self._return_blocks()
        if end.outcome != "flushed":
            self._give_up(end.detail)

    def _give_up(self, detail: str) -> None:
        if not self.done.done():
            failure = PrefillFailed if self._failing else GivenUp
            self.done.set_exception(failure(f"the transfer ended: {detail}"))
            self.done.exception()  # whoever waited may have been cancelled

    def _fail(self, detail: str) -> None:
        self._failing = True
        self._sources.fail(self._transfer_id, detail)

    # On the engine's thread

    def _on_layer(self, table: BlockTable, layer: int, num_tokens: int) -> None:
        if not self._lending:
            self._lending = True
            self._engine.lend(table)
        self._loop.call_soon_threadsafe(self._computed, table, layer, num_tokens)

    def _from_engine(self, output: Output) -> None:
        self._loop.call_soon_threadsafe(self._take, output)

    # On the loop

    def _computed(self, table: BlockTable, layer: int, num_tokens: int) -> None:
        self._lent = table
        if self._over:
            self._return_blocks()
            return
        self._sources.computed(self._transfer_id, table.by_group(), layer, num_tokens)

    def _take(self, output: Output) -> None:
        if self._over or self._stopped:
            return
        if isinstance(output, Failed):
            self._fail(output.message)
            return
        if not self.done.done():
            self.done.set_result(output)
        try:
            self._sources.finish(self._transfer_id)
        except ConnectorError as error:
            self._fail(str(error))

    def _return_blocks(self) -> None:
        if self._lent is not None:
            self._engine.returned(self._lent)
