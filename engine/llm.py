"""Prompts in, texts out, without a server: `LLM(path).generate(prompts)`.

It is a thin front: each prompt becomes an `EngineRequest`, all are submitted at once, and the engine batches them as it
batches anything else. Tokens are gathered on the engine's thread; the caller sleeps until the last one has come.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from engine.admission import check_request
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, GenerationFailed, ModelError, PromptRefused
from engine.model_info import inspect_model
from engine.request import EngineRequest, Failed, FinishReason, Output, SamplingParams
from engine.stop_tokens import stop_tokens

logger = logging.getLogger(__name__)

REFRESH_S = 0.1
"""How often a progress bar looks at what has come."""

Prompt = str | Sequence[int]
T = TypeVar("T")


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt.

    `token_ids` are the drawn ones, a stop token included, with the natural logarithm of each one's probability in
    `logprobs`; `text` leaves special tokens out, and is None where the model folder has no usable tokenizer. `finish`
    is None only within `GenerationFailed`.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish: FinishReason | None
    logprobs: list[float]


class LLM:
    """A model in a local folder, loaded and ready. `settings` are the fields of `EngineConfig`.

    Use it as a context manager, or `close` it. `engine` is what computes.

    Raises:
        ModelError: the folder cannot be served.
        EngineError: a setting cannot be, or the page pool cannot be had.
    """

    def __init__(self, path: Path | str, **settings: Any) -> None:
        try:
            self._config = msgspec.convert(settings, EngineConfig)
        except msgspec.ValidationError as error:
            raise EngineError(f"the engine's settings cannot be: {error}") from error
        self._info = inspect_model(Path(path))
        self._stop_tokens = stop_tokens(self._info.path)
        self._tokenizer: Any = None
        self._tokenizer_error: Exception | None = None
        self._calls = itertools.count()
        self.engine = Engine(self._info, self._config)
        self.engine.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 - it is frozen
        *,
        max_tokens: int | Sequence[int] = 16,
        stop_token_ids: Collection[int] = (),
        ignore_eos: bool = False,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Continue each prompt; the results are in the order of `prompts`, one for each.

        A prompt is a text or token ids; one alone is a list of one. `params` and `max_tokens` are for all, or one for
        each. An answer ends after `max_tokens` tokens, or with one of `stop_token_ids` or, unless `ignore_eos`, of
        those that the model folder names. `progress` shows a bar on standard error; None: when that is a terminal.
        An interrupt aborts what is in flight. May be called from several threads.

        Raises:
            PromptRefused: a prompt that can never run; nothing has been computed.
            GenerationFailed: some ended without finishing; the others' results are in it.
            EngineClosed: after `close`.
            ModelError: a text, but the model folder has no usable tokenizer.
            EngineError: not as many `params` or `max_tokens` as prompts.
        """
        many = _several(prompts)
        ends = frozenset(stop_token_ids) | (frozenset() if ignore_eos else self._eos_tokens())
        gathered = _Gathered(len(many))
        call = next(self._calls)
        requests = [
            EngineRequest(
                request_id=f"{call}.{index}",
                prompt_token_ids=self._tokens(prompt),
                sampling=sampling,
                max_tokens=limit,
                stop_token_ids=ends,
                sink=gathered.sink(index),
            )
            for index, (prompt, sampling, limit) in enumerate(
                zip(many, _each(params, len(many), "params"), _each(max_tokens, len(many), "max_tokens"), strict=True)
            )
        ]
        for index, request in enumerate(requests):
            self._check(index, len(requests), request)
        try:
            for request in requests:
                self.engine.submit(request)
            shown = sys.stderr.isatty() if progress is None else progress
            with _bar(len(requests), sum(one.max_tokens for one in requests)) if shown else _nothing() as tell:
                while not gathered.ended.wait(REFRESH_S if shown else None):
                    tell(gathered)
                tell(gathered)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        generations = [
            Generation(
                prompt_token_ids=request.prompt_token_ids,
                token_ids=gathered.token_ids[index],
                text=self._text(gathered.token_ids[index]),
                finish=gathered.finish[index],
                logprobs=gathered.logprobs[index],
            )
            for index, request in enumerate(requests)
        ]
        if gathered.failures:
            raise GenerationFailed(gathered.failures, generations)
        return generations

    def close(self) -> None:
        """Fail what is in flight and give the memory back. Closing twice is harmless."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, index: int, count: int, request: EngineRequest) -> None:
        try:
            check_request(
                request,
                vocab_size=self._info.vocab_size,
                max_model_len=self.engine.max_model_len,
                block_size=self._config.block_size,
            )
        except EngineError as error:
            raise PromptRefused(index, count, str(error)) from error

    def _eos_tokens(self) -> frozenset[int]:
        if self._stop_tokens is not None:
            return self._stop_tokens
        tokenizer = self._load_tokenizer()
        named = None if tokenizer is None else tokenizer.eos_token_id
        return frozenset() if named is None else frozenset([named])

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            raise ModelError(
                f"model folder {self._info.path} has no usable tokenizer; give token ids instead of text "
                f"({self._tokenizer_error})"
            ) from self._tokenizer_error
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids

    def _text(self, token_ids: list[int]) -> str | None:
        tokenizer = self._load_tokenizer()
        if tokenizer is None:
            return None
        text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _load_tokenizer(self) -> Any:
        """None when the folder has none that can be used; that is told once."""
        if self._tokenizer is None and self._tokenizer_error is None:
            from transformers import AutoTokenizer

            where = {} if self._info.gguf_file is None else {"gguf_file": self._info.gguf_file}
            try:
                self._tokenizer = AutoTokenizer.from_pretrained(self._info.path, local_files_only=True, **where)
            except Exception as error:  # it raises whatever its parts do
                logger.warning("model folder %s has no usable tokenizer: %s", self._info.path, error)
                self._tokenizer_error = error
        return self._tokenizer


class _Gathered:
    """What the sinks of one call are told, on the engine's thread."""

    def __init__(self, count: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.finish: list[FinishReason | None] = [None] * count
        self.failures: dict[int, str] = {}
        self.num_tokens = 0
        self.num_ended = 0
        self.ended = threading.Event()
        self._count = count
        if count == 0:
            self.ended.set()

    def sink(self, index: int) -> Callable[[Output], None]:
        """For the request of prompt `index`."""

        def take(output: Output) -> None:
            if isinstance(output, Failed):
                self.failures[index] = output.message
            else:
                self.token_ids[index].append(output.token_id)
                self.logprobs[index].append(output.logprob)
                self.num_tokens += 1
                self.finish[index] = output.finish
                if output.finish is None:
                    return
            self.num_ended += 1
            if self.num_ended == self._count:
                self.ended.set()

        return take


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _each(given: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise EngineError(f"there are {count} prompts and {len(given)} {name}; give one for all, or one for each")
    return list(given)


@contextmanager
def _bar(num_prompts: int, num_tokens: int) -> Iterator[Callable[[_Gathered], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr, force_terminal=True), transient=True) as progress:
        task = progress.add_task("", total=num_tokens, rate="")

        def tell(gathered: _Gathered) -> None:
            elapsed_s = progress.tasks[0].elapsed or 0.0
            rate = gathered.num_tokens / elapsed_s if elapsed_s > 0 else 0.0
            progress.update(
                task,
                completed=gathered.num_tokens,
                description=f"{gathered.num_ended} of {num_prompts} prompts",
                rate=f"{rate:.0f} tokens/s",
            )

        yield tell


@contextmanager
def _nothing() -> Iterator[Callable[[_Gathered], None]]:
    yield lambda _: None
