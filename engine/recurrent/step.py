"""To come."""

import msgspec
import torch


class StateStep(msgspec.Struct, frozen=True):
    slots: torch.Tensor
    fresh: torch.Tensor
    query_starts: torch.Tensor
