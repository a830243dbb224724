"""The measuring process's end of one contender process: started, asked, and gone afterwards whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.errors import ContenderFailed
from bench.transfer import process
from bench.transfer.contender import DEADLINE_S, Role
from bench.transfer.memory import MappedMemory

START_DEADLINE_S = 120.0
LOG_TAIL_BYTES = 2000
CLOSE_DEADLINE_S = 5.0

AnswerT = TypeVar("AnswerT", bound=process.Answer)
_answers: msgspec.msgpack.Decoder[process.Answer] = msgspec.msgpack.Decoder(process.Answer)


class NotHere(Exception):
    """This contender cannot run on this machine; the text is why."""


class Side:
    """One process of a contender.

    `memory` is its own and `other` the other side's; `environment` replaces this process's.
    """

    def __init__(
        self, name: str, role: Role, memory: MappedMemory, other: MappedMemory, environment: Mapping[str, str]
    ) -> None:
        """Start it; `ready` waits until it runs."""
        self.who = f"{name} ({role})"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this object
        self._stream, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), memory.fd, other.fd)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.transfer.process", name, role, *map(str, fds)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=fds,
                env=dict(environment),
                cwd=Path(__file__).parents[2],
            )
        self.pid = self._process.pid

    def ready(self) -> None:
        """Wait until it runs.

        Raises:
            NotHere: it cannot run here.
            ContenderFailed: it broke on the way.
        """
        match self._receive(START_DEADLINE_S):
            case process.Unavailable(reason):
                raise NotHere(reason)
            case process.Done():
                return
            case answer:
                raise self._unexpected(answer)

    def tell(self, command: process.Command) -> None:
        """Send a command without waiting for its answer."""
        try:
            self._stream.sendall(msgspec.msgpack.encode(command))
        except OSError as error:
            raise self._ended() from error

    def hear(self, kind: type[AnswerT]) -> AnswerT:
        """The next answer, which has to be of that kind.

        Raises:
            ContenderFailed: it is late, broken, ended, or says something else.
        """
        answer = self._receive(DEADLINE_S * 2)
        if not isinstance(answer, kind):
            raise self._unexpected(answer)
        return answer

    def ask(self, command: process.Command, kind: type[AnswerT]) -> AnswerT:
        """`tell` and `hear`."""
        self.tell(command)
        return self.hear(kind)

    def close(self) -> None:
        """It ends when its socket does; if not, it is killed."""
        self._stream.close()
        try:
            self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _receive(self, timeout_s: float) -> process.Answer:
        self._stream.settimeout(timeout_s)
        try:
            packet = self._stream.recv(process.MAX_PACKET_BYTES)
        except TimeoutError:
            raise ContenderFailed(self.who, f"has not answered for {timeout_s:g} s", self._log_tail()) from None
        except OSError as error:
            raise self._ended() from error
        if not packet:
            raise self._ended()
        return _answers.decode(packet)

    def _ended(self) -> ContenderFailed:
        try:
            code = self._process.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return ContenderFailed(self.who, "has closed its socket", self._log_tail())
        return ContenderFailed(self.who, f"ended by itself with code {code}", self._log_tail())

    def _unexpected(self, answer: process.Answer) -> ContenderFailed:
        if isinstance(answer, process.Broken):
            return ContenderFailed(self.who, f"failed: {answer.reason}", self._log_tail())
        return ContenderFailed(self.who, f"answered {type(answer).__name__} out of turn", self._log_tail())

    def _log_tail(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(0, size - LOG_TAIL_BYTES))
        return tail.decode(errors="replace").strip()
