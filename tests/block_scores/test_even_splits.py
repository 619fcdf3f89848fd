# SPDX-License-Identifier: MIT
"""Splits that share what a sequence's rows see write the same scores, bit for bit, as splits of what there is room for."""

import pytest
import torch

from openmsa.block_scores import triton_route
from openmsa.block_scores.triton_route import Lengths
from openmsa.kv_cache import PagedIndexKeys
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.runtime.devices import facts


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
