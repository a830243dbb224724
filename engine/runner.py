"""One forward pass over a batch."""

from __future__ import annotations

from typing import Any

import torch

from engine.batch import Batch


@torch.inference_mode()
def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Compute the batch's tokens, which writes their KV into the pages.

    Returns logits as float32, [logits rows, vocabulary]: only rows that are wanted go through the output layer.
    """
    # With no row wanted, the library takes an empty index as "all rows": ask for one and drop it.
    num_rows = len(batch.logits_rows)
    wanted = batch.logits_rows if num_rows else torch.zeros(1, dtype=torch.long)
    output = model(
        input_ids=batch.token_ids,
        position_ids=batch.positions,
        use_cache=False,
        logits_to_keep=wanted,
        paged=batch,
    )
    logits: torch.Tensor = output.logits[0, :num_rows]
    return logits.float()
