"""What attention over pages is told of a step's sequences."""

from __future__ import annotations

import msgspec
import torch


class PagedSequences(msgspec.Struct, frozen=True, kw_only=True):
    """Where the keys of a ragged batch lie; int32 tensors.

    `tables` is [S, width], each row the blocks of a sequence, filled up with anything. `first_keys` [S] is the position
    of the first token of the row's first block: older blocks may have been given back. `lengths` [S] counts the tokens
    of each sequence, this step's included, those given back too. Its queries are the last ones, rows
    `query_starts[s]` to `query_starts[s + 1]` of the batch.
    """

    tables: torch.Tensor
    first_keys: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor
