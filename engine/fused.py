"""Modules that kernels compute in one pass, in bfloat16 on a CPU.

The library writes a norm as six operations and a gated unit as three; at one row each costs more to start than to do.
A module is replaced when its class is known to compute what the kernel does, and left alone otherwise. It is rounded to
bfloat16 where the library rounds.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from engine import _native

ROUNDED_FIRST = re.compile(
    r"(Bamba|DeepseekV[23]|FalconH1|Glm4|Granite|GraniteMoeHybrid|Lfm2|Llama|Mistral|Mixtral|Olmoe|Phi3|Qwen2|Qwen3|"
    r"Qwen3Moe|SmolLM3)RMSNorm"
)
"""Norms that round to the model's type and then multiply by the weight."""
ROUNDED_LAST = re.compile(r"(GptOss|NemotronH|Olmo[23])RMSNorm")
"""Norms that multiply by the weight in float32."""
AROUND_ONE = re.compile(r"(Gemma[23]|Qwen3Next|Qwen3_5)RMSNorm")
"""Like those, with a weight kept as its difference from 1."""
GATED = re.compile(
    r"(Bamba|DeepseekV[23]|Granite|Llama|Mistral|Olmo[23]|Qwen2|Qwen3|Qwen3Moe|Qwen3Next|Qwen3_5|SmolLM3)MLP"
)
"""Units of `gate_proj`, `up_proj` and `down_proj`."""
SILU = ("SiLU", "SiLUActivation")


class FusedNorm(nn.Module):
    """The root mean square norm of rows [..., width], times a weight."""

    def __init__(self, norm: Any, *, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = norm.weight
        self.epsilon = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        self._offset = offset
        self._round_first = round_first

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the same shape."""
        width = rows.shape[-1]
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        _native.normalize(
            x=rows.data_ptr(),
            rows=rows.numel() // width,
            x_stride=width,
            weight=self.weight.data_ptr(),
            width=width,
            output=output.data_ptr(),
            epsilon=self.epsilon,
            offset=self._offset,
            round_first=self._round_first,
        )
        return output


class FusedGatedUnit(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, unit: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = unit.gate_proj, unit.up_proj, unit.down_proj

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., hidden] to the same."""
        gate, up = self.gate_proj(rows), self.up_proj(rows)
        width = gate.shape[-1]
        output = torch.empty_like(gate)
        _native.gate(
            gate=gate.data_ptr(),
            gate_stride=width,
            up=up.data_ptr(),
            up_stride=width,
            rows=gate.numel() // width,
            width=width,
            output=output.data_ptr(),
        )
        result: torch.Tensor = self.down_proj(output)
        return result


def fuse(model: nn.Module) -> int:
    """Replace what is known in a bfloat16 model, in place; returns how many modules."""
    replaced = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(module, name, fused)
                replaced += 1
    return replaced


def _fused(module: nn.Module) -> nn.Module | None:
    name = type(module).__name__
    if name.endswith("RMSNorm"):
        if module.weight.dtype is not torch.bfloat16:
            return None  # some keep a norm in float32
        if ROUNDED_FIRST.fullmatch(name):
            return FusedNorm(module, offset=0.0, round_first=True)
        if ROUNDED_LAST.fullmatch(name):
            return FusedNorm(module, offset=0.0, round_first=False)
        if AROUND_ONE.fullmatch(name):
            return FusedNorm(module, offset=1.0, round_first=False)
    if GATED.fullmatch(name) and type(module.act_fn).__name__ in SILU:
        return FusedGatedUnit(module)
    return None
