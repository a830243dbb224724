from pathlib import Path

import msgspec
import pytest
import yaml

from decode.config import DecodeConfig
from deploy.config import Configuration, resolve, show
from deploy.errors import SettingError
from deploy.settings import Settings
from gateway.config import GatewayConfig
from prefill.config import PrefillConfig


def written(folder: Path, text: str) -> Path:
    path = folder / "kvferry.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def by_set(*pairs: str) -> Configuration:
    return resolve(flags=[(*pair.split("=", 1), "--set") for pair in pairs])  # type: ignore[misc]


def test_without_any_source_everything_is_default() -> None:
    settings, sources = resolve()
    assert settings == Settings()
    assert set(sources.values()) == {"default"}


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "engine:\n  block_size: 8\n  max_num_seqs: 8\n  compute_threads: 8\n")
    environment = {"KVFERRY_ENGINE__MAX_NUM_SEQS": "9", "KVFERRY_ENGINE__COMPUTE_THREADS": "9", "PATH": "/bin"}
    settings, sources = resolve(file, environment, [("engine.compute_threads", "10", "--set")])
    engine = settings.engine
    assert (engine.dtype, engine.block_size, engine.max_num_seqs, engine.compute_threads) == ("bfloat16", 8, 9, 10)
    assert sources["engine.dtype"] == "default"
    assert sources["engine.block_size"] == f"{file} line 2"
    assert sources["engine.max_num_seqs"] == "environment variable KVFERRY_ENGINE__MAX_NUM_SEQS"
    assert sources["engine.compute_threads"] == "--set"


def test_units_are_read_from_every_source(tmp_path: Path) -> None:
    file = written(tmp_path, 'engine: {kv_cache_bytes: 64MiB}\nconnector: {lease_s: "2min"}\n')
    settings, _ = resolve(file, {"KVFERRY_STOP_GRACE_S": "500ms"}, [("ray.object_store_bytes", "100MB", "--set")])
    assert settings.engine.kv_cache_bytes == 64 << 20
    assert settings.connector.lease_s == 120.0
    assert settings.stop_grace_s == 0.5
    assert settings.ray.object_store_bytes == 100_000_000


def test_text_stays_text_and_mappings_are_read() -> None:
    settings = by_set("cluster=7", "model=1.5", "prefill.resources={node_a: 1}", "decode.num_cpus=2").settings
    assert (settings.cluster, settings.model) == ("7", "1.5")
    assert settings.prefill.resources == {"node_a": 1.0}
    assert settings.decode.num_cpus == 2.0


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("engine.dtpye", "engine.dtype"),
        ("block_size", "engine.block_size"),
        ("conector.transport", "connector.transport"),
        ("gateway.prot", "gateway.port"),
        ("trasport", "connector.transport"),
        ("engin", "engine"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(SettingError, match=rf"unknown setting {key} \(--set\); did you mean {nearest}\?"):
        by_set(f"{key}=1")


def test_an_unknown_key_names_the_variable_or_line_it_comes_from(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="environment variable KVFERRY_ENGIN__DTYPE"):
        resolve(environment={"KVFERRY_ENGIN__DTYPE": "float32"})
    with pytest.raises(SettingError, match=r"kvferry.yaml line 3\); did you mean engine.block_size"):
        resolve(written(tmp_path, "cluster: a\nengine:\n  blocksize: 3\n"))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("engine.block_size=abc", "engine.block_size is 'abc' (--set); expected a whole number"),
        ("engine.dtype=fp8", "engine.dtype is 'fp8' (--set); expected one of bfloat16, float32"),
        ("engine.kv_cache_bytes=1 GiBi", "engine.kv_cache_bytes is '1 GiBi' (--set); expected a size in bytes"),
        ("connector.lease_s=soon", "connector.lease_s is 'soon' (--set); expected seconds, such as 30"),
        ("gateway.port=99999", "gateway.port is 99999 (--set); expected a whole number ≥ 0 and ≤ 65535"),
        ("prefill.count=0", "prefill.count is 0 (--set); expected a whole number ≥ 1"),
        ("decode.num_gpus=-1", "decode.num_gpus is -1 (--set); expected a number ≥ 0"),
        ("prefill.resources=[a]", "prefill.resources is ['a'] (--set); expected a mapping of names to numbers"),
        ("cluster=../x", "cluster is '../x' (--set); expected text matching"),
        ("engine.block_size=true", "engine.block_size is True (--set); expected a whole number"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_was_expected(pair: str, message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        by_set(pair)
    assert message in str(refusal.value)


def test_a_combination_that_a_room_refuses_names_who_set_it() -> None:
    with pytest.raises(SettingError, match=r"connector.renew_s .* \(connector.lease_s from --set\)"):
        by_set("connector.lease_s=1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: 3\n", "engine is not a mapping"),
        ("- a\n", "the file is not a mapping"),
        ("cluster: [a\n", "not valid YAML"),
        ("cluster: a\ncluster: b\n", "cluster is given twice"),
        ("engine: {block_size: x}\n", "engine.block_size is 'x'"),
    ],
)
def test_a_broken_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        resolve(written(tmp_path, text))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert resolve(written(tmp_path, "# nothing\n")).settings == Settings()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot read the configuration file"):
        resolve(tmp_path / "absent.yaml")


def test_what_is_shown_is_yaml_that_gives_the_same_settings(tmp_path: Path) -> None:
    configuration = by_set("engine.dtype=float32", "prefill.resources={a: 1}", "cluster=7", "decode.num_cpus=0.25")
    shown = show(configuration)
    assert "dtype: float32" in shown
    assert resolve(written(tmp_path, shown)).settings == configuration.settings
    assert yaml.safe_load(shown)["gateway"]["port"] == 8000
    (line,) = [line for line in shown.splitlines() if "dtype" in line]
    assert line.endswith("# --set")


def test_tls_is_set_by_three_files_and_shown(tmp_path: Path) -> None:
    file = written(tmp_path, "connector: {tls_cert: /etc/kvferry/worker.pem, tls_key: /etc/kvferry/worker.key}\n")
    with pytest.raises(
        SettingError, match=r"connector.tls_ca is not set \(connector.tls_cert from .*kvferry.yaml line 1"
    ):
        resolve(file)
    shown = show(resolve(file, {"KVFERRY_CONNECTOR__TLS_CA": "/etc/kvferry/ca.pem"}))
    assert yaml.safe_load(shown)["connector"]["tls_ca"] == "/etc/kvferry/ca.pem"
    assert "tls_cert: /etc/kvferry/worker.pem" in shown


@pytest.mark.parametrize(
    ("section", "room"), [("prefill", PrefillConfig), ("decode", DecodeConfig), ("gateway", GatewayConfig)]
)
def test_every_setting_of_a_room_can_be_set_and_has_the_room_s_default(
    section: str, room: type[msgspec.Struct]
) -> None:
    from_the_run = {"name", "model_path", "token", "engine", "connector", "served_name", "rpc_port"}
    from_the_run |= {"host"} if section != "gateway" else set()
    settings = getattr(Settings(), section)
    for field in msgspec.structs.fields(room):
        if field.name not in from_the_run:
            assert getattr(settings, field.name) == field.default
