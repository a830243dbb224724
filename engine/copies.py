"""Copies blocks within a pool: the beginning of a block that somebody else goes on in, and recurrent states."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connector.pages import PoolGeometry
from engine.block_views import block_views
from engine.page_work import BlockCopy


class BlockCopier:
    """See the module. `memory` is the whole pool as bytes."""

    def __init__(self, geometry: PoolGeometry, memory: torch.Tensor) -> None:
        self._views = {group.name: block_views(geometry, group, memory) for group in geometry.groups}

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Make the copies, all layers of each, as if at once: sources are read before destinations are written."""
        by_group: dict[str, list[BlockCopy]] = {}
        for one in copies:
            by_group.setdefault(one.group, []).append(one)
        for name, group in by_group.items():
            sources = torch.tensor([one.source for one in group], dtype=torch.long)
            destinations = torch.tensor([one.destination for one in group], dtype=torch.long)
            for view in self._views[name]:
                view.index_copy_(0, destinations, view.index_select(0, sources))
