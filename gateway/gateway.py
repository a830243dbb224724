"""One gateway: an HTTP server over a pool of decode workers."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.errors import ListenError
from gateway.in_flight import InFlight
from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.router import Router
from gateway.tokenizer import load_tokenizer
from rpc.address import WorkerAddress

logger = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 30
CLOSING_S = 2
"""How long connections may take to close once every answer has ended."""


class _Server(uvicorn.Server):
    """`up` is set once it answers. Signals belong to the process's owner, who may not run this on its main thread."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class Gateway:
    """`start` once, `set_decode_workers` whenever the pool changes, `stop` once.

    `failure` is what broke for good while it ran: the process has to be replaced then.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._in_flight = InFlight()
        self._router = Router(config.token, config.describe_timeout_s)
        self._readiness: Readiness | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self.failure: BaseException | None = None

    async def start(self) -> str:
        """Take the port, load the tokenizer, answer. Returns the URL.

        Raises:
            ListenError: the port is busy, or the host is not this machine's.
            TokenizerError: the model's tokenizer cannot be used.
        """
        config = self._config
        listener = _listen(config.host, config.port)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, Path(config.model_path))
            self._readiness = Readiness(self._router, tokenizer.vocabulary, config.probe_timeout_s)
            created = int(time.time())
            app = build_app(
                config, tokenizer, self._router, self._readiness, Metrics(), self._in_flight, created=created
            )
            await self._serve(app, listener)
        except BaseException:
            listener.close()
            raise
        url = _url(*listener.getsockname()[:2])
        logger.info("%s is served on %s", config.model_name, url)
        return url

    async def _serve(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSING_S,
        )
        self._server = server = _Server(config)
        self._serving = serving = asyncio.create_task(server.serve(sockets=[listener]), name="HTTP server")
        serving.add_done_callback(self._ended)
        up = asyncio.create_task(server.up.wait())
        try:
            await asyncio.wait({up, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                raise ListenError(self._config.host, self._config.port, f"the server ended: {serving.exception()!r}")
        except BaseException:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            raise
        finally:
            up.cancel()

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self.failure = error
            logger.critical("the HTTP server has failed; nothing is served any more", exc_info=error)

    async def set_decode_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """Send requests to these workers from now on, to each of them once a generation has gone through it.

        Returns before that: `/ready` tells.

        Raises:
            DecodeWorkerError: one of them cannot be used; the pool is as it was.
        """
        assert self._readiness is not None
        async with self._changing:
            await self._router.set(workers)
            await self._readiness.watch()

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, let answers end within `grace_s`, end the rest. Stopping twice is harmless."""
        if self._readiness is not None:
            await self._readiness.close()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._in_flight.drain(grace_s)
            await asyncio.gather(self._serving, return_exceptions=True)
            # Only clients that do not take what was sent to them are left.
            for connection in list(self._server.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        await self._router.close()


def _listen(host: str, port: int) -> socket.socket:
    """The socket is bound and kept: nobody else can take the port between here and the first request."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(host, port, str(error)) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenError(host, port, error.strerror or str(error)) from error
    return listener


def _url(host: str, port: int) -> str:
    """Where a browser on this machine goes; nobody can go to a wildcard."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
