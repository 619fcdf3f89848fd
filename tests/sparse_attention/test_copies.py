# SPDX-License-Identifier: MIT
"""Stored keys that many queries read are copied as 16-bit numbers, and Hopper's own kernels for plain keys attend to them."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, NVFP4, PagedKV
from openmsa.sparse_attention import (
    STAGE,
    gluon_sm90_attend,
    gluon_sm90_outer,
    triton_expand,
)
from openmsa.testing.inputs import paged, problem, random_blocks
from tests import oracle
from tests.hopper.marks import DEVICE, in_turn, on_hopper
from tests.sparse_attention.test_triton import check, run, take_any_size

BLOCK = 128
STORES = {
    "e4m3": (E4M3, {"per": "tensor"}),
    "e4m3, heads": (E4M3, {"per": "head"}),
    "e4m3, no factor": (E4M3, {}),
    "nvfp4": (NVFP4, {}),
    "nvfp4, 128x4": (NVFP4, {"layout": "128x4"}),
}


@on_hopper
@pytest.mark.parametrize(("store", "page_size"), in_turn(STORES, [0, 128]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.2, -0.2])
def test_kernels_of_plain_keys(store, page_size, dtype, scale, monkeypatch):
    """Half of the queries select alike, so that both kernels have work; results are those of the same numbers in 16 bits."""
    launched = []
    for module, name in ((gluon_sm90_attend, "launch_sm90_attend"), (gluon_sm90_outer, "launch_sm90_outer")):
        launch = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, launch=launch, name=name: (launched.append(name), launch(*given)))
    monkeypatch.setattr(triton_expand, "MIN_READERS", dict.fromkeys(triton_expand.MIN_READERS, 0))
    take_any_size(monkeypatch, limit=8)
    form, options = STORES[store]
    p = problem((70, 3), (2000, 300), kv_heads=2, group=16, head_dim=128, dtype=dtype)
    blocks = random_blocks(p, 6, BLOCK, 2)
    blocks[:32] = blocks[:1]
    here = p.to(DEVICE)
    pools, table = (here.k, here.v), ()
    if page_size:
        kv = paged(here, page_size)[0]
        pools, table = (kv.k, kv.v), (kv.page_table, kv.seq_lens)
    stored = [form.quantize(x, **options) for x in pools]
    given = (PagedKV(*stored, *table), None) if page_size else stored
    checked = STAGE.check(here.q, *given, blocks.to(DEVICE), here.seqs, block_size=BLOCK, softmax_scale=scale, return_lse=True)
    result = run(checked)
    assert launched == ["launch_sm90_outer", "launch_sm90_attend"][1 if scale < 0 else 0 :]

    wide = [x.dequantize() for x in stored]  # float32
    if page_size:
        wide = [kv_rows(x, kv) for x in wide]
    k, v = (x.cpu() for x in wide)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    truth = oracle.attention(dataclasses.replace(p, k=k, v=v), reads, scale)
    honest = oracle.honest_attention(dataclasses.replace(p, k=k.to(dtype), v=v.to(dtype)), reads, scale)
    check(result, (truth, honest))


def kv_rows(pool, kv):
    """The rows of all sequences of a pool, packed."""
    ids = [kv.page_table[i, : -(-n // pool.shape[2])].long() for i, n in enumerate(kv.seq_lens.tolist())]
    return torch.cat([pool[i].transpose(1, 2).flatten(0, 1)[:n] for i, n in zip(ids, kv.seq_lens.tolist(), strict=True)])
