"""One generation: the call to a decode worker, turned into pieces of text.

The text is what decoding all tokens at once would give, cut where a stop string begins. A token that ended the answer
as a stop token is counted and listed but has no text. Whoever stops iterating (a stop string, a client that left, a
deadline) cancels the call, and with it every leg of the request behind it.

A worker that is unreachable or full before it has drawn a token costs the client nothing but time: the request goes to
another one, if there is one. After the first token nothing is tried again; what the client has would be drawn twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc
import msgspec

from gateway.detokenize import Detokenizer, Vocabulary
from gateway.errors import ApiError, unavailable
from gateway.parameters import Sampling
from gateway.router import DecodeWorker, Router
from gateway.stop import StopStrings
from rpc.v1 import common_pb2, generate_pb2

logger = logging.getLogger(__name__)

FINISH_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}
# What another worker might answer otherwise.
ELSEWHERE = (429, 503)


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a decode worker. `request_id` is unique. `stop_token_ids` contains the model's own."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one message of the worker brought. `finish_reason` is set on the last piece only."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


async def generate(
    router: Router, prompt: Prompt, vocabulary: Vocabulary, timeout_s: float
) -> AsyncGenerator[Piece, None]:
    """The pieces of an answer; the last one has a finish reason.

    Raises:
        ApiError: the request cannot be served, or a leg of it failed.
    """
    tried: list[DecodeWorker] = []
    while True:
        worker = router.pick(tried)
        tried.append(worker)
        begun = False
        try:
            async with aclosing(generate_on(worker, prompt, vocabulary, timeout_s)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
            return
        except ApiError as error:
            if begun or error.status not in ELSEWHERE or not router.has_other(tried):
                raise
            logger.info("request %s goes from %s to another worker: %s", prompt.request_id, worker.name, error)


async def generate_on(
    worker: DecodeWorker, prompt: Prompt, vocabulary: Vocabulary, timeout_s: float
) -> AsyncGenerator[Piece, None]:
    """The same on a given worker, which learns from it whether it works."""
    text = _Text(vocabulary, prompt.stop_strings)
    with worker.counted():
        call = worker.generate.Generate(_message(prompt), timeout=timeout_s)
        try:
            async for chunk in call:
                worker.answered()
                if chunk.HasField("stats"):
                    _log(worker, prompt, chunk.stats)
                piece = text.take(list(chunk.token_ids), FINISH_REASONS.get(chunk.finish_reason))
                yield piece
                if piece.finish_reason is not None:
                    return
            raise ApiError(502, "the decode worker ended the answer without saying why", code="incomplete_answer")
        except grpc.aio.AioRpcError as error:
            api_error = _as_api_error(error)
            if _is_the_workers(error.code()):
                worker.failed(api_error)
            raise api_error from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # This is how grpc.aio tells of a call that the other end has cancelled.
            stopped = unavailable(f"{worker.name} has given up the request; it may be stopping")
            worker.failed(stopped)
            raise stopped from None
        finally:
            call.cancel()  # harmless when it has ended


class _Text:
    def __init__(self, vocabulary: Vocabulary, stop_strings: tuple[str, ...]) -> None:
        self._detokenizer = Detokenizer(vocabulary)
        self._stops = StopStrings(stop_strings)

    def take(self, token_ids: list[int], finish_reason: str | None) -> Piece:
        """The text that these tokens make certain."""
        spoken = len(token_ids) - (finish_reason == "stop")
        text = ""
        for place, token_id in enumerate(token_ids):
            if place < spoken:
                text += self._stops.push(self._detokenizer.push(token_id))
            if self._stops.stopped:
                return Piece(text=text, token_ids=token_ids[: place + 1], finish_reason="stop")
        if finish_reason is not None:
            text += self._stops.push(self._detokenizer.flush())
            if self._stops.stopped:
                finish_reason = "stop"
            text += self._stops.flush()
        return Piece(text=text, token_ids=token_ids, finish_reason=finish_reason)


def _message(prompt: Prompt) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        request_id=prompt.request_id,
        prompt_token_ids=prompt.token_ids,
        sampling=prompt.sampling.to_proto(),
        max_tokens=prompt.max_tokens,
        stop_token_ids=sorted(prompt.stop_token_ids),
    )


def _log(worker: DecodeWorker, prompt: Prompt, stats: generate_pb2.RequestStats) -> None:
    logger.info(
        "request %s on %s: %d prompt tokens, %d of them imported (%d bytes by %s), prefill %.3f s, import %.3f s",
        prompt.request_id,
        worker.name,
        stats.prompt_tokens,
        stats.prompt_tokens_imported,
        stats.imported_bytes,
        stats.transport or "no transport",
        stats.prefill_s,
        stats.import_s,
    )


def _is_the_workers(code: grpc.StatusCode) -> bool:
    """Whether an error says something about the worker, rather than about this request or the load."""
    return code not in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _as_api_error(error: grpc.aio.AioRpcError) -> ApiError:
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ApiError(400, details, code="invalid_value")
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return ApiError(429, details, code="rate_limit_exceeded", headers={"retry-after": "1"})
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return unavailable(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ApiError(504, f"the request took too long: {details}", code="timeout")
        case code:
            return ApiError(500, f"the decode worker failed ({code.name}): {details}", code="internal_error")
