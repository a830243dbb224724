from pathlib import Path

from deploy.log_tail import LINES, log_tail
from deploy.member import death_reason


def test_the_last_lines_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert log_tail(log).splitlines() == [f"  line {number}" for number in range(100 - LINES, 100)]


def test_of_a_crash_report_the_cause_and_its_thread_are_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    frames = "".join(f"  File {number}\n" for number in range(100))
    log.write_text(
        "loading\nmapping pages\nFatal Python error: Segmentation fault\n\n"
        f"Thread 0x1:\n{frames}\nCurrent thread 0x2:\n  File guilty\n\nThread 0x3:\n{frames}"
    )
    lines = log_tail(log).splitlines()
    assert lines[:3] == ["  loading", "  mapping pages", "  Fatal Python error: Segmentation fault"]
    assert lines[3:5] == ["  Current thread 0x2:", "    File guilty"]
    assert len(lines) == LINES


def test_a_log_that_is_elsewhere_is_named(tmp_path: Path) -> None:
    assert log_tail(tmp_path / "absent") == f"  (not on this host: {tmp_path / 'absent'})"


def test_the_reason_is_picked_out_of_ray_s_message() -> None:
    message = (
        "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n"
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
        "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) …"
    )
    assert death_reason(message) == "Worker unexpectedly exits with a connection error code 2. End of file."
    assert death_reason("The actor is gone.\nNobody knows why.") == "The actor is gone. Nobody knows why."
