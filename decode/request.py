"""One request, from its call to its last token: the one place that cancels and releases.

    READ     prefill ──► first token to the client ──► blocks ──► pages ──► decode ──► last token
    WRITE    blocks ──► prefill ──► first token to the client ──► pages ──► decode ──► last token

An answer that ends with its first token moves no page. Whatever ends the request early, `run` leaves nothing behind:
the source is released (in the background, by an ACK), blocks go back when the import has let go of them, the engine
forgets the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from connector import ConnectorError, SourceRef, new_transfer_id
from decode.config import DecodeConfig
from decode.handoff import Blocks, Handoff, ReadHandoff, WriteHandoff
from decode.peers import Peers, PrefillPeer
from decode.prefill_call import call_prefill
from decode.reservations import Reservations
from decode.stages import Stage, Stages
from engine import BlockTable, Engine, EngineClosed, EngineError, EngineRequest, Failed, Output, Token
from rpc.errors import CallRefused
from rpc.v1 import common_pb2, generate_pb2
from worker import WorkerCore
from worker.sampling import from_message

logger = logging.getLogger(__name__)

FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}

Emit = Callable[[generate_pb2.GenerateChunk], Awaitable[None]]


class Request:
    """See the module. `in_background` runs what has to be finished after the request is over."""

    def __init__(
        self,
        message: generate_pb2.GenerateRequest,
        core: WorkerCore,
        config: DecodeConfig,
        peers: Peers,
        reservations: Reservations,
        in_background: Callable[[Awaitable[None]], None],
    ) -> None:
        self._message = message
        self._core = core
        self._engine: Engine = core.engine
        self._config = config
        self._peers = peers
        self._reservations = reservations
        self._in_background = in_background
        self.transfer_id = new_transfer_id()
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()
        self._stats = generate_pb2.RequestStats(prompt_tokens=len(message.prompt_token_ids))
        self.stages = Stages()

    async def run(self, emit: Emit) -> None:
        """Serve the request.

        Raises:
            CallRefused: it ends here; the status says whose fault it is.
        """
        peer = self._peers.pick()
        if peer is None:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, "no prefill worker can be reached; try again later")
        try:
            handoff = self._handoff(peer)
        except ConnectorError as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        peer.in_flight += 1
        self._core.requests_ahead += 1
        try:
            destination = await handoff.begin()
            self.stages.reach(Stage.PREFILL_SENT)
            first, source = await call_prefill(
                peer,
                self._core.engine_id,
                self.transfer_id,
                self._message,
                destination,
                self._config.prefill_timeout_s,
            )
            self.stages.reach(Stage.FIRST_TOKEN)
            finish = self._finish_of_first(first)
            self._stats.prefill_s = self.stages.between(Stage.PREFILL_SENT, Stage.FIRST_TOKEN)
            await emit(self._chunk([first], finish))
            if finish != common_pb2.FINISH_REASON_UNSPECIFIED:
                self._core.counters["requests_without_transfer"] += 1
                return
            table = await self._fetch(handoff, source)
        finally:
            peer.in_flight -= 1
            self._core.requests_ahead -= 1
            self._in_background(handoff.release())
        await self._decode(table, first, emit)

    def _handoff(self, peer: PrefillPeer) -> Handoff:
        blocks = Blocks(
            self._engine, self._reservations, self._config.reserve_timeout_s, self._core.counters, self.stages
        )
        # An answer of one token moves no page, so that there is nothing to write either.
        writes = self._config.connector.mode == "write" and self._message.max_tokens > 1
        kind = WriteHandoff if writes else ReadHandoff
        return kind(self._core.connector, peer.link, self.transfer_id, len(self._message.prompt_token_ids), blocks)

    def _finish_of_first(self, token: Token) -> common_pb2.FinishReason.ValueType:
        if token.token_id in self._message.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP
        return (
            common_pb2.FINISH_REASON_LENGTH if self._message.max_tokens == 1 else common_pb2.FINISH_REASON_UNSPECIFIED
        )

    async def _fetch(self, handoff: Handoff, source: SourceRef | None) -> BlockTable:
        """Wait for the prompt's pages; the blocks that hold them belong to the request."""
        table, imported = await handoff.pages(source)
        self.stages.reach(Stage.PAGES_LANDED)
        self._core.counters["tokens_imported"] += imported.num_tokens
        self._stats.prompt_tokens_imported = imported.num_tokens
        self._stats.imported_bytes = imported.bytes
        self._stats.transport = imported.transport
        self._stats.import_s = imported.seconds
        return table

    async def _decode(self, table: BlockTable, first: Token, emit: Emit) -> None:
        """Continue from the imported pages until the answer ends."""
        loop = asyncio.get_running_loop()
        message = self._message
        request = EngineRequest(
            request_id=self.transfer_id,
            prompt_token_ids=list(message.prompt_token_ids),
            output_token_ids=[first.token_id],
            sampling=from_message(message.sampling),
            max_tokens=message.max_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            sink=lambda output: _post(loop, self._outputs, output),
            table=table,
            computed_tokens=len(message.prompt_token_ids),
        )
        try:
            self._engine.submit(request)
        except EngineClosed as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        except EngineError as error:
            raise CallRefused(grpc.StatusCode.INTERNAL, str(error)) from error
        try:
            while True:
                tokens = await self._next_tokens()
                self.stages.reach(Stage.SECOND_TOKEN)
                last = tokens[-1]
                finish = FINISH[last.finish] if last.finish else common_pb2.FINISH_REASON_UNSPECIFIED
                self._stats.prompt_tokens_computed = last.prompt_tokens_computed
                await emit(self._chunk(tokens, finish))
                if last.finish:
                    return
        finally:
            self._engine.abort(self.transfer_id)  # harmless when it has ended

    async def _next_tokens(self) -> list[Token]:
        """At least one; a slow reader gets all that have gathered at once."""
        outputs = [await self._outputs.get()]
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        tokens = []
        for output in outputs:
            if isinstance(output, Failed):
                raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"decoding failed: {output.message}")
            tokens.append(output)
        return tokens

    def _chunk(self, tokens: list[Token], finish: common_pb2.FinishReason.ValueType) -> generate_pb2.GenerateChunk:
        return generate_pb2.GenerateChunk(
            token_ids=[token.token_id for token in tokens],
            logprobs=[token.logprob for token in tokens],
            finish_reason=finish,
            stats=self._stats if finish else None,
        )


def _post(loop: asyncio.AbstractEventLoop, outputs: asyncio.Queue[Output], output: Output) -> None:
    loop.call_soon_threadsafe(outputs.put_nowait, output)
