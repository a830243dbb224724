import pytest

from connector import ConnectorConfig
from deploy.actors import errors_for_the_owner, on_this_node, until_failure
from deploy.errors import StartFailed
from engine import EngineConfig
from prefill import PrefillConfig


async def test_a_failure_inside_a_worker_ends_the_watch() -> None:
    looks = iter([None, RuntimeError("out of pages")])
    with pytest.raises(StartFailed, match="has failed: out of pages"):
        await until_failure(lambda: next(looks), poll_s=0)


def test_errors_reach_the_owner_as_one_message_and_the_log_in_full(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(StartFailed, match=r"^prefill-0: no such library$"), errors_for_the_owner("prefill-0"):
        raise OSError("no such library")
    with pytest.raises(StartFailed, match=r"^prefill-0: TimeoutError$"), errors_for_the_owner("prefill-0"):
        raise TimeoutError
    assert "Traceback" in caplog.text


def test_an_address_that_was_given_is_kept() -> None:
    config = PrefillConfig(
        name="prefill-0",
        host="127.0.0.2",
        model_path="/nowhere",
        engine=EngineConfig(),
        connector=ConnectorConfig(host="127.0.0.2"),
        token="secret",
    )
    assert on_this_node(config) is config
