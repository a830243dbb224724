"""The process of one side of a contender: one command, one answer, until its socket ends.

Messages are single packets of a SOCK_SEQPACKET pair that is inherited. What the contender's libraries print goes to
standard error, which its parent keeps in a file.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback
from collections.abc import Collection
from typing import Annotated, TypeAlias, cast

import msgspec
import numpy as np

from bench.transfer.contender import CONTENDERS, Contender, Role, Serving
from bench.transfer.memory import MappedMemory
from connector.transport.base import Op

MAX_PACKET_BYTES = 1 << 17


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Described`."""


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`."""

    description: bytes


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`."""


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`; lasts until the next command. See `Serving`."""


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`."""

    page_bytes: Annotated[int, msgspec.Meta(ge=8)]


class Operate(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Moved`. The page ids are arrays of int32."""

    op: Op
    local: bytes
    remote: bytes
    notice: int | None


class AwaitNotice(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done` when it is about to wait, and then by `Noticed`."""

    number: int


class Described(msgspec.Struct, frozen=True, tag=True):
    """To be given to the other side."""

    description: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is so."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """See `Timing`."""

    started_ns: int
    ended_ns: int


class Noticed(msgspec.Struct, frozen=True, tag=True):
    """When this process saw the notice, in ns of CLOCK_MONOTONIC."""

    at_ns: int


class Unavailable(msgspec.Struct, frozen=True, tag=True):
    """The contender cannot run here; the first and last thing that is said."""

    reason: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The contender failed; the last thing that is said."""

    reason: str


Command: TypeAlias = Describe | Connect | Ping | Serve | Prepare | Operate | AwaitNotice
Answer: TypeAlias = Described | Done | Moved | Noticed | Unavailable | Broken

_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


def make_contender(name: str, role: Role, memory: MappedMemory, other: MappedMemory) -> Contender:
    """One side of a contender. Raises whatever its libraries raise."""
    family = name.removesuffix("-tcp")
    if family == "memcpy":
        from bench.transfer.own import Memcpy

        return Memcpy(memory, other)
    if family == "nixl":
        from bench.transfer.nixl import Nixl

        return Nixl(role, memory)
    if family == "mooncake":
        from bench.transfer.mooncake import Mooncake

        return Mooncake(role, memory)
    from bench.transfer.own import make_shm, make_ucx

    return make_shm(role, memory) if family == "shm" else make_ucx(role, memory)


def cores_of(role: Role, cores: Collection[int]) -> set[int]:
    """Half of the cores for either side; all of them where there is only one."""
    ordered = sorted(cores)
    half = len(ordered) // 2
    return set(ordered[:half] if role == "initiator" else ordered[half:]) or set(ordered)


def serve(stream: socket.socket, name: str, role: Role, memory: MappedMemory, other: MappedMemory) -> None:
    """Answer commands until the other end closes."""

    def say(answer: Answer) -> None:
        stream.sendall(msgspec.msgpack.encode(answer))

    try:
        contender = make_contender(name, role, memory, other)
    except Exception as error:  # other people's libraries: whatever it is, it is the reason why this one cannot run
        say(Unavailable(f"{type(error).__name__}: {error}"))
        return
    say(Done())
    while packet := stream.recv(MAX_PACKET_BYTES):
        try:
            match _commands.decode(packet):
                case Describe():
                    say(Described(contender.describe()))
                case Connect(description):
                    contender.connect(description)
                    say(Done())
                case Ping():
                    say(Done())
                case Serve():
                    assert isinstance(contender, Serving)
                    say(Done())
                    contender.serve(lambda: bool(select.select([stream], [], [], 0)[0]))
                case Prepare(page_bytes):
                    contender.prepare(page_bytes)
                    say(Done())
                case Operate(op, local, remote, notice):
                    ours, theirs = np.frombuffer(local, dtype=np.int32), np.frombuffer(remote, dtype=np.int32)
                    timing = contender.operate(op, ours, theirs, notice)
                    say(Moved(timing.started_ns, timing.ended_ns))
                case AwaitNotice(number):
                    say(Done())
                    say(Noticed(contender.await_notice(number)))
        except Exception as error:
            traceback.print_exc()  # first, for the log is read when it is said
            say(Broken(f"{type(error).__name__}: {error}"))
            return


def main(arguments: list[str]) -> None:
    """`name role socket memory other`, the last three as inherited descriptors."""
    name, role = arguments[0], cast(Role, arguments[1])
    stream = socket.socket(fileno=int(arguments[2]))
    if CONTENDERS[name].own_cores:
        os.sched_setaffinity(0, cores_of(role, os.sched_getaffinity(0)))
    memory, other = (MappedMemory(int(fd)) for fd in arguments[3:5])
    serve(stream, name, role, memory, other)
    stream.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # other people's libraries may hang or crash while they are torn down; nothing is left to save


if __name__ == "__main__":
    main(sys.argv[1:])
