"""Control connections over TLS: both ends, one end, the wrong authority, a certificate whose time is over."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from connector import ConnectorConfig, ConnectorError, HandshakeError
from tests.connector.fabric import Fabric
from tests.connector.pair import Worker
from tests.connector.pool import D, P

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with the openssl command")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def authority(folder: Path, name: str) -> None:
    """A certificate authority of that name."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
    openssl(folder, "req", "-x509", *key, "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}")


def certificate(folder: Path, name: str, by: str, days: str = "2") -> None:
    """A worker's certificate, signed by an authority."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
    openssl(folder, "req", *key, "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signed = ("-CA", f"{by}.pem", "-CAkey", f"{by}.key", "-CAcreateserial", "-days", days)
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "others"):
        authority(folder, name)
    certificate(folder, "worker", "ours")
    certificate(folder, "stranger", "others")
    certificate(folder, "old", "ours", days="-1")
    return folder


def config(folder: Path, name: str = "worker", ca: str = "ours") -> ConnectorConfig:
    return ConnectorConfig(
        tls_cert=str(folder / f"{name}.pem"),
        tls_key=str(folder / f"{name}.key"),
        tls_ca=str(folder / f"{ca}.pem"),
        handshake_timeout_s=5.0,
    )


async def link(prefill_config: ConnectorConfig, decode_config: ConnectorConfig) -> None:
    """Connect a decode to a prefill worker, and part."""
    fabric = Fabric()
    prefill, decode = Worker(P, fabric, prefill_config), Worker(D, fabric, decode_config)
    await prefill.start()
    await decode.start()
    try:
        found = await decode.connector.connect(P, prefill.endpoint)
        assert found.connected
    finally:
        await decode.connector.close()
        await prefill.connector.close()
    assert (prefill.connector.failure, decode.connector.failure) == (None, None)


async def test_with_certificates_of_one_authority_they_link(folder: Path) -> None:
    await link(config(folder), config(folder))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("worker", None),
        (None, "worker"),
        ("worker", "stranger"),
        ("stranger", "worker"),
        ("worker", "old"),
        ("old", "worker"),
    ],
)
async def test_anything_else_is_refused_with_what_to_do(folder: Path, prefill: str | None, decode: str | None) -> None:
    plain = ConnectorConfig(handshake_timeout_s=5.0)
    configs = [plain if name is None else config(folder, name) for name in (prefill, decode)]
    with pytest.raises(HandshakeError, match=r"both workers need the same connector\.tls_cert"):
        await link(*configs)


async def test_files_that_cannot_be_used_are_named(folder: Path) -> None:
    with pytest.raises(ConnectorError, match=r"connector.tls_ca .*nowhere.*cannot be used"):
        Worker(P, Fabric(), config(folder, ca="nowhere"))


async def test_a_key_of_another_certificate_is_named(folder: Path) -> None:
    mixed = ConnectorConfig(
        tls_cert=str(folder / "worker.pem"), tls_key=str(folder / "stranger.key"), tls_ca=str(folder / "ours.pem")
    )
    with pytest.raises(ConnectorError, match=r"connector.tls_cert .*worker.pem.* cannot be used"):
        Worker(P, Fabric(), mixed)


def test_tls_is_all_or_nothing() -> None:
    with pytest.raises(ValueError, match=r"connector\.tls_key and connector\.tls_ca is not set"):
        ConnectorConfig(tls_cert="worker.pem")
