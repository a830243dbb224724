"""The call to a prefill worker: a prompt goes out, its first token comes back."""

from __future__ import annotations

import asyncio

import grpc

from connector import DestinationRef, EngineId, SourceRef
from decode.peers import PrefillPeer
from engine import Token
from rpc.errors import CallRefused
from rpc.v1 import generate_pb2, prefill_pb2
from worker.core import as_message

PASSED_ON = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""What prefill says of the request itself; everything else is a failed leg."""


async def call_prefill(
    peer: PrefillPeer,
    consumer: EngineId,
    transfer_id: str,
    message: generate_pb2.GenerateRequest,
    destination: DestinationRef | None,
    timeout_s: float,
) -> tuple[Token, SourceRef | None]:
    """Have the prompt computed: its first token, and where its pages lie, unless they are written to `destination`.

    Raises:
        CallRefused: it was not; the status says whose fault that is.
    """
    call = peer.stub.Prefill(
        prefill_pb2.PrefillRequest(
            request_id=message.request_id,
            transfer_id=transfer_id,
            consumer=as_message(consumer),
            producer=as_message(peer.engine_id),
            prompt_token_ids=message.prompt_token_ids,
            sampling=message.sampling,
            destination=None if destination is None else _destination(destination),
        ),
        timeout=timeout_s,
    )
    try:
        async for event in call:
            if event.WhichOneof("event") == "prefilled":
                return _first_token(event.prefilled, len(message.prompt_token_ids)), _source(event.prefilled)
    except grpc.aio.AioRpcError as error:
        code = error.code() if error.code() in PASSED_ON else grpc.StatusCode.UNAVAILABLE
        raise CallRefused(code, f"prefill on {peer.engine_id.name} failed: {error.details()}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # Nobody has cancelled this request, only the call, whose channel was closed with the peer. Let through, it
        # would end the handler without a status, and the client would wait for one until its deadline.
        raise CallRefused(
            grpc.StatusCode.UNAVAILABLE, f"prefill on {peer.engine_id.name} was given up: the worker was dropped"
        ) from None
    finally:
        # Not left to gRPC: a task that is cancelled while its call is being made does not cancel the call.
        call.cancel()
    raise CallRefused(grpc.StatusCode.UNAVAILABLE, f"prefill on {peer.engine_id.name} ended without an answer")


def _first_token(prefilled: prefill_pb2.Prefilled, position: int) -> Token:
    return Token(
        token_id=prefilled.first_token_id,
        logprob=prefilled.first_token_logprob,
        position=position,
        finish=None,
        prompt_tokens_computed=0,
    )


def _source(prefilled: prefill_pb2.Prefilled) -> SourceRef | None:
    if not prefilled.HasField("source"):
        return None
    source = prefilled.source
    return SourceRef(
        transfer_id=source.transfer_id,
        producer=EngineId(source.producer.name, source.producer.incarnation),
        blocks={group.group: list(group.block_ids) for group in source.groups},
        num_tokens=source.num_tokens,
    )


def _destination(destination: DestinationRef) -> prefill_pb2.WriteDestination:
    return prefill_pb2.WriteDestination(
        groups=[prefill_pb2.GroupBlocks(group=name, block_ids=ids) for name, ids in destination.blocks.items()],
        num_tokens=destination.num_tokens,
        local_tokens=destination.local_tokens,
    )
