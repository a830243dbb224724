"""The front door: an OpenAI-compatible HTTP endpoint over a pool of decode workers."""

from typing import TYPE_CHECKING, Any

from gateway.config import GatewayConfig
from gateway.errors import ApiError, DecodeWorkerError, GatewayError, ListenError, TokenizerError

if TYPE_CHECKING:
    from gateway.gateway import Gateway

__all__ = [
    "ApiError",
    "DecodeWorkerError",
    "Gateway",
    "GatewayConfig",
    "GatewayError",
    "ListenError",
    "TokenizerError",
]


def __getattr__(name: str) -> Any:
    """The gateway itself takes a second to import, its settings do not: it is imported when it is asked for."""
    if name != "Gateway":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gateway.gateway import Gateway

    return Gateway
