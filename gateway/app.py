"""The routes, and errors of HTTP itself in the shape that clients expect."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.answering import Answering
from gateway.chat import Chat
from gateway.completions import Completions
from gateway.config import GatewayConfig
from gateway.errors import ApiError
from gateway.in_flight import InFlight
from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.request_id import RequestIds
from gateway.router import Router
from gateway.tokenizer import Tokenizer


def build_app(
    config: GatewayConfig,
    tokenizer: Tokenizer,
    router: Router,
    readiness: Readiness,
    metrics: Metrics,
    in_flight: InFlight,
    created: int,
) -> ASGIApp:
    """The ASGI application. `created` is what the model list says, in Unix seconds."""
    model = {"id": config.model_name, "object": "model", "created": created, "owned_by": "kvferry"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != config.model_name:
            raise ApiError(404, f"the model {name[:80]!r} does not exist", param="model", code="model_not_found")
        return JSONResponse(model)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        reason = readiness.reason
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503)

    async def exposition(request: Request) -> Response:
        return Response(await metrics.render(router, config.scrape_timeout_s), media_type=CONTENT_TYPE_LATEST)

    answering = [
        Route(endpoint.path, Answering(endpoint, config, tokenizer, router, metrics, in_flight), methods=["POST"])
        for endpoint in (Completions(), Chat())
    ]
    app = Starlette(
        routes=[
            *answering,
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", exposition),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _failure},
    )
    app.router.redirect_slashes = False
    return RequestIds(app)


async def _api_error(request: Request, error: Any) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _failure(request: Request, error: Any) -> Response:
    # Starlette raises it again after this, and the server logs it.
    return JSONResponse(ApiError(500, "the gateway failed; its log has the details", code="internal_error").body, 500)


async def _http_error(request: Request, error: Any) -> Response:
    messages = {
        404: f"there is nothing at {request.url.path[:200]}",
        405: f"{request.method} is not allowed at {request.url.path[:200]}",
    }
    message = messages.get(error.status_code, str(error.detail))
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code, headers=error.headers)
