"""One gateway: an HTTP server over a pool of decode workers."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.errors import ListenError
from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.router import Router
from gateway.tokenizer import load_tokenizer
from rpc.address import WorkerAddress

logger = logging.getLogger(__name__)

BACKLOG = 2048


class _Server(uvicorn.Server):
    """Signals belong to the process's owner, who may not even run this on its main thread. `up` is set once it answers."""

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
    """`start` once, `set_decode_workers` whenever the pool changes, `stop` once."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._router = Router(config.token, config.describe_timeout_s)
        self._readiness: Readiness | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

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
            app = build_app(config, tokenizer, self._router, self._readiness, Metrics(), int(time.time()))
            self._server = _Server(
                uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30)
            )
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="HTTP server")
            up = asyncio.create_task(self._server.up.wait())
            await asyncio.wait({up, self._serving}, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if self._serving.done():
                raise ListenError(config.host, config.port, f"the server ended: {self._serving.exception()!r}")
        except BaseException:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        logger.info("%s is served on %s", config.model_name, url)
        return url

    async def set_decode_workers(self, workers: Sequence[WorkerAddress]) -> None:
        """Send requests to these workers from now on; ready again once a generation has gone through each.

        Raises:
            DecodeWorkerError: one of them cannot be used.
        """
        assert self._readiness is not None
        await self._router.set(workers)
        await self._readiness.probe()

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, let answers end within `grace_s`, cancel the rest. Stopping twice is harmless."""
        if self._readiness is not None:
            await self._readiness.close()
            self._readiness.reason = "the gateway is stopping"
        if self._server is not None and self._serving is not None:
            self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
            self._server.should_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
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
