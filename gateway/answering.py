"""Answers one endpoint's requests, whole or as a stream.

A status is committed only when it is certain: a stream's goes out with its first token (or after a long wait for it),
so that a request that fails before has a status of its own. After that, an error is an event that ends the stream. A
client that leaves, at any moment, cancels the generation and everything behind it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.body import read_fields
from gateway.config import GatewayConfig
from gateway.disconnect import ClientGone, unless_gone
from gateway.endpoint import Answer, Asked, Endpoint, Names
from gateway.errors import ApiError, bad_request
from gateway.events import DONE, KEEPALIVE, EventStream, with_silences
from gateway.fields import Fields
from gateway.generation import Piece, Prompt, generate
from gateway.metrics import Metrics
from gateway.router import Router
from gateway.timing import Timing
from gateway.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class Answering:
    """The ASGI application behind one endpoint."""

    def __init__(
        self, endpoint: Endpoint, config: GatewayConfig, tokenizer: Tokenizer, router: Router, metrics: Metrics
    ) -> None:
        self._endpoint = endpoint
        self._config = config
        self._tokenizer = tokenizer
        self._router = router
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request_id = _request_id(scope)
        headers = [(b"x-request-id", request_id.encode())]
        stream = EventStream(send, headers)
        status = 200
        with self._metrics.in_flight.track_inprogress():
            try:
                fields = await read_fields(scope, receive, self._config.max_body_bytes)
                response = await unless_gone(receive, self._answer(fields, request_id, stream))
                if response is not None:
                    response.raw_headers += headers
                    await response(scope, receive, send)
            except ClientGone:
                status = 499
                self._metrics.disconnects.inc()
            except ApiError as error:
                status = error.status
                logger.info("request %s: %d %s", request_id, error.status, error)
                await self._tell(error, stream, headers, scope, receive, send)
            except Exception:
                status = 500
                logger.exception("request %s failed", request_id)
                failure = ApiError(500, "the gateway failed; its log has the details", code="internal_error")
                await self._tell(failure, stream, headers, scope, receive, send)
            finally:
                self._metrics.requests.labels(self._endpoint.path, str(status)).inc()

    async def _tell(
        self,
        error: ApiError,
        stream: EventStream,
        headers: list[tuple[bytes, bytes]],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        if stream.begun:
            await stream.event(error.body)
            await stream.end()
            return
        response = JSONResponse(error.body, error.status, headers=error.headers)
        response.raw_headers += headers
        await response(scope, receive, send)

    async def _answer(self, fields: Fields, request_id: str, stream: EventStream) -> JSONResponse | None:
        """A whole answer, or None after a stream."""
        timing = Timing(self._metrics)
        asked, prompt = await self._read(fields, request_id)
        self._metrics.prompt_tokens.inc(len(prompt.token_ids))
        names = Names(
            answer_id=f"{self._endpoint.id_prefix}{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self._config.model_name,
        )
        timeout_s = self._config.request_timeout_s
        pieces = generate(self._router.pick(), prompt, self._tokenizer.vocabulary, timeout_s)
        async with aclosing(timing.watching(pieces)) as watched:
            if asked.parameters.stream:
                await self._stream(asked, prompt, names, watched, stream)
                return None
            return await self._whole(asked, prompt, names, watched)

    async def _read(self, fields: Fields, request_id: str) -> tuple[Asked, Prompt]:
        model = fields.required("model")
        if model != self._config.model_name:
            raise ApiError(
                404,
                f"the model {str(model)[:80]!r} does not exist; this gateway serves {self._config.model_name!r}",
                param="model",
                code="model_not_found",
            )
        asked = self._endpoint.read(fields)
        described = self._router.described
        token_ids = await asyncio.to_thread(self._endpoint.encode, self._tokenizer, asked.prompt)
        if not token_ids:
            raise bad_request("the prompt has no tokens; it must have at least one", "prompt")
        if (largest := max(token_ids)) >= described.vocab_size:
            raise bad_request(
                f"token {largest} does not exist: the model's vocabulary has {described.vocab_size} tokens", "prompt"
            )
        parameters = asked.parameters
        return asked, Prompt(
            request_id=request_id,
            token_ids=token_ids,
            max_tokens=self._max_tokens(parameters.max_tokens, len(token_ids), described.max_model_len),
            sampling=parameters.sampling,
            stop_strings=parameters.stop_strings,
            stop_token_ids=parameters.stop_token_ids | self._tokenizer.eos_token_ids,
        )

    def _max_tokens(self, asked_for: int | None, prompt_tokens: int, max_model_len: int) -> int:
        max_tokens = asked_for or self._endpoint.default_max_tokens or max(1, max_model_len - prompt_tokens)
        if prompt_tokens + max_tokens > max_model_len:
            raise bad_request(
                f"this model's context has {max_model_len} tokens, but the request asks for "
                f"{prompt_tokens + max_tokens} ({prompt_tokens} in the prompt, {max_tokens} for the answer); "
                "shorten either",
                "messages" if self._endpoint.default_max_tokens is None else "prompt",
                "context_length_exceeded",
            )
        return max_tokens

    async def _whole(self, asked: Asked, prompt: Prompt, names: Names, pieces: AsyncIterator[Piece]) -> JSONResponse:
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
        return JSONResponse(body)

    async def _stream(
        self, asked: Asked, prompt: Prompt, names: Names, pieces: AsyncIterator[Piece], stream: EventStream
    ) -> None:
        endpoint, parameters = self._endpoint, asked.parameters
        opening = endpoint.opening(names)
        output_tokens = 0

        async def send(body: dict[str, Any], token_ids: list[int] | None = None) -> None:
            if parameters.include_usage:
                body["usage"] = None
            if parameters.return_token_ids and token_ids is not None:
                body["choices"][0]["token_ids"] = token_ids
            await stream.event(body)

        async def open_once() -> None:
            while opening:
                await send(opening.pop(0))

        async with aclosing(with_silences(pieces, self._config.status_wait_s, self._config.keepalive_s)) as parts:
            async for piece in parts:
                await open_once()
                if piece is None:
                    await stream.write(KEEPALIVE)
                    continue
                output_tokens += len(piece.token_ids)
                await self._send_piece(names, piece, send)
        if parameters.include_usage:
            body = endpoint.usage_only(names)
            body["usage"] = usage(len(prompt.token_ids), output_tokens)
            await stream.event(body)
        await stream.write(DONE)
        await stream.end()

    async def _send_piece(self, names: Names, piece: Piece, send: Any) -> None:
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


def _request_id(scope: Scope) -> str:
    """The client's, if it is harmless, else a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
