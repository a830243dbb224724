"""Whether the whole path works: a real generation has gone through prefill, hand-off and decode.

Every decode worker is probed when it joins and takes no requests before its probe has succeeded. One that fails later
is probed again until it answers, so that a gateway whose workers all fail says so, and stops saying so by itself.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing

from gateway.detokenize import Vocabulary
from gateway.errors import ApiError
from gateway.generation import Prompt, generate_on
from gateway.parameters import Sampling
from gateway.router import DecodeWorker, Router

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0
# One failure may be the request's bad luck; as many in a row are the worker's state.
FAILURES_UNTIL_NOT_READY = 3
# The first token is drawn by prefill, the second needs the pages to have arrived.
PROBE_TOKENS = 2
GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    seed=0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
)


class Readiness:
    """`watch` after every change of the pool; `reason` says why not ready, None is ready."""

    def __init__(self, router: Router, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._router = router
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._probing: dict[DecodeWorker, asyncio.Task[None]] = {}
        self._closed = False
        router.on_failure = self._doubt

    @property
    def reason(self) -> str | None:
        """One sentence, or None."""
        workers = self._router.workers
        if self._closed:
            return "the gateway is stopping"
        if not workers:
            return "no decode worker is connected yet"
        if any(worker.proven and worker.failures < FAILURES_UNTIL_NOT_READY for worker in workers):
            return None
        return "; ".join(
            f"{worker.name}: " + (worker.last_failure or "a first generation is on its way") for worker in workers
        )

    async def watch(self) -> None:
        """The pool has changed: probe its new workers, let go of those that left."""
        gone = [worker for worker in self._probing if worker not in self._router.workers]
        await self._cancel([self._probing.pop(worker) for worker in gone])
        for worker in self._router.workers:
            if not worker.proven:
                self._probe_in_background(worker, 0.0)

    async def close(self) -> None:
        """Stop probing; not ready from now on."""
        self._closed = True
        probing, self._probing = self._probing, {}
        await self._cancel(list(probing.values()))

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _doubt(self, worker: DecodeWorker) -> None:
        if worker in self._router.workers:
            self._probe_in_background(worker, FIRST_RETRY_S)

    def _probe_in_background(self, worker: DecodeWorker, after_s: float) -> None:
        if worker not in self._probing and not self._closed:
            task = asyncio.create_task(self._until_it_answers(worker, after_s), name=f"probe of {worker.name}")
            self._probing[worker] = task
            task.add_done_callback(lambda task: self._ended(worker, task))

    def _ended(self, worker: DecodeWorker, task: asyncio.Task[None]) -> None:
        if self._probing.get(worker) is task:
            del self._probing[worker]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Never expected; without a probe the worker would stay out of use, and this says why.
            worker.last_failure = f"probing failed: {error!r}"
            logger.critical("probing %s failed; it takes no requests", worker.name, exc_info=error)

    async def _until_it_answers(self, worker: DecodeWorker, after_s: float) -> None:
        retry_s = FIRST_RETRY_S
        await asyncio.sleep(after_s)
        while not worker.proven or worker.failures:
            try:
                await self._probe(worker)
            except ApiError as error:
                worker.last_failure = str(error)
                logger.warning("%s does not answer: %s; trying again in %g s", worker.name, error, retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            else:
                worker.proven = True
                logger.info("a generation has gone through %s", worker.name)

    async def _probe(self, worker: DecodeWorker) -> None:
        prompt = Prompt(
            request_id=f"probe-{worker.name}-{secrets.token_hex(4)}",
            token_ids=[0, 1, 2],
            max_tokens=PROBE_TOKENS,
            sampling=GREEDY,
            stop_strings=(),
            stop_token_ids=frozenset(),
        )
        tokens = 0
        async with aclosing(generate_on(worker, prompt, self._vocabulary, self._timeout_s)) as pieces:
            async for piece in pieces:
                tokens += len(piece.token_ids)
        if tokens != PROBE_TOKENS:
            raise ApiError(500, f"a probe of {PROBE_TOKENS} tokens came back with {tokens}")
