"""The kernels' attention is torch's, in every shape, kind and instruction set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine import _native, attention_native, attention_torch
from engine.kernels.attention import PagedSequences

STALE = math.nan
"""What lies where nothing was written."""


def batch(
    lengths: list[int], queries: list[int], first_blocks: list[int], block_size: int, num_blocks: int
) -> PagedSequences:
    """Sequences of so many tokens, each with blocks of its own, anywhere."""
    order = iter(torch.randperm(num_blocks).tolist())
    rows = [
        [next(order) for _ in range(-(-length // block_size) - first)]
        for length, first in zip(lengths, first_blocks, strict=True)
    ]
    width = max(len(row) for row in rows)
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    return PagedSequences(
        tables=torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=torch.int32),
        first_keys=torch.tensor([first * block_size for first in first_blocks], dtype=torch.int32),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
    )


def filled(sequences: PagedSequences, heads: int, block_size: int, content: int, layout: str) -> torch.Tensor:
    """Pages [blocks, heads, tokens, content] in a layout, stale wherever no sequence has a token."""
    num_blocks = 64
    shapes = {"BHNC": (0, 1, 2, 3), "HBNC": (1, 0, 2, 3), "BNHC": (0, 2, 1, 3), "NHBC": (2, 1, 0, 3)}
    sizes = (num_blocks, heads, block_size, content)
    places = shapes[layout]
    pages = torch.full([sizes[place] for place in places], STALE).permute(*[places.index(place) for place in range(4)])
    for row, length in enumerate(sequences.lengths.tolist()):
        first_key = int(sequences.first_keys[row])
        for position in range(first_key, length):
            block, offset = divmod(position - first_key, block_size)
            pages[int(sequences.tables[row, block]), :, offset] = torch.randn(heads, content)
    return pages


def check(
    sequences: PagedSequences,
    pages: torch.Tensor,
    heads_per_kv: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> None:
    num_tokens = int(sequences.query_starts[-1])
    # As the library hands it over: heads first.
    query = torch.randn(pages.shape[1] * heads_per_kv, num_tokens, key_dim).to(dtype).transpose(0, 1)
    pages = pages.to(dtype)
    assert attention_native.serves(pages)
    found = attention_native.attend(pages, query, sequences, value_dim=value_dim, scaling=0.3, **options)
    expected = attention_torch.attend(
        pages.float(), query.float(), sequences, value_dim=value_dim, scaling=0.3, **options
    )
    assert found.dtype is dtype
    assert torch.isfinite(found).all()
    error = 1e-5 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), expected, rtol=error, atol=error)


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest, kernels: None) -> None:
    """Each one that runs here."""
    _native.use_isa(request.param)
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads_per_kv", [1, 2, 3, 8, 9])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (16, 32), (80, 80), (33, 7), (128, 64)])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.usefixtures("isa")
def test_shapes(dtype: torch.dtype, heads_per_kv: int, key_dim: int, value_dim: int, block_size: int) -> None:
    lengths, queries = [1, 17, 40], [1, 3, 1]
    sequences = batch(lengths, queries, [0, 0, 0], block_size, 64)
    pages = filled(sequences, 2, block_size, key_dim + value_dim, "BHNC")
    check(sequences, pages, heads_per_kv, key_dim, value_dim, dtype)


@pytest.mark.parametrize("layout", ["BHNC", "HBNC", "BNHC", "NHBC"])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.usefixtures("isa")
def test_layouts(layout: str, queries: int) -> None:
    sequences = batch([70, 41], [queries, queries], [0, 0], 16, 64)
    check(sequences, filled(sequences, 3, 16, 64, layout), 2, 32, 32)


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 1}, {"chunk": 8}, {"softcap": 2.0}, {"window": 33}])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 50])
@pytest.mark.usefixtures("isa")
def test_kinds(options: dict[str, Any], sinks: bool, queries: int) -> None:
    lengths = [50, 81, 64]
    # What a window has left behind has been given back: the first blocks are missing where no query sees them.
    oldest = [length - queries - options.get("window", length) + 1 for length in lengths]
    first = [max(0, one) // 4 if "window" in options else 0 for one in oldest]
    sequences = batch(lengths, [queries] * 3, first, 4, 64)
    scores = torch.randn(6) * 3 if sinks else None
    for dim in (24, 64):
        check(sequences, filled(sequences, 2, 4, 2 * dim, "BHNC"), 3, dim, dim, sinks=scores, **options)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("heads", [4, 128])
@pytest.mark.usefixtures("isa")
def test_a_latent_row_is_key_and_value(queries: int, heads: int) -> None:
    sequences = batch([37, 9], [queries, queries], [0, 0], 16, 64)
    check(sequences, filled(sequences, 1, 16, 96, "BHNC"), heads, 96, 64)


@pytest.mark.usefixtures("isa")
def test_a_key_that_is_not_a_number_is_not_hidden() -> None:
    sequences = batch([40], [1], [0], 16, 64)
    pages = filled(sequences, 1, 16, 128, "BHNC")
    pages[int(sequences.tables[0, 1]), 0, 3, 5] = math.nan
    output = attention_native.attend(pages, torch.ones(1, 1, 64), sequences, value_dim=64, scaling=1.0)
    assert torch.isnan(output).all()


def test_threads_share_a_batch(kernels: None) -> None:
    torch.manual_seed(1)
    _native.use_threads(3)
    for _ in range(20):
        sequences = batch([90, 33, 70], [1, 20, 1], [0, 0, 0], 16, 64)
        check(sequences, filled(sequences, 2, 16, 128, "BHNC"), 3, 64, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_dim", [24, 0])
@pytest.mark.parametrize("layout", ["BHNC", "NHBC"])
def test_tokens_are_stored_where_torch_stores_them(dtype: torch.dtype, value_dim: int, layout: str) -> None:
    torch.manual_seed(2)
    sequences = batch([5], [5], [0], 4, 64)
    found = filled(sequences, 3, 4, 16 + value_dim, layout).nan_to_num().to(dtype)
    expected = found.clone()
    key = torch.randn(3, 6, 16).to(dtype).transpose(0, 1)
    value = torch.randn(6, 3, value_dim).to(dtype)
    blocks, offsets = torch.tensor([9, 9, 0, 63, 5, 5]), torch.tensor([0, 3, 1, 2, 2, 1])
    attention_native.store(found, key, value, blocks, offsets)
    attention_torch.store(expected, key, value, blocks, offsets)
    assert torch.equal(found, expected)


def test_pages_of_another_content_are_refused() -> None:
    sequences = batch([5], [1], [0], 4, 64)
    pages = torch.zeros(64, 1, 4, 40)
    with pytest.raises(ValueError, match="a content of 40 hold no keys of 16 and values of 16"):
        attention_native.attend(pages, torch.zeros(1, 1, 16), sequences, value_dim=16, scaling=1.0)


def test_pages_that_the_kernels_cannot_read() -> None:
    assert not attention_native.serves(torch.zeros(2, 2, 2, 4, dtype=torch.float16))
    assert not attention_native.serves(torch.zeros(2, 2, 4, 2).transpose(2, 3))
    assert not attention_native.serves(torch.zeros(2, 2, 2, 4, device="meta"))
