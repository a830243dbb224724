"""Linear layers with packed weights, in bfloat16 on a CPU.

A plain bfloat16 weight is laid out again in every call, or multiplied one element at a time where the processor has no
bfloat16 instructions. Where oneDNN has bfloat16 it packs, once; elsewhere our own kernel does: with AVX2 it was eight
times as fast as torch's own layer. Float32 stays plain, for exactness is what it is used for.
"""

from __future__ import annotations

import torch
from torch import nn

from engine import _native
from engine.huge_pages import HugePages

EXPECTED_ROWS = 16
"""oneDNN chooses the layout for a number of rows; a small decode batch is what matters most."""


class OneDnnLinear(nn.Module):
    """A linear layer over a weight that oneDNN has packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), EXPECTED_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return output


class PackedLinear(nn.Module):
    """A linear layer over a weight that is packed for our own kernel; sums are in float32."""

    def __init__(self, linear: nn.Linear, memory: HugePages | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = (
            None if linear.bias is None else nn.Parameter(linear.bias.detach().contiguous(), requires_grad=False)
        )
        weight = linear.weight.detach().contiguous()
        size = _native.packed_size(self.out_features, self.in_features)
        self._packed = (memory or HugePages(HugePages.size(size, torch.bfloat16))).take(size, torch.bfloat16)
        _native.pack(
            weight=weight.data_ptr(),
            out=self.out_features,
            in_=self.in_features,
            panels=self._packed.data_ptr(),
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]."""
        rows = rows.contiguous()
        output = rows.new_empty((*rows.shape[:-1], self.out_features))
        _native.linear(
            rows=rows.data_ptr(),
            num_rows=rows.numel() // self.in_features,
            panels=self._packed.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(),
            out=self.out_features,
            in_=self.in_features,
            output=output.data_ptr(),
        )
        return output


def onednn_packs() -> bool:
    """Whether this processor and this torch have bfloat16 in oneDNN."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_linear(linear: nn.Linear, memory: HugePages | None = None) -> nn.Module:
    """The same layer over a weight packed in the way that suits this processor, in `memory` if that is ours to say."""
    return OneDnnLinear(linear) if onednn_packs() else PackedLinear(linear, memory)


def prepack(model: nn.Module) -> int:
    """Replace every bfloat16 linear layer in place; returns how many. The plain weights are dropped where unshared."""
    found = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear and child.weight.dtype is torch.bfloat16
    ]
    memory = None
    if not onednn_packs():
        sizes = (_native.packed_size(layer.out_features, layer.in_features) for _, _, layer in found)
        memory = HugePages(sum(HugePages.size(size, torch.bfloat16) for size in sizes))
    for module, name, layer in found:
        setattr(module, name, packed_linear(layer, memory))
    # What is left are views of the mapped file, and one of them would keep all of it in memory beside the packed copy.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return len(found)
