"""Who can be chosen, and what their processes are given."""

import pytest

from bench.errors import BadRequest
from bench.transfer.contender import CONTENDERS, chosen
from bench.transfer.pairs import environment_of
from bench.transfer.process import cores_of


def test_all_contenders_unless_some_are_named() -> None:
    assert [entry.name for entry in chosen(None)] == list(CONTENDERS)
    assert [entry.name for entry in chosen("ucx, memcpy")] == ["memcpy", "ucx"]


@pytest.mark.parametrize(
    ("names", "message"),
    [("ucx-tpc", "did you mean ucx-tcp?"), ("rsync", "there are memcpy, shm"), (" , ", "names none")],
)
def test_an_unknown_contender_is_refused_with_what_there_is(names: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message.replace("?", r"\?")):
        chosen(names)


def test_only_those_kept_to_tcp_get_a_choice_of_ucx_transports() -> None:
    given = {"UCX_TLS": "shm", "PATH": "/bin"}
    assert "UCX_TLS" not in environment_of(CONTENDERS["ucx"], given)
    assert environment_of(CONTENDERS["nixl-tcp"], given)["UCX_TLS"] == "tcp"
    assert environment_of(CONTENDERS["nixl"], given)["PATH"] == "/bin"


def test_a_log_level_that_the_user_has_set_stays() -> None:
    assert environment_of(CONTENDERS["ucx"], {"UCX_LOG_LEVEL": "debug"})["UCX_LOG_LEVEL"] == "debug"


def test_either_side_has_cores_of_its_own_where_there_are_two() -> None:
    assert (cores_of("initiator", {0, 1}), cores_of("target", {0, 1})) == ({0}, {1})
    assert (cores_of("initiator", {4, 2, 3}), cores_of("target", {4, 2, 3})) == ({2}, {3, 4})
    assert (cores_of("initiator", {5}), cores_of("target", {5})) == ({5}, {5})
