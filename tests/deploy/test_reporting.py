import io
import os

import pytest

from deploy.reporting import Ended, Event, EventReader, Pipe, Progress, Ready, Terminal


def test_events_pass_through_a_pipe_until_the_cluster_is_ready() -> None:
    reading, writing = os.pipe()
    pipe = Pipe(writing)
    sent: list[Event] = [
        Progress("prefill-0", "loading"),
        Progress("prefill-0", "loaded", done=True),
        Ready("there it is"),
    ]
    for event in [*sent, Ended(0, "")]:
        pipe.report(event)
    with EventReader(reading) as reader:
        assert list(reader) == sent


def test_a_reader_that_has_left_does_not_disturb_the_owner() -> None:
    reading, writing = os.pipe()
    pipe = Pipe(writing)
    os.close(reading)
    pipe.report(Progress("ray", "starting"))
    pipe.report(Ready(""))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing)


def test_reading_ends_with_the_writer_also_in_the_middle_of_a_line() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"type":"Progress","subject":"a","phase":"b"}\n{"type":"Prog')
    os.close(writing)
    with EventReader(reading) as reader:
        assert list(reader) == [Progress("a", "b")]


def test_without_a_terminal_every_new_phase_is_one_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err)
    for event in (Progress("a", "loading"), Progress("a", "loading"), Progress("a", "loaded", done=True)):
        terminal.report(event)
    terminal.report(Ready("summary"))
    terminal.report(Ended(1, "it broke"))
    assert out.getvalue() == "summary\n"
    lines = err.getvalue().splitlines()
    assert [line.partition("] ")[2] for line in lines[:2]] == ["a: loading", "a: loaded"]
    assert lines[2:] == ["kvferry: it broke"]
