"""One request, from its call to its last token: the one place that cancels and releases.

    prefill ──► first token to the client ──► blocks ──► READ ──► decode ──► last token

An answer that ends with its first token moves no page. Whatever ends the request early, `run` leaves nothing behind:
the source is released (in the background, by an ACK), blocks go back when the import has let go of them, the engine
forgets the sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from connector import (
    ConnectorError,
    EngineId,
    ImportFailed,
    ImportOutcome,
    InvalidTransition,
    Pull,
    SourceRef,
    new_transfer_id,
)
from decode.config import DecodeConfig
from decode.landing import Landing
from decode.peers import Peers, PrefillPeer
from decode.reservations import Reservations
from decode.stages import Stage, Stages
from engine import BlockTable, Engine, EngineClosed, EngineError, EngineRequest, Failed, Output, Token
from rpc.errors import CallRefused
from rpc.v1 import common_pb2, generate_pb2, prefill_pb2
from worker import WorkerCore
from worker.core import as_message
from worker.sampling import from_message

logger = logging.getLogger(__name__)

FINISH = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}

PASSED_ON = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What prefill says of the request itself; everything else is a failed leg."""

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
            pull = self._core.connector.begin(peer.link, self.transfer_id)
        except ConnectorError as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        peer.in_flight += 1
        self._core.requests_ahead += 1
        try:
            first, source = await self._prefill(peer)
            finish = self._finish_of_first(first)
            self._stats.prefill_s = self.stages.between(Stage.PREFILL_SENT, Stage.FIRST_TOKEN)
            await emit(self._chunk([first], finish))
            if finish != common_pb2.FINISH_REASON_UNSPECIFIED:
                self._core.counters["requests_without_transfer"] += 1
                return
            table = await self._fetch(pull, source)
        finally:
            peer.in_flight -= 1
            self._core.requests_ahead -= 1
            self._in_background(pull.release("the request is over"))  # nothing to do after a read that has settled
        await self._decode(table, first, emit)

    async def _prefill(self, peer: PrefillPeer) -> tuple[Token, SourceRef]:
        """Have the prompt computed: its first token, and where its pages lie."""
        message = self._message
        self.stages.reach(Stage.PREFILL_SENT)
        call = peer.stub.Prefill(
            prefill_pb2.PrefillRequest(
                request_id=message.request_id,
                transfer_id=self.transfer_id,
                consumer=as_message(self._core.engine_id),
                producer=as_message(peer.engine_id),
                prompt_token_ids=message.prompt_token_ids,
                sampling=message.sampling,
            ),
            timeout=self._config.prefill_timeout_s,
        )
        try:
            async for event in call:
                if event.WhichOneof("event") == "prefilled":
                    self.stages.reach(Stage.FIRST_TOKEN)
                    return self._first_token(event.prefilled), _source(event.prefilled.source)
        except grpc.aio.AioRpcError as error:
            code = error.code() if error.code() in PASSED_ON else grpc.StatusCode.UNAVAILABLE
            raise CallRefused(code, f"prefill on {peer.engine_id.name} failed: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody has cancelled this request, only the call, whose channel was closed with the peer. Let through, it
            # would end the handler without a status, and the client would wait for one until its deadline.
            raise CallRefused(
                grpc.StatusCode.UNAVAILABLE, f"prefill on {peer.engine_id.name} was given up: the worker was dropped"
            ) from None
        finally:
            # Not left to gRPC: a task that is cancelled while its call is being made does not cancel the call.
            call.cancel()
        raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"prefill on {peer.engine_id.name} ended without an answer")

    def _first_token(self, prefilled: prefill_pb2.Prefilled) -> Token:
        return Token(
            token_id=prefilled.first_token_id,
            logprob=prefilled.first_token_logprob,
            position=len(self._message.prompt_token_ids),
            finish=None,
            prompt_tokens_computed=0,
        )

    def _finish_of_first(self, token: Token) -> common_pb2.FinishReason.ValueType:
        if token.token_id in self._message.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP
        return (
            common_pb2.FINISH_REASON_LENGTH if self._message.max_tokens == 1 else common_pb2.FINISH_REASON_UNSPECIFIED
        )

    async def _fetch(self, pull: Pull, source: SourceRef) -> BlockTable:
        """READ the prompt's pages; the blocks that hold them belong to the request."""
        num_tokens = len(self._message.prompt_token_ids)
        if source.num_tokens != num_tokens:
            raise CallRefused(
                grpc.StatusCode.UNAVAILABLE,
                f"prefill holds {source.num_tokens} tokens of a prompt of {num_tokens}; its answer is not used",
            )
        try:
            table = await self._reservations.reserve(self.transfer_id, num_tokens, self._config.reserve_timeout_s)
        except TimeoutError as error:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no free blocks for {num_tokens} tokens within {self._config.reserve_timeout_s:g} s; try again later",
            ) from error
        self.stages.reach(Stage.BLOCKS_RESERVED)
        landing = Landing(table, self._engine.free)

        def settled(outcome: ImportOutcome) -> None:
            self._count(outcome)
            landing.on_settled(outcome)

        try:
            (group,) = self._engine.geometry.groups
            imported = await pull.read(source, {group.name: table.block_ids}, settled)
        except ImportFailed as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"the pages did not arrive: {error}") from error
        except InvalidTransition as error:  # a mistake of ours: nothing was posted, and nobody will settle it
            self._engine.free(table)
            raise CallRefused(grpc.StatusCode.INTERNAL, f"the pages could not be asked for: {error}") from error
        except BaseException:
            landing.abandon()
            raise
        self.stages.reach(Stage.PAGES_LANDED)
        self._core.counters["tokens_imported"] += imported.num_tokens
        self._stats.prompt_tokens_imported = imported.num_tokens
        self._stats.imported_bytes = imported.bytes
        self._stats.transport = imported.transport
        self._stats.import_s = imported.seconds
        return landing.take()

    def _count(self, outcome: ImportOutcome) -> None:
        counters = self._core.counters
        counters[f"transfers_{outcome.outcome}"] += 1
        if outcome.outcome == "failed":
            counters[f"transfers_failed_{outcome.reason.lower()}"] += 1

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


def _source(message: prefill_pb2.SourceDescription) -> SourceRef:
    return SourceRef(
        transfer_id=message.transfer_id,
        producer=EngineId(message.producer.name, message.producer.incarnation),
        blocks={group.group: list(group.block_ids) for group in message.groups},
        num_tokens=message.num_tokens,
    )
