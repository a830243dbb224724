"""What the machine allows: how fast one core reads memory, how fast it multiplies in the shapes of a model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import nn

from engine.huge_pages import HugePages
from engine.layers import Layer
from engine.prepack import PackedLinear

READ_BYTES = 256 << 20
"""Of one reading: many times what caches hold."""


class Shape(msgspec.Struct, frozen=True):
    """A linear layer's."""

    inputs: int
    outputs: int


class Work(msgspec.Struct, frozen=True):
    """What a model is made of. `shapes` are its linear layers and how often each occurs, but for the output layer,
    which only rows that are drawn from go through: `output`. `bytes_per_step` are read in every step, whatever its
    size: all weights but the table of embeddings."""

    shapes: dict[Shape, int]
    output: Shape
    bytes_per_step: int

    @property
    def products_per_token(self) -> int:
        """Multiplications of a token that nothing is drawn from."""
        return sum(shape.inputs * shape.outputs * count for shape, count in self.shapes.items())

    @property
    def products_per_drawn_token(self) -> int:
        """Multiplications of a token that the next one is drawn from."""
        return self.products_per_token + self.output.inputs * self.output.outputs


def work_of(model: nn.Module, itemsize: int) -> Work:
    """Of a loaded model; `itemsize` is a weight's, in bytes."""
    linears = {
        name: Shape(module.in_features, module.out_features)
        for name, module in model.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    output = linears.pop("lm_head")
    shapes = Counter(linears.values())
    elements = sum(shape.inputs * shape.outputs * count for shape, count in shapes.items())
    elements += output.inputs * output.outputs
    return Work(shapes=dict(shapes), output=output, bytes_per_step=elements * itemsize)


def kv_bytes_read(layers: Sequence[Layer], context: int, itemsize: int) -> int:
    """What one token reads of a sequence of `context` tokens."""
    read = 0
    for layer in layers:
        if layer.attention is not None:
            found = layer.attention
            seen = min(context, found.window) if found.window else context
            read += seen * found.num_kv_heads * (found.key_dim + found.value_dim) * itemsize
    return read


class Memory:
    """Reads the same large pieces of memory again and again, in two ways: the faster is the limit."""

    def __init__(self) -> None:
        floats = READ_BYTES // 4
        self._floats = HugePages(READ_BYTES).take(floats, torch.float32).fill_(1.0)
        inputs = 1024
        outputs = READ_BYTES // 2 // inputs
        self._layer = PackedLinear(nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False))
        self._row = torch.ones(1, inputs, dtype=torch.bfloat16)

    def bytes_per_s(self) -> float:
        """Of one reading on the threads in use."""
        return READ_BYTES / min(_seconds(self._floats.sum), _seconds(_call(self._layer, self._row)))


class Products:
    """Multiplies rows by weights of a model's shapes, in the ways there are: the fastest is the limit."""

    def __init__(self, work: Work, dtype: torch.dtype, packed: Callable[[nn.Linear], nn.Module], rows: int) -> None:
        self._rows = rows
        self._work = work
        self._ways: dict[str, list[tuple[int, Callable[[], object]]]] = {"packed": [], "plain": [], "float32": []}
        for shape, count in work.shapes.items():
            linear = nn.Linear(shape.inputs, shape.outputs, bias=False, dtype=dtype).requires_grad_(False)
            wide = nn.Linear(shape.inputs, shape.outputs, bias=False).requires_grad_(False)
            inputs = torch.randn(rows, shape.inputs, dtype=dtype)
            self._ways["packed"].append((count, _call(packed(linear), inputs)))
            self._ways["plain"].append((count, _call(linear, inputs)))
            self._ways["float32"].append((count, _call(wide, inputs.float())))

    def per_s(self) -> Iterator[tuple[str, float]]:
        """Products per second by way; each shape counts as often as the model has it."""
        for way, calls in self._ways.items():
            seconds = sum(count * _seconds(call) for count, call in calls)
            yield way, self._rows * self._work.products_per_token / seconds


def _call(module: nn.Module, inputs: torch.Tensor) -> Callable[[], object]:
    return lambda: module(inputs)


@torch.inference_mode()
def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
