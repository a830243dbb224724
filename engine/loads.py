"""To come."""

from typing import Protocol


class Load(Protocol): ...


class LoadBarriers:
    failed: dict = {}

    def before_layer(self, layer): ...
