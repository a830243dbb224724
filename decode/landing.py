"""Who owns the blocks that an import writes into.

From `Pull.read` until `on_settled` they belong to the import: the transport may still write them, whatever has become
of the request. Afterwards they belong to the request if it still wants them and the pages are good, and are freed in
every other case.
"""

from __future__ import annotations

from collections.abc import Callable

from connector import ImportOutcome
from engine import BlockTable


class Landing:
    """The destination of one import."""

    def __init__(self, table: BlockTable, free: Callable[[BlockTable], None]) -> None:
        self._table = table
        self._free = free
        self._settled = False
        self._abandoned = False

    def on_settled(self, outcome: ImportOutcome) -> None:
        """Nothing writes into the blocks any more."""
        self._settled = True
        if self._abandoned or outcome.outcome != "published":
            self._free(self._table)

    def abandon(self) -> None:
        """The request does not want the pages any more. Harmless when the import has failed."""
        self._abandoned = True
        if self._settled:
            self._free(self._table)

    def take(self) -> BlockTable:
        """The blocks with their pages; only after `Pull.read` has returned them, and only once."""
        assert self._settled
        assert not self._abandoned
        return self._table
