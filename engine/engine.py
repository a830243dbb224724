"""The engine: requests in from any thread, steps on one thread of its own, tokens out through each request's sink.

One lock guards what callers and the thread share. The thread does not hold it while it computes, but does while it
hands tokens out; that is why nothing more is heard of a request once `abort` has returned. Blocks of a request that was
aborted during a step are freed after it: until then the step may still write them.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import torch

from connector.pages import GroupSpec, PoolGeometry
from engine.admission import check_request
from engine.batch import build_batch
from engine.blocks import BlockPool, BlockTable
from engine.config import EngineConfig
from engine.errors import EngineClosed, EngineError
from engine.loading import load_model
from engine.model_info import ModelInfo
from engine.pool import PagePool
from engine.prepack import prepack
from engine.request import EngineRequest, Failed, FinishReason, Output, Token
from engine.runner import forward
from engine.sampler import Drawn, sample
from engine.scheduler import Scheduled, Scheduler
from engine.sequence import Sequence, new_sequence
from engine.threads import concerns

logger = logging.getLogger(__name__)

GROUP = "full"
"""The one group of models whose every layer attends to the whole context."""

CLOSING = "the engine is closing"

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. `tokens_computed` (tokens run through the model), `prompt_tokens_computed` (those of them that belong
    to a prompt), `steps` and `preemptions` only grow.
    """

    blocks_total: int
    blocks_free: int
    running: int
    waiting: int
    tokens_computed: int
    prompt_tokens_computed: int
    steps: int
    preemptions: int


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Where the page pool lies: `length` bytes at `address`, backed by the memfd `fd`."""

    address: int
    length: int
    fd: int


class Engine:
    """Loads a model and allocates its page pool, which takes seconds; `start` begins to compute.

    `progress` is told in words what is being done.

    Raises:
        ModelError: the model cannot be loaded.
        EngineError: the page pool cannot be had.
    """

    def __init__(
        self, info: ModelInfo, config: EngineConfig, progress: Callable[[str], None] = lambda phase: None
    ) -> None:
        dtype = DTYPES[config.dtype]
        self.group = GroupSpec(
            name=GROUP,
            layers=tuple(range(info.num_layers)),
            num_kv_heads=info.num_kv_heads,
            key_dim=info.head_dim,
            value_dim=info.head_dim,
            itemsize=dtype.itemsize,
        )
        progress("allocating the page pool")
        self._pool = PagePool(
            self.group,
            layout=config.layout,
            block_size=config.block_size,
            total_bytes=config.kv_cache_bytes,
            dtype=dtype,
        )
        self.num_blocks = self._pool.num_blocks
        self.max_model_len = _max_model_len(info, config, self.num_blocks)
        for concern in concerns(config.compute_threads, len(os.sched_getaffinity(0)), os.environ):
            logger.warning("%s", concern)
        torch.set_num_threads(config.compute_threads)
        progress("loading the model")
        try:
            self._model: Any = load_model(info, dtype)
            if dtype is torch.bfloat16:
                progress("packing the weights")
                logger.info("%d linear layers packed for oneDNN", prepack(self._model))
        except BaseException:
            self._pool.close()
            raise
        self._config = config
        self._vocab_size = info.vocab_size
        self._blocks = BlockPool(self.num_blocks, config.block_size)
        self._scheduler = Scheduler(
            self._blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
        )
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Sequence] = []
        self._changed = threading.Condition(threading.RLock())
        self._closing = False
        self._failure: BaseException | None = None
        self._tokens_computed = 0
        self._prompt_tokens_computed = 0
        self._steps = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def geometry(self) -> PoolGeometry:
        """How pages lie in `memory`."""
        return self._pool.geometry

    @property
    def memory(self) -> Memory:
        """The page pool's memory, for whoever moves pages."""
        return Memory(address=self._pool.address, length=self._pool.length, fd=self._pool.fd)

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, other than `close`; it takes no requests any more."""
        return self._failure

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Fail what is in flight, stop the thread after its step, give the pool back. Closing twice is harmless.

        Raises:
            EngineError: the step in flight did not end in time; the pool is kept, since it may still be written.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise EngineError(f"the engine's step did not end within {timeout_s:g} s")
        self._fail_all(CLOSING)  # of an engine that was never started
        self._pool.close()

    def submit(self, request: EngineRequest) -> None:
        """Continue `request`; it is heard of through its sink. `request.table` belongs to the engine from here on,
        also when this raises: then it has been freed.

        Raises:
            RequestTooLong: it can never fit.
            EngineClosed: the engine is closing, or has failed.
            EngineError: a request of this id is in flight, or the request contradicts itself.
        """
        try:
            check_request(
                request,
                vocab_size=self._vocab_size,
                max_model_len=self.max_model_len,
                block_size=self._config.block_size,
            )
            with self._changed:
                if self._closing or self._failure is not None:
                    raise EngineClosed(f"the engine takes no requests: {self._failure or 'it is closing'}")
                if request.request_id in self._sequences:
                    raise EngineError(f"a request {request.request_id!r} is in flight already")
                sequence = new_sequence(request)
                self._sequences[request.request_id] = sequence
                self._scheduler.add(sequence)
                self._changed.notify_all()
        except BaseException:
            if request.table is not None:
                self.free(request.table)
            raise

    def abort(self, request_id: str) -> None:
        """Forget a request: no call of its sink is made after this returns. Unknown ids are fine: it may have ended."""
        with self._changed:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                sequence.aborted = True
                self._aborted.append(sequence)
                self._changed.notify_all()

    def reserve(self, owner: str, num_tokens: int) -> BlockTable | None:
        """Blocks for the pages of `num_tokens` tokens that will come from elsewhere; None when there are none now."""
        with self._changed:
            return self._scheduler.reserve(owner, num_tokens)

    def free(self, table: BlockTable) -> None:
        """Give back a table that was reserved or retained. Freeing it twice is harmless."""
        self._blocks.free(table)
        with self._changed:
            self._changed.notify_all()

    def lend(self, table: BlockTable) -> None:
        """The blocks of a request that is being computed are being sent elsewhere: they stay as they are until
        `returned`, whatever becomes of the request. Called from its `on_layer`."""
        self._blocks.lend(table)

    def returned(self, table: BlockTable) -> None:
        """Nothing of a table that was lent is in flight any more."""
        self._blocks.returned(table)
        with self._changed:
            self._changed.notify_all()

    def on_blocks_freed(self, listener: Callable[[], None]) -> None:
        """Have `listener` called, on any thread, each time a refused reservation may succeed: blocks have come back, or
        those who stood before it have theirs. It must not block."""
        self._blocks.on_freed(listener)

    def stats(self) -> EngineStats:
        """A snapshot."""
        with self._changed:
            return EngineStats(
                blocks_total=self.num_blocks,
                blocks_free=self._blocks.num_free,
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                tokens_computed=self._tokens_computed,
                prompt_tokens_computed=self._prompt_tokens_computed,
                steps=self._steps,
                preemptions=self._scheduler.preemptions,
            )

    def _run(self) -> None:
        torch.set_num_threads(self._config.compute_threads)
        try:
            while (step := self._next_step()) is not None:
                self._compute(step)
        except BaseException as error:
            logger.critical("the engine's thread has died", exc_info=error)
            with self._changed:
                self._failure = error
            self._fail_all(f"the engine has failed: {error!r}")
            raise
        self._fail_all(CLOSING)

    def _next_step(self) -> list[Scheduled] | None:
        """Wait for something to compute. None when the engine is closing."""
        with self._changed:
            while not self._closing:
                self._forget_aborted()
                step = self._scheduler.schedule()
                if self._scheduler.take_turn_of_claims():
                    self._blocks.tell_listeners()
                if step:
                    return step
                self._changed.wait()
        return None

    def _compute(self, step: list[Scheduled]) -> None:
        try:
            batch = build_batch(self._pool, step)
            drawing = [scheduled.sequence for scheduled in batch.drawing]
            drawn = sample(forward(self._model, batch), drawing)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step))
            with self._changed:
                for scheduled in step:
                    self._end(scheduled.sequence, Failed(message=f"a step of the model failed: {error}"))
            return
        with self._changed:
            self._steps += 1
            for scheduled in step:
                self._count(scheduled)
            self._hand_out(drawing, drawn)

    def _count(self, scheduled: Scheduled) -> None:
        sequence, num_tokens = scheduled.sequence, scheduled.num_tokens
        of_prompt = max(0, min(sequence.num_prompt - sequence.computed, num_tokens))
        sequence.computed += num_tokens
        sequence.prompt_tokens_computed += of_prompt
        self._tokens_computed += num_tokens
        self._prompt_tokens_computed += of_prompt

    def _hand_out(self, sequences: Many[Sequence], drawn: Many[Drawn | None]) -> None:
        for sequence, one in zip(sequences, drawn, strict=True):
            if one is None:
                self._end(sequence, Failed(message="the model's logits for it are not finite"))
                continue
            position = len(sequence.tokens)
            sequence.tokens.append(one.token_id)
            if sequence.counts is not None:
                sequence.counts.add(one.token_id)
            finish = _finish(sequence)
            token = Token(
                token_id=one.token_id,
                logprob=one.logprob,
                position=position,
                finish=finish,
                prompt_tokens_computed=sequence.prompt_tokens_computed,
            )
            if finish is None:
                self._tell(sequence, token)
            else:
                self._end(sequence, token)

    def _end(self, sequence: Sequence, output: Output) -> None:
        """The last output of a sequence. One that was aborted meanwhile is left to `_forget_aborted`."""
        if sequence.aborted:
            return
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        table, sequence.table = sequence.table, None
        retained = sequence.request.retain and isinstance(output, Token)
        sequence.request.table = table if retained else None
        if table is not None and not retained:
            self._blocks.free(table)
        self._tell(sequence, output)

    def _tell(self, sequence: Sequence, output: Output) -> None:
        if sequence.aborted:
            return
        try:
            sequence.request.sink(output)
        except Exception:  # the owner's mistake must not stop other requests
            logger.exception("the owner of request %s failed to take its output", sequence.request.request_id)

    def _forget_aborted(self) -> None:
        for sequence in self._aborted:
            self._scheduler.remove(sequence)
            if sequence.table is not None:
                self._blocks.free(sequence.table)
                sequence.table = None
        self._aborted.clear()

    def _fail_all(self, message: str) -> None:
        with self._changed:
            self._forget_aborted()
            for sequence in self._scheduler.sequences():
                self._end(sequence, Failed(message=message))
            self._forget_aborted()  # by the owner of another one, when it was told


def _finish(sequence: Sequence) -> FinishReason | None:
    if sequence.tokens[-1] in sequence.request.stop_token_ids:
        return "stop"
    return "length" if sequence.num_output >= sequence.request.max_tokens else None


def _max_model_len(info: ModelInfo, config: EngineConfig, num_blocks: int) -> int:
    wanted = min(config.max_model_len or info.max_position_embeddings, info.max_position_embeddings)
    held = num_blocks * config.block_size
    if wanted > held:
        logger.warning(
            "a request may have at most %d tokens, not %d: the page pool holds no more; raise engine.kv_cache_bytes",
            held,
            wanted,
        )
    return min(wanted, held)
