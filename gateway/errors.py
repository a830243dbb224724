"""Everything the gateway raises.

GatewayError
├── ListenError          the address cannot be listened on (names host and port)
├── TokenizerError       the model folder's tokenizer cannot be used (names the folder and what is missing)
├── DecodeWorkerError    a decode worker that cannot be used: unreachable, or not what the others are
└── ApiError             what a client is told: an HTTP status and the OpenAI error shape
"""

from __future__ import annotations

from typing import Any


class GatewayError(Exception):
    """Base of everything this package raises on purpose."""


class ListenError(GatewayError):
    """The address cannot be listened on."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"the gateway cannot listen on {host}, port {port}: {reason}; choose another with --port")
        self.host = host
        self.port = port


class TokenizerError(GatewayError):
    """The tokenizer of a model folder cannot be used."""


class DecodeWorkerError(GatewayError):
    """A decode worker cannot be used."""


class ApiError(GatewayError):
    """A request's end as its client sees it. `headers` go out with the answer when its status is not committed yet."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The OpenAI error shape."""
        error = {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """400: the request is wrong in a way that its sender can put right."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """503: nothing is wrong with the request, and a later attempt may succeed."""
    return ApiError(503, message, code="service_unavailable", headers={"retry-after": "1"})


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
