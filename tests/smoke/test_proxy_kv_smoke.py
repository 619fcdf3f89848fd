# SPDX-License-Identifier: MIT
"""The pipeline works at small sizes: proxy scores of an index cache, top-k, attention over the selected pages."""

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select
from tests.exact import DEVICES, assert_attention, assert_scores, best_blocks, random_batch

TOKENS, PREFIX, KV_HEADS, GROUP = 8, 256, 4, 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("topk", [16, 2])
def test_proxy_topk_sparse(topk, dtype, device):
    lens = (TOKENS,), (PREFIX + TOKENS,)
    proxy = random_batch(*lens, (KV_HEADS, 1), dtype=dtype, device=device, seed=1)
    main = random_batch(*lens, (KV_HEADS * GROUP, KV_HEADS), dtype=dtype, device=device, seed=2)

    keys, _, table = proxy.pages()
    plan = fmha_sm100_plan(*proxy.lengths(), KV_HEADS, num_kv_heads=1, page_size=128, output_maxscore=True, device=device)
    none, max_score = fmha_sm100(proxy.q, keys, keys, plan, kv_indices=table, output_o=False)
    assert none is None
    assert_scores("max score", max_score, proxy)

    pages = -(-lens[1][0] // 128)
    ids = sparse_topk_select(max_score, topk, num_valid_pages=pages)
    assert torch.equal(ids, best_blocks(max_score, torch.full((TOKENS,), pages), topk).to(device))

    k, v, table = main.pages()
    plan = fmha_sm100_plan(
        *main.lengths(), KV_HEADS * GROUP, num_kv_heads=KV_HEADS, page_size=128, kv_block_num=topk, device=device
    )
    out, none = fmha_sm100(main.q, k, v, plan, kv_indices=table, kv_block_indexes=ids, output_maxscore=False)
    assert none is None
    assert_attention("out", out, main, blocks=ids)
