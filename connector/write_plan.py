"""What a WRITE posts as the forward pass proceeds: the pages of one layer, as far as their tokens have been computed.

A block is posted once, when its last token of this prompt has been written: chunks of a prompt rarely end where a block
does, and a page that is posted twice would cost twice. State slots change with every chunk and go at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from connector.correspondence import Correspondence
from connector.pages import PoolGeometry
from connector.plan import PlannedBatch, correspond, merged, pieces_of


class WritePlanner:
    """Plans one WRITE, layer by layer. The source is local, the destination the peer's.

    Raises:
        PlanError: as `plan_read`.
    """

    def __init__(
        self,
        *,
        source: PoolGeometry,
        source_blocks: Mapping[str, Sequence[int]],
        destination: PoolGeometry,
        destination_blocks: Mapping[str, Sequence[int]],
        num_tokens: int,
        local_tokens: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self._source = source
        self._destination = destination
        self._pairs = correspond(source, source_blocks, destination, destination_blocks, num_tokens, local_tokens)
        self._places = {
            page.layer: (group.name, index) for group in source.groups for index, page in enumerate(group.layers)
        }
        self._written = dict.fromkeys(self._places, 0)

    def computed(self, layer: int, end: int) -> tuple[PlannedBatch, ...]:
        """What can be posted of `layer` now that its first `end` tokens have been computed. Asked again for the same
        tokens there is nothing."""
        name, index = self._places[layer]
        pair = self._pairs[name]
        first, until = self._range(pair, name, layer, end)
        self._written[layer] = max(until, self._written[layer])
        theirs, ours = self._source.group(name), self._destination.group(name)
        pieces = [piece for chunks in pair.chunks(first, until) for piece in pieces_of(theirs, ours, chunks, [index])]
        return merged(pieces, "write")

    @property
    def complete(self) -> bool:
        """Whether every page of every layer has been handed out."""
        return all(
            written >= self._pairs[self._places[layer][0]].num_tokens for layer, written in self._written.items()
        )

    def _range(self, pair: Correspondence, name: str, layer: int, end: int) -> tuple[int, int]:
        if self._source.group(name).kind == "state":
            return self._written[layer], pair.num_tokens if end >= self.num_tokens else 0
        whole = end if end >= self.num_tokens else end - end % self._source.block_size
        return self._written[layer], whole
