"""The engine: requests in from any thread, steps on one thread of its own, tokens out through each request's sink.

One lock guards what callers and the thread share. The thread does not hold it while it computes, but does while it
hands tokens out; that is why nothing more is heard of a request once `abort` has returned. Blocks of a request that was
aborted during a step are freed after it: until then the step may still write them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import msgspec
import torch

from connector.pages import Group, PoolGeometry
from engine import _native
from engine.admission import check_request
from engine.assembly import assemble
from engine.blocks import BlockTable, HashChain, root_hash
from engine.config import EngineConfig
from engine.errors import EngineClosed, EngineError
from engine.executor import Executor, StepTimes
from engine.model_info import ModelInfo
from engine.request import EngineRequest, Failed, Output
from engine.scheduler import Scheduler, Step
from engine.sequence import Sequence, new_sequence
from engine.settlement import Advance, Settlement
from engine.threads import concerns

logger = logging.getLogger(__name__)

CLOSING = "the engine is closing"


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. `blocks_cached` of the free ones hold what others may ask for again. `tokens_computed` (tokens run
    through the model), `prompt_tokens_computed` (those of them that belong to a prompt), `prompt_tokens_cached` (those
    that the prefix cache had), `drafts_verified`, `drafts_accepted`, `steps` and `preemptions` only grow.
    """

    blocks_total: int
    blocks_free: int
    blocks_cached: int
    running: int
    waiting: int
    tokens_computed: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    drafts_verified: int
    drafts_accepted: int
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
        self,
        info: ModelInfo,
        config: EngineConfig,
        progress: Callable[[str], None] = lambda phase: None,
        on_step: Callable[[StepTimes], None] | None = None,
    ) -> None:
        for concern in concerns(config.compute_threads, len(os.sched_getaffinity(0)), os.environ):
            logger.warning("%s", concern)
        torch.set_num_threads(config.compute_threads)
        _native.use_threads(min(config.compute_threads, len(os.sched_getaffinity(0))))
        parts = assemble(info, config, progress)
        self._pool = parts.memory.pool
        self._blocks = parts.memory.blocks
        self._executor: Executor = parts.executor
        self.num_blocks = self._blocks.num_blocks
        self.max_model_len = parts.memory.max_model_len
        self._info = info
        self._config = config
        self._on_step = on_step
        self._scheduler = Scheduler(
            self._blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            aligned=parts.aligned,
        )
        self._proposer = parts.proposer
        self._settlement = Settlement(self._blocks, parts.executor.copy, aligned=parts.aligned, drafting=parts.drafting)
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
    def model(self) -> Any:
        """The loaded model, for whoever measures what it is made of."""
        return self._executor.model

    @property
    def groups(self) -> tuple[Group, ...]:
        """The KV cache groups of the pool."""
        return tuple(group.spec for group in self._pool.groups)

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
                vocab_size=self._info.vocab_size,
                max_model_len=self.max_model_len,
                block_size=self._config.block_size,
            )
            chain = HashChain(
                root_hash(self._info.fingerprint, request.adapter, request.cache_salt), self._config.block_size
            )
            if self._config.prefix_cache:  # on the caller's thread, not on that which computes
                chain.of(request.prompt_token_ids, len(request.prompt_token_ids) // self._config.block_size)
            with self._changed:
                if self._closing or self._failure is not None:
                    raise EngineClosed(f"the engine takes no requests: {self._failure or 'it is closing'}")
                if request.request_id in self._sequences:
                    raise EngineError(f"a request {request.request_id!r} is in flight already")
                sequence = new_sequence(request, chain)
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
                blocks_cached=self._blocks.num_cached,
                running=self._scheduler.num_running,
                waiting=self._scheduler.num_waiting,
                tokens_computed=self._tokens_computed,
                prompt_tokens_computed=self._prompt_tokens_computed,
                prompt_tokens_cached=self._scheduler.prompt_tokens_cached,
                drafts_verified=self._settlement.drafts_verified,
                drafts_accepted=self._settlement.drafts_accepted,
                steps=self._steps,
                preemptions=self._scheduler.preemptions,
            )

    def _run(self) -> None:
        torch.set_num_threads(self._config.compute_threads)
        try:
            while (found := self._next_step()) is not None:
                self._compute(*found)
        except BaseException as error:
            logger.critical("the engine's thread has died", exc_info=error)
            with self._changed:
                self._failure = error
            self._fail_all(f"the engine has failed: {error!r}")
            raise
        self._fail_all(CLOSING)

    def _next_step(self) -> tuple[Step, float] | None:
        """Wait for something to compute; with the seconds that deciding on it took. None when the engine is closing."""
        with self._changed:
            while not self._closing:
                self._forget_aborted()
                began = time.perf_counter()
                step = self._scheduler.schedule()
                took = time.perf_counter() - began
                if self._scheduler.take_turn_of_claims():
                    self._blocks.tell_listeners()
                if step.scheduled:
                    return step, took
                self._changed.wait()
        return None

    def _compute(self, step: Step, schedule_s: float) -> None:
        try:
            result = self._executor.run(step, schedule_s)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(step.scheduled))
            with self._changed:
                self._blocks.record_unzeroed(step.work.new_block_ids_to_zero or {})
                for scheduled in step.scheduled:
                    self._end(scheduled.sequence, Failed(message=f"a step of the model failed: {error}"))
            return
        failed = [one.sequence for one in step.scheduled if one.sequence.request.request_id in result.failed_loads]
        with self._changed:
            self._steps += 1
            advances = self._settlement.advance(step.scheduled, result.rows, result.drawn, failed)
        self._propose([advance for advance in advances if not advance.failed])
        with self._changed:
            for advance in advances:
                self._tell_all(advance)
            for sequence in failed:
                self._load_failed(sequence, result.failed_loads[sequence.request.request_id])
        if self._on_step is not None:
            self._on_step(result.times)

    def _propose(self, advances: Many[Advance]) -> None:
        """Guess next tokens. Not under the lock: a draft model computes."""
        if self._proposer is None:
            return
        try:
            self._proposer.propose([advance.sequence for advance in advances])
        except Exception:  # answers are the same without drafts
            logger.exception("no drafts for %d sequences", len(advances))
            for advance in advances:
                advance.sequence.drafts = []

    def _tell_all(self, advance: Advance) -> None:
        self._tokens_computed += advance.num_tokens
        self._prompt_tokens_computed += advance.num_prompt_tokens
        if not advance.failed:
            self._settlement.publish(advance.sequence)
        for output in advance.outputs:
            last = isinstance(output, Failed) or output.finish is not None
            (self._end if last else self._tell)(advance.sequence, output)

    def _load_failed(self, sequence: Sequence, message: str) -> None:
        if sequence.request.on_load_failure == "fail":
            self._end(sequence, Failed(message=f"its pages could not be loaded: {message}"))
        elif not sequence.aborted:
            logger.warning("request %s is computed here: %s", sequence.request.request_id, message)
            sequence.to_load = False
            self._scheduler.put_back(sequence)

    def _end(self, sequence: Sequence, output: Output) -> None:
        """The last output of a sequence. One that was aborted meanwhile is left to `_forget_aborted`."""
        if sequence.aborted:
            return
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request.request_id]
        if isinstance(output, Failed):  # what its blocks hold is not to be trusted
            self._scheduler.give_back(sequence, publish=False)
        elif sequence.request.retain:
            table = sequence.request.table = sequence.table
            sequence.table = None
            if table is not None:
                self._blocks.publish_tail(table, sequence.tokens, sequence.written, sequence.chain)
        self._scheduler.give_back(sequence)
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
            self._scheduler.give_back(sequence)
        self._aborted.clear()

    def _fail_all(self, message: str) -> None:
        with self._changed:
            self._forget_aborted()
            for sequence in self._scheduler.sequences():
                self._end(sequence, Failed(message=message))
            self._forget_aborted()  # by the owner of another one, when it was told
