"""What a person sees while a cluster starts.

The owner reports events; a terminal shows them, or a pipe carries them to the `kvferry up --detach` that waits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Protocol, TextIO, TypeAlias

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`subject` (a worker's name, "model", "ray") has entered a phase; `done` when it was the last one."""

    subject: str
    phase: str
    done: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The cluster answers; `summary` is for people."""

    summary: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The run is over. `message` is one sentence, or "" when there is nothing to explain."""

    exit_code: int
    message: str


Event: TypeAlias = Progress | Ready | Ended


class Reporter(Protocol):
    """Where events go."""

    def report(self, event: Event) -> None:
        """Show or forward `event`; never blocks for long, never raises."""


class Terminal:
    """Progress on `err`: live rows on a terminal, a line per phase elsewhere. The summary on `out`."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out = out
        self._err = err
        self._console = Console(file=err, highlight=False)
        self._started = time.monotonic()
        self._rows: dict[str, Progress] = {}
        self._live: Live | None = None
        self._spinner = Spinner("dots")

    def report(self, event: Event) -> None:
        """Show `event`."""
        match event:
            case Progress():
                self._progress(event)
            case Ready(summary):
                self.finish()
                print(summary, file=self._out, flush=True)
            case Ended(message=message):
                self.finish()
                if message:
                    print(f"kvferry: {message}", file=self._err, flush=True)

    def finish(self) -> None:
        """Leave the live display; what it shows stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._rows.clear()

    def _progress(self, event: Progress) -> None:
        if self._rows.get(event.subject) == event:
            return
        self._rows[event.subject] = event
        if not self._console.is_terminal:
            elapsed = time.monotonic() - self._started
            print(f"[{elapsed:5.1f} s] {event.subject}: {event.phase}", file=self._err, flush=True)
        elif self._live is None:
            self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=8)
            self._live.start()

    def _table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for row in list(self._rows.values()):
            mark: RenderableType = Text("✓", style="green") if row.done else self._spinner
            table.add_row(mark, row.subject, Text(row.phase, style="dim" if row.done else ""))
        return table


class Pipe:
    """Events as lines into a file descriptor; a reader that has left is nobody's fault."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def report(self, event: Event) -> None:
        """Forward `event`; nothing is forwarded after `Ready`, when nobody waits any more."""
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            self._close()
        if isinstance(event, Ready | Ended):
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventReader:
    """Events that a `Pipe` wrote, until its end is closed. Iterating may be interrupted and taken up again."""

    def __init__(self, descriptor: int) -> None:
        self._lines = os.fdopen(descriptor, "rb")

    def __enter__(self) -> EventReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        line = self._lines.readline()
        if not line.endswith(b"\n"):
            raise StopIteration
        return msgspec.json.decode(line, type=Event)
