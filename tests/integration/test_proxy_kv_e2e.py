# SPDX-License-Identifier: MIT
"""The whole pipeline works after a prefix of half a million tokens, which is more than 4096 tiles."""

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select
from tests.exact import DEVICES, assert_attention, assert_scores, best_blocks, random_batch

TOKENS, TOPK = 5, 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefix", [1000, 524_000])
def test_scores_selection_attention(prefix, device):
    kv_heads, group, dim = (4, 16, 128) if device == "cuda" else (1, 2, 16)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lens = (TOKENS,), (prefix + TOKENS,)
    proxy = random_batch(*lens, (kv_heads, 1), dim=dim, dtype=dtype, device=device, seed=1)
    keys, _, table = proxy.pages()
    plan = fmha_sm100_plan(*proxy.lengths(), kv_heads, num_kv_heads=1, page_size=128, output_maxscore=True, device=device)
    _, max_score = fmha_sm100(proxy.q, keys, None, plan, kv_indices=table, output_o=False)
    tiles = -(-(prefix + TOKENS) // 128)
    assert max_score.shape == (kv_heads, -(-tiles // 128) * 128, TOKENS)
    assert_scores("max score", max_score, proxy)

    valid = (proxy.positions() // 128 + 1).int().to(device)
    ids = sparse_topk_select(max_score, TOPK, num_valid_pages=valid, force_end_blocks=1)
    raised = max_score.clone()
    for token in range(TOKENS):
        raised[:, int(valid[token]) - 1, token] = torch.inf
    assert torch.equal(ids, best_blocks(raised, valid, TOPK))

    main = random_batch(*lens, (kv_heads * group, kv_heads), dim=dim, dtype=dtype, device=device, seed=2)
    k, v, table = main.pages()
    heads = main.q.shape[1]
    plan = fmha_sm100_plan(*main.lengths(), heads, num_kv_heads=kv_heads, page_size=128, kv_block_num=TOPK, device=device)
    out, _ = fmha_sm100(main.q, k, v, plan, kv_indices=table, kv_block_indexes=ids, output_maxscore=False)
    assert_attention("out", out, main, blocks=ids)
