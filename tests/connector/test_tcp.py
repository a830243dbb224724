"""TCP streams between processes."""

from __future__ import annotations

import pytest

from tests.connector.transport_conformance import TransportConformance
from tests.connector.transport_failures import TransportFailures


@pytest.mark.process
class TestConformance(TransportConformance):
    kind = "tcp"


@pytest.mark.process
class TestFailures(TransportFailures):
    kind = "tcp"
