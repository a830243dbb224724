import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from deploy.processes import ProcessIdentity, end_session, identify, session_environment, session_processes

# Starts a grandchild that ignores SIGTERM, tells its id, and leaves it behind as an orphan.
ORPHAN = """
import subprocess, sys
code = "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def session() -> Iterator[str]:
    session = secrets.token_hex(8)
    yield session
    assert end_session(session, grace_s=0.0) == []


def started(session: str, code: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **session_environment(session)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)


def test_processes_are_found_by_their_session_also_as_orphans(session: str) -> None:
    parent = started(session, ORPHAN)
    output, _ = parent.communicate()
    assert [process.pid for process in session_processes(session)] == [int(output)]
    assert session_processes(session + "x") == []


def test_a_process_that_ignores_the_polite_way_is_killed(session: str) -> None:
    output, _ = started(session, ORPHAN).communicate()
    orphan = psutil.Process(int(output))
    assert end_session(session, grace_s=0.2) == []
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_a_process_may_end_by_itself_within_the_grace(session: str) -> None:
    child = started(session, "import signal; print('up', flush=True); signal.pause()")
    assert child.stdout is not None
    child.stdout.readline()
    with child:
        assert end_session(session, grace_s=60.0) == []
    assert child.returncode == -15


def test_an_identity_is_not_fooled_by_a_reused_id() -> None:
    own = identify(os.getpid())
    assert own.process() == psutil.Process()
    assert ProcessIdentity(own.pid, own.started - 1).process() is None


def test_an_identity_knows_when_its_process_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    identity = identify(child.pid)
    assert identity.process() is not None
    child.kill()
    child.wait()
    assert identity.process() is None
    assert child.stdin is not None
    child.stdin.close()
