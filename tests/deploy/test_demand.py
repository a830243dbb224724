import pytest

from deploy.config import resolve
from deploy.demand import Demand, demands, refuse_shortage, shortage
from deploy.errors import ResourcesError


def asked(**values: str) -> list[Demand]:
    return demands(resolve(flags=[(key.replace("__", "."), value, "--set") for key, value in values.items()]).settings)


def test_the_embedded_default_fits_on_one_core() -> None:
    assert shortage(asked(), [{"CPU": 1.0}]) is None


def test_a_worker_reserves_half_a_cpu_per_compute_thread_unless_told() -> None:
    prefill, decode = asked(engine__compute_threads="4", decode__num_cpus="3")
    assert (prefill.name, prefill.role, prefill.resources) == ("prefill-0", "prefill", {"CPU": 2.0})
    assert (decode.name, decode.role, decode.resources) == ("decode-0", "decode", {"CPU": 3.0})


def test_what_is_missing_in_total_is_named_with_both_numbers() -> None:
    workers = asked(prefill__count="3", prefill__num_cpus="1", decode__num_gpus="2", decode__resources="{node_a: 0.5}")
    reason = shortage(workers, [{"CPU": 2.0}, {"CPU": 1.0, "GPU": 1.0}])
    assert reason == "4 workers ask for 3.5 CPU (3 present) and 2 GPU (1 present) and 0.5 node_a (0 present)"


def test_a_worker_that_fits_on_no_single_node_is_named() -> None:
    reason = shortage(asked(prefill__num_cpus="3"), [{"CPU": 2.0}, {"CPU": 2.0}])
    assert reason == "no single node has what prefill-0 asks for: 3 CPU"


def test_a_shortage_is_refused_with_what_to_do() -> None:
    with pytest.raises(ResourcesError, match=r"2 workers ask for 1 CPU \(0.5 present\); use fewer workers"):
        refuse_shortage(asked(), [{"CPU": 0.5}])
