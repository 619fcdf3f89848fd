# SPDX-License-Identifier: MIT
"""Attention over selected blocks is right under each public name: `fmha_sm100` in both modes, the adapter, the CSR form."""

from dataclasses import replace

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan
from fmha_sm100.sparse import build_k2q_csr, sparse_atten_func
from fmha_sm100.sparse_fmha_adapter import sparse_fmha, sparse_fmha_plan
from tests.exact import DEVICES, FP8, assert_attention, random_batch

LENS = (40, 3, 1, 100, 0), (300, 650, 128, 100, 20)
KV_HEADS = 2
device = pytest.mark.parametrize("device", DEVICES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
doors = pytest.mark.parametrize("door", ["prefill", "decode", "adapter", "csr flat", "csr paged"])


def selection(batch, kind, topk, seed=0):
    """int32 [total_q, KV_HEADS, topk], the query's own block among them but in "empty"; -1 wherever the kind leaves gaps."""
    generator, total = torch.Generator().manual_seed(seed), batch.q.shape[0]
    own = (batch.positions() // 128).tolist()
    ids = torch.full((total, KV_HEADS, topk), -1, dtype=torch.int32)
    for token in range(total):
        for head in range(KV_HEADS):
            last = own[token]
            if kind == "last":
                chosen = list(range(max(last - topk + 1, 0), last + 1))
            elif kind == "sink":
                chosen = sorted({0, last, *torch.randperm(last + 1, generator=generator)[: max(topk - 2, 0)].tolist()})[:topk]
            elif kind == "empty" and (token + head) % 3 == 0:
                chosen = []
            else:
                others = [b for b in torch.randperm(last + 1, generator=generator).tolist() if b != last]
                chosen = [last, *others][:topk]
            slots = range(len(chosen))
            if kind == "gaps":
                slots = torch.randperm(topk, generator=generator)[: len(chosen)].tolist()
            for slot, block in zip(slots, chosen, strict=True):
                ids[token, head, slot] = block
    return ids.to(batch.q.device)


def attend(door, batch, ids, **options):
    """Returns out and lse."""
    heads, device, topk = batch.q.shape[1], batch.q.device, ids.shape[2]
    if door.startswith("csr"):
        cu_q, cu_k = (
            torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32) for lens in (list(batch.q_lens), list(batch.k_lens))
        )
        longest = {"max_seqlen_q": max(batch.q_lens), "max_seqlen_k": max(batch.k_lens)}
        csr = build_k2q_csr(ids.transpose(0, 1), cu_q, cu_k, 128, total_k=sum(batch.k_lens), qhead_per_kv=4, **longest)
        k, v, more = batch.k, batch.v, {}
        if door == "csr paged":
            k, v, flat = batch.pages()
            counts = [-(-n // 128) for n in batch.k_lens]
            table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=device)
            for row, pages in zip(table, flat.split(counts), strict=True):
                row[: len(pages)] = pages
            more = {"page_table": table, "seqused_k": cu_k.diff()}
        lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **longest, **more}
        options = {{"sm_scale": "softmax_scale"}.get(name, name): value for name, value in options.items()}
        return sparse_atten_func(batch.q, k, v, *csr[:2], topk, causal=True, return_softmax_lse=True, **lengths, **options)
    k, v, table = batch.pages()
    shape = {"num_kv_heads": KV_HEADS, "page_size": 128, "kv_block_num": topk, "device": device}
    more = {"kv_indices": table, "kv_block_indexes": ids, "return_lse": True, **options}
    if door == "adapter":
        out, none, lse = sparse_fmha(batch.q, k, v, sparse_fmha_plan(*batch.lengths(), heads, **shape), **more)
    else:
        plan = fmha_sm100_plan(*batch.lengths(), heads, sparse_kernel_mode=door, **shape)
        out, none, lse = fmha_sm100(batch.q, k, v, plan, **more)
    assert none is None
    return out, lse


@device
@doors
@dtypes
@pytest.mark.parametrize("kind", ["last", "sink", "random", "gaps", "empty"])
def test_selections(kind, dtype, door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, dtype=dtype, device=device)
    ids = selection(batch, kind, 4)
    out, lse = attend(door, batch, ids)
    assert_attention(f"{door} {kind}", out, batch, blocks=ids, lse=lse)


@device
@doors
@pytest.mark.parametrize("topk", [4, 8, 16, 32])
def test_numbers_of_blocks(topk, door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "random", topk)
    out, lse = attend(door, batch, ids)
    assert_attention(f"{door} {topk}", out, batch, blocks=ids, lse=lse)


@device
@doors
def test_every_block_is_dense_attention(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    out, lse = attend(door, batch, selection(batch, "random", 8))
    assert_attention(door, out, batch, lse=lse)


@device
@doors
def test_the_order_of_ids_changes_no_more_than_rounding(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "random", 4)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        out, lse = attend(door, batch, ids[..., list(order)].contiguous())
        assert_attention(f"{door} {order}", out, batch, blocks=ids, lse=lse)


@device
@doors
def test_padding_rows_give_zero_and_never_nan(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "random", 4)
    ids[::2] = -1
    out, lse = attend(door, batch, ids)
    assert not bool(out[::2].any())
    assert bool((lse[::2] == -torch.inf).all())
    assert_attention(door, out, batch, blocks=ids, lse=lse)


@device
@doors
def test_ids_past_the_keys_are_skipped(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "last", 4)
    own = (batch.positions() // 128).to(device)
    wild = ids.clone()
    wild[..., -1] = torch.where(ids[..., -1] < 0, own[:, None] + 1 + 1000, ids[..., -1]).int()
    out, lse = attend(door, batch, wild)
    assert_attention(door, out, batch, blocks=ids, lse=lse)


@device
@doors
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (16, 2), (32, 2)], ids=str)
def test_groups(heads, door, device):
    batch = random_batch(*LENS, heads, dim=64, device=device)
    ids = selection(batch, "sink", 4)
    out, lse = attend(door, batch, ids)
    assert_attention(f"{door} {heads}", out, batch, blocks=ids, lse=lse)


@device
@doors
def test_scale(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "sink", 4)
    out, lse = attend(door, batch, ids, sm_scale=0.3)
    assert_attention(door, out, batch, blocks=ids, scale=0.3, lse=lse)


@device
@doors
def test_repeats_are_the_same_bits(door, device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    ids = selection(batch, "random", 4)
    one, other = attend(door, batch, ids), attend(door, batch, ids)
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@device
@pytest.mark.parametrize("door", ["prefill", "decode", "adapter"])
def test_selections_count_pages(door, device):
    """A selection counts pages, whatever their size."""
    batch = random_batch((20, 1), (300, 130), (8, KV_HEADS), dim=64, device=device)
    for page_size in (16, 64, 256):
        k, v, table = batch.pages(page_size)
        own = (batch.positions() // page_size).int().to(device)
        ids = torch.stack([own, torch.where(own > 0, own - 1, -1)], 1)[:, None].expand(-1, KV_HEADS, -1).int().contiguous()
        shape = {"num_kv_heads": KV_HEADS, "page_size": page_size, "kv_block_num": 2, "device": device}
        more = {"kv_indices": table, "kv_block_indexes": ids}
        if door == "adapter":
            out = sparse_fmha(batch.q, k, v, sparse_fmha_plan(*batch.lengths(), 8, **shape), **more)[0]
        else:
            out = fmha_sm100(batch.q, k, v, fmha_sm100_plan(*batch.lengths(), 8, sparse_kernel_mode=door, **shape), **more)[0]
        assert_attention(f"{door} {page_size}", out, batch, blocks=ids, block_size=page_size)


@device
def test_bf16_queries_read_float8_keys(device):
    batch = random_batch(*LENS, (8, KV_HEADS), dim=64, device=device)
    rounded = replace(batch, k=batch.k.to(FP8), v=batch.v.to(FP8))
    ids = selection(batch, "sink", 4)
    out, lse = attend("csr flat", rounded, ids)
    exact = replace(batch, k=rounded.k.to(torch.bfloat16), v=rounded.v.to(torch.bfloat16))
    assert_attention("out", out, exact, blocks=ids, lse=lse)
