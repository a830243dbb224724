"""The start of a step: zero, then copy, then load, then the forward pass may begin."""

from __future__ import annotations

from engine.copies import BlockCopier
from engine.loads import LoadBarriers, LoadMode, exclude_loaded
from engine.page_work import PageWork
from engine.zeroing.zeroer import Zeroer


def prepare(work: PageWork, zeroer: Zeroer, copier: BlockCopier, mode: LoadMode) -> LoadBarriers:
    """Make the pages of a step ready; what its loads bring is waited for at the barriers that come back."""
    exclude_loaded(work)
    zeroer.zero(work.new_block_ids_to_zero or {})
    copier.copy(work.copies)
    barriers = LoadBarriers(work.loads, mode)
    barriers.start()
    return barriers
