"""Attention over pages."""

from __future__ import annotations

import msgspec
import torch


class PagedSequences(msgspec.Struct, frozen=True):
    """A ragged batch."""

    tables: torch.Tensor
    first_keys: torch.Tensor
    lengths: torch.Tensor
    query_starts: torch.Tensor


def store(pages, key, value, blocks, offsets):  # type: ignore
    pages[blocks, :, offsets] = torch.cat((key, value), dim=-1)


def attend(pages, query, sequences, *, value_dim, scaling, window=0, chunk=0, softcap=0.0, sinks=None):  # type: ignore
    out = []
    bs = pages.shape[2]
    kd = query.shape[-1]
    rep = query.shape[1] // pages.shape[1]
    for s in range(len(sequences.lengths)):
        a, b = int(sequences.query_starts[s]), int(sequences.query_starts[s + 1])
        first, end = int(sequences.first_keys[s]), int(sequences.lengths[s])
        n = -(-(end - first) // bs)
        rows = pages[sequences.tables[s, :n].long()].transpose(0, 1).flatten(1, 2)[:, : end - first]
        k, v = rows[..., :kd].repeat_interleave(rep, 0), rows[..., kd:].repeat_interleave(rep, 0)
        q = query[a:b].transpose(0, 1)
        qp = torch.arange(end - (b - a), end)[:, None]
        kp = torch.arange(first, end)[None]
        m = kp <= qp
        if window:
            m = m & (kp > qp - window)
        if chunk:
            m = m & (kp >= qp // chunk * chunk)
        sc = (q.float() @ k.float().transpose(1, 2)) * scaling
        if softcap:
            sc = torch.tanh(sc / softcap) * softcap
        sc = sc.masked_fill(~m, float("-inf"))
        if sinks is not None:
            sc = torch.cat([sc, sinks.view(-1, 1, 1).expand(-1, sc.shape[1], 1)], -1)
        p = sc.softmax(-1)
        if sinks is not None:
            p = p[..., :-1]
        out.append((p @ v.float()).to(query.dtype).transpose(0, 1))
    return torch.cat(out)
