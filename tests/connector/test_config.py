from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connector import ConnectorConfig


@pytest.mark.parametrize(
    ("settings", "ports"),
    [
        ({}, range(1)),
        ({"port": 9000}, range(9000, 9001)),
        ({"port_range": "9000-9100"}, range(9000, 9101)),
        ({"port_range": "9000 - 9000"}, range(9000, 9001)),
    ],
)
def test_the_ports_to_try(settings: dict[str, Any], ports: range) -> None:
    assert ConnectorConfig(**settings).candidate_ports() == ports


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "connector.port is 70000"),
        ({"port": 9000, "port_range": "9000-9100"}, "connector.port_range ('9000-9100') are both set"),
        ({"port_range": "9100-9000"}, "connector.port_range '9100-9000' is not a range"),
        ({"port_range": "0-10"}, "not a range within 1-65535"),
        ({"port_range": "9000"}, 'write it as "9000-9100"'),
        ({"port_range": "a-b"}, 'write it as "9000-9100"'),
        ({"lease_s": 0.0}, "connector.lease_s is 0.0; it must be above 0 seconds"),
        ({"import_timeout_s": -1.0}, "connector.import_timeout_s is -1.0"),
        ({"tls_cert": "/w.pem"}, "connector.tls_key and connector.tls_ca is not set"),
        (
            {"tls_cert": "w.pem", "tls_key": "/w.key", "tls_ca": "/ca.pem"},
            "connector.tls_cert is 'w.pem'; write an absol",
        ),
        ({"renew_s": 30.0}, "connector.renew_s (30.0) must be below connector.lease_s (30.0)"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 -- the message is compared below
        ConnectorConfig(**settings)
    assert message in str(refused.value)


@pytest.mark.parametrize("settings", [{"transprot": "shm"}, {"transport": "pigeon"}, {"mode": "push"}])
def test_unknown_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(settings, ConnectorConfig)


def test_data_takes_any_port_unless_a_range_is_set() -> None:
    assert ConnectorConfig().data_ports() == ConnectorConfig(port=9000).data_ports() == range(1)
    assert ConnectorConfig(port_range="9000-9100").data_ports() == range(9000, 9101)
