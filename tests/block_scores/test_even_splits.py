# SPDX-License-Identifier: MIT
"""Splits that share what a sequence's rows see write the same scores, bit for bit, as splits of what there is room for. So do
programs in the order for keys that the L2 cache does not hold."""

import pytest
import torch

from openmsa import Sequences
from openmsa.block_scores import triton_route
from openmsa.block_scores.triton_route import Lengths
from openmsa.kv_cache import PagedIndexKeys
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.runtime.devices import facts
from openmsa.runtime.launch import launch_kernel
from openmsa.types import layout


@pytest.mark.parametrize("parts", [1, 3, 7, 40])
@pytest.mark.parametrize("block_size", [64, 128, 256])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_scores_are_the_same(monkeypatch, parts, block_size, new_tokens):
    draw, device = torch.Generator().manual_seed(parts), "cuda" if torch.cuda.is_available() else "cpu"
    lens = [block_size * 4 + 5, 1 + new_tokens, block_size * 16, 0]
    page, width, heads = 128, 48, 2
    table = torch.randperm(len(lens) * width, generator=draw).view(len(lens), width).int().to(device)
    keys = torch.randn(len(lens) * width, 1, page, 32, generator=draw).half().to(device)
    index_q = torch.randn(len(lens) * new_tokens, heads, 32, generator=draw).half().to(device)
    index_keys = PagedIndexKeys(keys, table, torch.tensor(lens, dtype=torch.int32, device=device))
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * new_tokens
    monkeypatch.setattr(triton_route, "splits", lambda *arguments: parts)
    blocks, found = width * page // block_size, []
    for even in (False, True):
        monkeypatch.setattr(triton_route, "EVEN_SPLITS", even)
        scores = torch.full((heads, index_q.shape[0], triton_route.score_rows(blocks)), torch.nan, device=device)
        visible = torch.full((index_q.shape[0],), -1, dtype=torch.int32, device=device)
        chip, tile = facts(index_q.device), Tile.of(block_size)
        lengths = Lengths(starts, None, index_keys.seq_lens, None, new_tokens, width * page)
        triton_route.launch(index_q, KeyTiles.of(index_keys, tile, chip), tile, lengths, scores[..., :blocks], visible, chip)
        found.append((scores, visible.clone()))
    (plain, seen), (even_scores, even_seen) = found
    assert torch.equal(seen, even_seen)
    for token, count in enumerate(seen.tolist()):
        assert plain[:, token, :count].isfinite().all()
        assert torch.equal(plain[:, token, :count], even_scores[:, token, :count])


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_rows_first(monkeypatch, parts):
    """A sequence without queries, one of a single row tile and one of several."""
    draw, device = torch.Generator().manual_seed(parts), "cuda" if torch.cuda.is_available() else "cpu"
    q_lens, k_lens = [0, 3, 300], [128, 700, 2100]
    index_q = torch.randn(sum(q_lens), 2, 32, generator=draw).half().to(device)
    index_k = torch.randn(sum(k_lens), 1, 32, generator=draw).half().to(device)
    seqs = layout(Sequences.from_lengths(q_lens, k_lens, device=device), sum(q_lens), sum(k_lens), index_q.device)
    monkeypatch.setattr(triton_route, "splits", lambda *arguments: parts)
    grids, found = [], []

    def launched(kernel, grid, *arguments, **constants):
        grids.append(grid)
        launch_kernel(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_route, "launch_kernel", launched)
    for l2_bytes in (1 << 30, 1 << 10):
        monkeypatch.setattr(triton_route, "facts", lambda place, size=l2_bytes: facts(place)._replace(l2_bytes=size))
        found.append(triton_route.block_scores(index_q, index_k, seqs, 128))
    splits_first, rows_first = grids
    assert rows_first == (splits_first[1], splits_first[0], splits_first[2])
    assert rows_first[0] > 1
    assert torch.equal(*found)
    assert found[0].isfinite().any()


def test_rows_first_without_keys():
    """A bound on keys says nothing of how many there are."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    index_q, index_k = (torch.ones(n, 1, 32, dtype=torch.float16, device=device) for n in (300, 0))
    starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 300], [0, 0]))
    seqs = layout(Sequences(*starts, 300, 1 << 20), 300, 0, index_q.device)
    scores = torch.full((1, 300, 3), torch.nan, device=device)
    visible = torch.full((300,), -1, dtype=torch.int32, device=device)
    triton_route.launch_scores(index_q, index_k, seqs, 128, scores, visible)
    assert visible.eq(0).all()
