"""Answers one endpoint's requests, whole or as a stream.

A status is committed only when it is certain: a stream's goes out with its first token (or after a long wait for it),
so that a request that fails before has a status of its own. After that, an error is an event that ends the stream. A
client that leaves, at any moment, cancels the generation and everything behind it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

from starlette.types import Receive, Scope, Send

from gateway.body import read_fields
from gateway.config import GatewayConfig
from gateway.disconnect import ClientGone, unless_gone
from gateway.endpoint import Answer, Asked, Endpoint, Names
from gateway.errors import ApiError, bad_request
from gateway.events import DONE, KEEPALIVE, Reply, with_silences
from gateway.fields import Fields
from gateway.generation import Piece, Prompt, generate
from gateway.in_flight import InFlight
from gateway.metrics import Metrics
from gateway.request_id import request_id_of
from gateway.router import Router
from gateway.timing import Timing
from gateway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LAST_WORD_S = 5.0
"""How long a client that takes nothing may keep an error from being told."""

SendChunk: TypeAlias = Callable[[dict[str, Any], list[int]], Awaitable[None]]


class Answering:
    """The ASGI application behind one endpoint."""

    def __init__(
        self,
        endpoint: Endpoint,
        config: GatewayConfig,
        tokenizer: Tokenizer,
        router: Router,
        metrics: Metrics,
        in_flight: InFlight,
    ) -> None:
        self._endpoint = endpoint
        self._config = config
        self._tokenizer = tokenizer
        self._router = router
        self._metrics = metrics
        self._in_flight = in_flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        config = self._config
        request_id = request_id_of(scope)
        reply = Reply(send)
        status = 200
        with self._metrics.in_flight.track_inprogress():
            try:
                with self._in_flight.enter() as cut:
                    fields = await read_fields(scope, receive, config.max_body_bytes, config.request_timeout_s)
                    work = self._answer(fields, request_id, reply)
                    await unless_gone(receive, work, config.request_timeout_s, cut)
            except ClientGone:
                status = 499
                self._metrics.disconnects.inc()
                logger.info("request %s: its client has left", request_id)
            except ApiError as error:
                status = error.status
                logger.info("request %s: %d %s", request_id, error.status, error)
                await self._tell(error, reply, request_id)
            except Exception:
                status = 500
                logger.exception("request %s failed", request_id)
                failure = ApiError(500, "the gateway failed; its log has the details", code="internal_error")
                await self._tell(failure, reply, request_id)
            finally:
                self._metrics.requests.labels(self._endpoint.path, str(status)).inc()

    async def _tell(self, error: ApiError, reply: Reply, request_id: str) -> None:
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if not reply.begun:
                    await reply.whole(error.status, error.body, error.headers)
                elif reply.streaming:
                    await reply.event(error.body)
                    await reply.end()
        except TimeoutError:
            logger.info("the client of request %s takes no more data", request_id)

    async def _answer(self, fields: Fields, request_id: str, reply: Reply) -> None:
        timing = Timing(self._metrics)
        asked, prompt = await self._read(fields, request_id)
        self._metrics.prompt_tokens.inc(len(prompt.token_ids))
        names = Names(
            answer_id=f"{self._endpoint.id_prefix}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._config.model_name,
        )
        pieces = generate(self._router, prompt, self._tokenizer.vocabulary, self._config.request_timeout_s)
        async with aclosing(timing.watching(pieces)) as watched:
            if asked.parameters.stream:
                await self._stream(asked, prompt, names, watched, reply)
            else:
                await reply.whole(200, await self._whole(asked, prompt, names, watched))

    async def _read(self, fields: Fields, request_id: str) -> tuple[Asked, Prompt]:
        model = fields.required("model")
        if not isinstance(model, str):
            raise fields.wrong("model", "text")
        if model != self._config.model_name:
            raise ApiError(
                404,
                f"the model {model[:80]!r} does not exist; this gateway serves {self._config.model_name!r}",
                param="model",
                code="model_not_found",
            )
        asked = self._endpoint.read(fields)
        prompt_field = self._endpoint.prompt_field
        vocab_size, max_model_len = self._router.vocab_size, self._router.max_model_len
        token_ids = await asyncio.to_thread(self._endpoint.encode, self._tokenizer, asked.prompt)
        if not token_ids:
            raise bad_request("the prompt has no tokens; it must have at least one", prompt_field)
        if (largest := max(token_ids)) >= vocab_size:
            raise bad_request(
                f"the prompt has token {largest}; the model's are 0 to {vocab_size - 1}", self._endpoint.prompt_field
            )
        parameters = asked.parameters
        return asked, Prompt(
            # Clients may send one id twice; workers tell requests apart by theirs.
            request_id=f"{request_id}.{secrets.token_hex(4)}",
            token_ids=token_ids,
            max_tokens=self._max_tokens(parameters.max_tokens, len(token_ids), max_model_len),
            sampling=parameters.sampling,
            stop_strings=parameters.stop_strings,
            stop_token_ids=parameters.stop_token_ids | self._tokenizer.eos_token_ids,
        )

    def _max_tokens(self, asked_for: int | None, prompt_tokens: int, max_model_len: int) -> int:
        left = max(1, max_model_len - prompt_tokens)
        max_tokens = asked_for or min(self._endpoint.default_max_tokens or left, left)
        if prompt_tokens + max_tokens > max_model_len:
            raise bad_request(
                f"this model's context has {max_model_len} tokens, but the request asks for "
                f"{prompt_tokens + max_tokens} ({prompt_tokens} in the prompt, {max_tokens} for the answer); "
                "shorten either",
                self._endpoint.prompt_field,
                "context_length_exceeded",
            )
        return max_tokens

    async def _whole(self, asked: Asked, prompt: Prompt, names: Names, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        text: list[str] = []
        token_ids: list[int] = []
        finish_reason = ""
        async for piece in pieces:
            text.append(piece.text)
            token_ids += piece.token_ids
            finish_reason = piece.finish_reason or finish_reason
        body = self._endpoint.whole(names, Answer(text="".join(text), finish_reason=finish_reason))
        body["usage"] = usage(len(prompt.token_ids), len(token_ids))
        if asked.parameters.return_token_ids:
            body["prompt_token_ids"] = prompt.token_ids
            body["choices"][0]["token_ids"] = token_ids
        return body

    async def _stream(
        self, asked: Asked, prompt: Prompt, names: Names, pieces: AsyncIterator[Piece], reply: Reply
    ) -> None:
        endpoint, parameters = self._endpoint, asked.parameters
        opening = endpoint.opening(names)
        output_tokens = 0
        first = True

        async def send(body: dict[str, Any], token_ids: list[int]) -> None:
            nonlocal first
            if parameters.include_usage:
                body["usage"] = None
            if parameters.return_token_ids:
                body["choices"][0]["token_ids"] = token_ids
                if first:
                    body["prompt_token_ids"] = prompt.token_ids
            first = False
            await reply.event(body)

        async with aclosing(with_silences(pieces, self._config.status_wait_s, self._config.keepalive_s)) as parts:
            async for piece in parts:
                while opening:
                    await send(opening.pop(0), [])
                if piece is None:
                    await reply.write(KEEPALIVE)
                    continue
                output_tokens += len(piece.token_ids)
                await self._send_piece(names, piece, send)
        if parameters.include_usage:
            body = endpoint.usage_only(names)
            body["usage"] = usage(len(prompt.token_ids), output_tokens)
            await reply.event(body)
        await reply.write(DONE)
        await reply.end()

    async def _send_piece(self, names: Names, piece: Piece, send: SendChunk) -> None:
        """Its text, its end, or both; a piece whose text is still held back is sent only for its ids."""
        if piece.text or piece.finish_reason is None:
            await send(self._endpoint.delta(names, piece.text), piece.token_ids)
            if piece.finish_reason is not None:
                await send(self._endpoint.ending(names, piece.finish_reason), [])
        else:
            await send(self._endpoint.ending(names, piece.finish_reason), piece.token_ids)


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Token counts. A stop token that ended the answer is one of its tokens. Nothing is cached for clients yet."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
