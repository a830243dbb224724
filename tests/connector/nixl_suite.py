"""NIXL between processes. `test_nixl.py` runs this in a process of its own, where no other UCX has been loaded."""

from __future__ import annotations

from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures


class TestConformance(TransportConformance):
    kind = "nixl"


class TestFailures(TransportFailures):
    kind = "nixl"
