"""Everything this package raises.

RpcError
├── BindError        a server's address could not be taken
└── CallRefused      a call ends with this status instead of an answer
"""

from __future__ import annotations

import grpc


class RpcError(Exception):
    """Base of everything this package raises on purpose."""


class BindError(RpcError):
    """A server's address could not be taken."""


class CallRefused(RpcError):
    """A call ends with `code` and this message instead of an answer."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
