"""What a model's work is counted as."""

from __future__ import annotations

import torch
from torch import nn

from bench.engine.limits import Memory, Products, Shape, kv_bytes_read, work_of
from engine.layers import Attention, Layer
from engine.prepack import packed_linear


class Model(nn.Module):
    """Two equal layers, another one, an embedding, an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)])
        self.lm_head = nn.Linear(8, 50)


def test_a_models_work_counts_each_layer_and_leaves_the_embedding_out() -> None:
    work = work_of(Model(), 2)
    assert work.shapes == {Shape(8, 12): 2, Shape(12, 8): 1}
    assert work.output == Shape(8, 50)
    assert work.products_per_token == 3 * 96
    assert work.products_per_drawn_token == 3 * 96 + 400
    assert work.bytes_per_step == 2 * (3 * 96 + 400)


def test_a_window_reads_no_more_than_it_sees() -> None:
    full = Layer(attention=Attention(num_kv_heads=2, key_dim=16, value_dim=8))
    window = Layer(attention=Attention(num_kv_heads=1, key_dim=4, value_dim=4, kind="window", window=32))
    layers = [full, window, Layer(recurrent=True)]
    assert kv_bytes_read(layers, 100, 2) == 100 * 2 * 24 * 2 + 32 * 8 * 2
    assert kv_bytes_read(layers, 10, 2) == 10 * 2 * 24 * 2 + 10 * 8 * 2


def test_the_machine_is_measured() -> None:
    assert Memory().bytes_per_s() > 0
    found = dict(Products(work_of(Model(), 2), torch.bfloat16, packed_linear, 3).per_s())
    assert set(found) == {"packed", "plain", "float32"}
    assert min(found.values()) > 0
