"""Zeroes blocks, all layers of them at once.

Built once from the pool's geometry; a call is one vectorised fill for each run that a block consists of, which is a
single one in the default layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from connector.pages import PoolGeometry
from engine.block_views import block_views


class Zeroer:
    """See the module. `memory` is the whole pool as bytes."""

    def __init__(self, geometry: PoolGeometry, memory: torch.Tensor) -> None:
        self._views = {
            group.name: block_views(geometry, group, memory) for group in geometry.groups if group.kind != "state"
        }

    def zero(self, blocks: Mapping[str, Sequence[int]]) -> None:
        """Zero these blocks, by group. Nothing happens for groups of states."""
        for name, ids in blocks.items():
            if not ids:
                continue
            index = torch.tensor(ids, dtype=torch.long)
            for view in self._views.get(name, ()):
                view.index_fill_(0, index, 0)
