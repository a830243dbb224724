"""The `Prefill` service."""

from __future__ import annotations

import logging
from typing import Any

import grpc

from connector import ConnectorError, DestinationRef, EngineId, InvalidTransition, PlanError
from engine import EngineClosed, EngineError, Token
from prefill.config import PrefillConfig
from prefill.job import GivenUp, Job, Prefilled, PrefillFailed
from prefill.write_job import WriteJob
from rpc.errors import CallRefused
from rpc.v1 import prefill_pb2, prefill_pb2_grpc
from worker import WorkerCore
from worker.core import as_message
from worker.sampling import from_message
from worker.validation import check_prompt, check_sampling

logger = logging.getLogger(__name__)

NAME = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """See prefill.proto."""

    def __init__(self, core: WorkerCore, config: PrefillConfig) -> None:
        self._core = core
        self._config = config
        self._computing = 0

    async def Prefill(  # type: ignore[override]  # a coroutine that writes, rather than a generator
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[prefill_pb2.PrefillRequest, prefill_pb2.PrefillEvent],
    ) -> None:
        """Compute one prompt and hold it."""
        outcome = "cancelled"
        refused: CallRefused | None = None
        try:
            await self._prefill(request, context)
            outcome = "prefilled"
        except CallRefused as error:
            outcome, refused = error.code.name.lower(), error
        except Exception as error:
            outcome, refused = "internal", CallRefused(grpc.StatusCode.INTERNAL, f"a mistake here: {error!r}")
            logger.exception("request %s, transfer %s failed", request.request_id, request.transfer_id)
        finally:  # counted before the caller hears of it
            self._core.counters[f"prompts_{outcome}"] += 1
        if refused is not None:
            await self._refuse(request, context, refused)

    async def _refuse(
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[Any, prefill_pb2.PrefillEvent],
        refused: CallRefused,
    ) -> None:
        logger.info("request %s, transfer %s ended early: %s", request.request_id, request.transfer_id, refused)
        await context.abort(refused.code, str(refused))

    async def _prefill(
        self, request: prefill_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, prefill_pb2.PrefillEvent]
    ) -> None:
        self._check(request)
        job = self._open(request)
        self._computing += 1
        cause = "its call was cancelled"
        try:
            await context.write(prefill_pb2.PrefillEvent(accepted=prefill_pb2.Accepted()))
            job.submit(list(request.prompt_token_ids), from_message(request.sampling))
            prefilled = await job.done
            logger.info(
                "request %s, transfer %s: %d tokens have been computed for %s",
                request.request_id,
                request.transfer_id,
                len(request.prompt_token_ids),
                request.consumer.name,
            )
            await context.write(prefill_pb2.PrefillEvent(prefilled=_message(prefilled)))
        except GivenUp as error:
            raise CallRefused(grpc.StatusCode.CANCELLED, str(error)) from error
        except PrefillFailed as error:
            cause = str(error)
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        except EngineClosed as error:
            cause = str(error)
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        except EngineError as error:
            cause = str(error)
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        finally:
            self._computing -= 1
            job.cancel(cause)

    def _open(self, request: prefill_pb2.PrefillRequest) -> Job | WriteJob:
        core = self._core
        consumer = EngineId(request.consumer.name, request.consumer.incarnation)
        try:
            if request.HasField("destination"):
                return WriteJob(core.engine, core.connector.sources, _destination(request, consumer))
            job = Job(core.engine, core.connector.sources, request.transfer_id)
            core.connector.sources.open(request.transfer_id, consumer, job.ended)
        except (InvalidTransition, PlanError) as error:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error
        except ConnectorError as error:
            raise CallRefused(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        return job

    def _check(self, request: prefill_pb2.PrefillRequest) -> None:
        core = self._core
        wanted = EngineId(request.producer.name, request.producer.incarnation)
        if wanted != core.engine_id:
            raise CallRefused(grpc.StatusCode.FAILED_PRECONDITION, f"this is {core.engine_id}, not {wanted}")
        core.require_ready()
        if self._computing >= self._config.max_queue:
            raise CallRefused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{core.engine_id} has {self._computing} prompts in its queue (prefill.max_queue); try again later",
            )
        if request.HasField("destination") and core.config.connector.mode != "write":
            raise CallRefused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"{core.engine_id} has connector.mode {core.config.connector.mode!r}, but the call names a "
                "destination to write to; start both workers with the same mode",
            )
        if not request.transfer_id:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "transfer_id is empty")
        check_prompt(
            request.prompt_token_ids, 1, vocab_size=core.info.vocab_size, max_model_len=core.engine.max_model_len
        )
        check_sampling(request.sampling)


def _destination(request: prefill_pb2.PrefillRequest, consumer: EngineId) -> DestinationRef:
    num_tokens = request.destination.num_tokens
    if num_tokens != len(request.prompt_token_ids):
        raise PlanError(f"the destination is for {num_tokens} tokens, the prompt has {len(request.prompt_token_ids)}")
    return DestinationRef(
        transfer_id=request.transfer_id,
        consumer=consumer,
        blocks={group.group: list(group.block_ids) for group in request.destination.groups},
        num_tokens=num_tokens,
        local_tokens=request.destination.local_tokens,
    )


def _message(prefilled: Prefilled | Token) -> prefill_pb2.Prefilled:
    if isinstance(prefilled, Token):
        return prefill_pb2.Prefilled(first_token_id=prefilled.token_id, first_token_logprob=prefilled.logprob)
    source = prefilled.source
    return prefill_pb2.Prefilled(
        first_token_id=prefilled.token.token_id,
        first_token_logprob=prefilled.token.logprob,
        source=prefill_pb2.SourceDescription(
            transfer_id=source.transfer_id,
            producer=as_message(source.producer),
            groups=[prefill_pb2.GroupBlocks(group=name, block_ids=ids) for name, ids in source.blocks.items()],
            num_tokens=source.num_tokens,
        ),
    )
