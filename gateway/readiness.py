"""Whether the whole path works: a real generation has gone through prefill, hand-off and decode."""

from __future__ import annotations

import asyncio
import logging

from gateway.detokenize import Vocabulary
from gateway.errors import ApiError
from gateway.generation import Prompt, generate
from gateway.parameters import Sampling
from gateway.router import Router

logger = logging.getLogger(__name__)

RETRY_S = 0.5
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
    """`reason` says why not; None is ready. One probe at a time, until it has succeeded."""

    def __init__(self, router: Router, vocabulary: Vocabulary, timeout_s: float) -> None:
        self.reason: str | None = "no decode worker is connected yet"
        self._router = router
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._probing: asyncio.Task[None] | None = None

    async def probe(self) -> None:
        """The pool has changed: not ready until a generation has gone through each of its workers."""
        await self.close()
        self.reason = "a first generation is on its way"
        self._probing = asyncio.create_task(self._probe(), name="readiness probe")

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
            self._probing = None

    async def _probe(self) -> None:
        while True:
            try:
                for worker in self._router.workers:
                    # Two tokens: the first is drawn by prefill, the second needs the pages to have arrived.
                    prompt = Prompt(
                        request_id=f"probe-{worker.name}",
                        token_ids=[0, 1, 2],
                        max_tokens=2,
                        sampling=GREEDY,
                        stop_strings=(),
                        stop_token_ids=frozenset(),
                    )
                    async for _ in generate(worker, prompt, self._vocabulary, self._timeout_s):
                        pass
            except ApiError as error:
                self.reason = f"the last probe failed: {error}"
                logger.warning("not ready: %s", error)
                await asyncio.sleep(RETRY_S)
            else:
                self.reason = None
                logger.info("ready: a generation has gone through %d decode workers", len(self._router.workers))
                return
