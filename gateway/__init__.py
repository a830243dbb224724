"""The front door: an OpenAI-compatible HTTP endpoint over a pool of decode workers."""

from gateway.config import GatewayConfig
from gateway.errors import ApiError, DecodeWorkerError, GatewayError, ListenError, TokenizerError
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
