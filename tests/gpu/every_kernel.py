# SPDX-License-Identifier: MIT
"""Launches each Triton kernel a few times on small, odd inputs, for compute-sanitizer:
``python -m tests.gpu.every_kernel PART``.

Block ids and page ids point anywhere, rows lie in wider rows, sequences are empty or short, formats have every kind of scale.
The part ``fault`` writes past the end of a tensor, which the tool must report.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from fmha_sm100 import triton_rows
from openmsa import (
    DecodePlan,
    HostDecodePlan,
    HostKV,
    PagedIndexKeys,
    PagedKV,
    block_scores,
    dense_attention,
    explain,
    index_loss,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.decode import memory
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, Stored
from openmsa.testing.inputs import Problem, paged, problem, random_blocks, strided

DEVICE = torch.device("cuda", 0)
LAUNCHED = "launched:"
EVERYTHING = {"return_lse": True, "return_max_score": True}
SHAPES = ((128, 16, 128, 128), (96, 3, 48, 7))  # head_dim, group, block_size, page_size


def onto_device(x: Any) -> Any:
    """Returns a tensor, a format or a cache on the GPU."""
    if isinstance(x, torch.Tensor):
        return x.to(DEVICE)
    if dataclasses.is_dataclass(x):
        return type(x)(**{field.name: onto_device(getattr(x, field.name)) for field in dataclasses.fields(x)})
    return x


KEY_FORMATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "plain": lambda x: x,
    "e4m3 tensor": lambda x: E4M3.quantize(x, per="tensor"),
    "e4m3 head": lambda x: E4M3.quantize(x, per="head"),
    "e4m3 page": lambda x: E4M3.quantize(x, per="page" if x.dim() == 4 else "head"),
    "nvfp4": NVFP4.quantize,
    "nvfp4 128x4": lambda x: NVFP4.quantize(x, layout="128x4"),
}
INDEX_FORMATS = KEY_FORMATS | {"int8": Int8.quantize, "mxfp4": MXFP4.quantize}


def attempt(function: Callable[..., Any], *args: Any, impl: str, **kwargs: Any) -> None:
    """Runs it unless the implementation refuses, and says which."""
    explanation = explain(function, *args, impl=impl, **kwargs)
    formats = [getattr(x, "format", "") for x in args if x is not None]
    print("refused:" if explanation.chosen is None else "ran:", function.__name__, impl, *filter(None, formats))
    if explanation.chosen is not None:
        function(*args, impl=impl, **kwargs)


def ragged(head_dim: int, group: int, block: int) -> Problem:
    """Returns a few queries before, at and behind the keys of four sequences, one of them empty."""
    offsets = (2 * block + 3, 0, block, -1)
    options = {"kv_heads": 2, "group": group, "head_dim": head_dim, "dtype": torch.bfloat16, "offsets": offsets}
    return problem((2, 1, 0, 3), (2 * block + 5, 0, block, 7 * block - 1), **options)


def attention(name: str) -> None:
    """Sparse and dense attention, flat and paged, in one format of keys; with queries in a format where they may have one."""
    store = KEY_FORMATS[name]
    for head_dim, group, block, page_size in SHAPES:
        p = ragged(head_dim, group, block)
        blocks = random_blocks(p, 5, block, p.k.shape[1])
        blocks[blocks < 0] = 2**30
        kv = paged(p, page_size)[0]
        cache = PagedKV(store(kv.k.nan_to_num()), store(kv.v.nan_to_num()), kv.page_table, kv.seq_lens)
        flat = (strided(p.k), strided(p.v)) if name == "plain" else (store(p.k), store(p.v))
        here, blocks = p.to(DEVICE), blocks.to(DEVICE)
        for q in (p.q, E4M3.quantize(p.q, per="head")) if name in ("plain", "e4m3 head") else (p.q,):
            for k, v in (flat, (cache, None)):
                operands = [onto_device(x) for x in (q, k, v)]
                for impl in ("triton_decode", "triton_prefill"):
                    attempt(sparse_attention, *operands, blocks, here.seqs, block_size=block, impl=impl, return_lse=True)
                attempt(dense_attention, *operands, here.seqs, block_size=block, impl="triton", **EVERYTHING)


def backward() -> None:
    """Computes gradients of both attentions and of the index loss, with items that share a block, and ids that point
    anywhere."""
    for head_dim, group, block, _ in SHAPES:
        p = ragged(head_dim, group, block)
        blocks = random_blocks(p, 5, block, p.k.shape[1])
        blocks[blocks < 0] = 2**30
        here, blocks = p.to(DEVICE).map(strided), blocks.to(DEVICE)
        leaves = [x.detach().requires_grad_() for x in (here.q, here.k, here.v)]
        for impl in ("triton_decode", "triton_prefill"):
            sparse_attention(*leaves, blocks, here.seqs, block_size=block, impl=impl).sum().backward()
        dense_attention(*leaves, here.seqs, impl="triton").sum().backward()
        index = [x.detach().requires_grad_() for x in (here.index_q, here.index_k)]
        for selection in (blocks, None):
            index_loss(here.q, here.k, *index, selection, here.seqs, block_size=block, impl="triton").backward()
    p = problem((2000,), (2000,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16).to(DEVICE)
    blocks = torch.zeros(2000, 1, 1, dtype=torch.int32, device=DEVICE)
    sparse_attention(p.q.requires_grad_(), p.k, p.v, blocks, p.seqs).sum().backward()
    for group in (8, 16):
        p = problem((70, 0, 9), (300, 0, 200), kv_heads=2, group=group, head_dim=128, dtype=torch.bfloat16).to(DEVICE)
        blocks = random_blocks(p.to("cpu"), 3, 128, 2).to(DEVICE)
        sparse_attention(p.q.requires_grad_(), p.k, p.v, blocks, p.seqs).sum().backward()


def index_branch() -> None:
    """Computes scores and selections, flat and paged, in every format of index keys."""
    for (name, store), (head_dim, group, block, page_size) in itertools.product(INDEX_FORMATS.items(), SHAPES):
        p = ragged(head_dim, group, block)
        keys = paged(p, page_size)[1]
        cache = PagedIndexKeys(store(keys.keys.nan_to_num()), keys.page_table, keys.seq_lens)
        here = p.to(DEVICE)
        for q in (p.index_q, E4M3.quantize(p.index_q, per="head")) if name == "e4m3 head" else (p.index_q,):
            for index_k in (store(p.index_k), cache):
                operands = [onto_device(x) for x in (q, index_k)]
                attempt(block_scores, *operands, here.seqs, block_size=block, impl="triton")
                attempt(select_blocks, *operands, 5, here.seqs, block_size=block, impl="triton")


def decode_step() -> None:
    """Runs plans of one launch and of certified index keys, and the kernel that scores and selects at once."""
    p = problem((1, 1), (3000, 5), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    here = p.to(DEVICE)
    kv, keys = map(onto_device, paged(p, 128))
    dense_attention(here.q, kv, None, here.seqs, impl="triton")
    sizes = {"max_batch": 2, "num_q_heads": 32, "num_kv_heads": 2, "head_dim": 128, "index_dim": 128, "page_size": 128}
    DecodePlan(**sizes, max_pages=kv.page_table.shape[1], device=DEVICE).run(here.q, kv, here.index_q, keys)
    memory.BOUNDS_PAY = 0
    kv, keys = paged(p, 64)
    keys.keys = CertifiedKeys.quantize(keys.keys.nan_to_num())
    kv, keys = onto_device(kv), onto_device(keys)
    plan = DecodePlan(**sizes | {"page_size": 64}, block_size=64, max_pages=kv.page_table.shape[1], device=DEVICE)
    plan.run(here.q, kv, here.index_q, keys)


def few_rows() -> None:
    """Attends with two queries to many blocks, by the sparse prefill for few queries, and selects by certified keys, flat and
    paged."""
    p = problem((1, 2), (3000, 700), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    here = p.to(DEVICE)
    blocks = random_blocks(p, 5, 64, 2).to(DEVICE)
    sparse_attention(here.q, here.k, here.v, blocks, here.seqs, block_size=64, impl="triton_prefill")
    keys = paged(p, 64)[1]
    pool = CertifiedKeys.quantize(keys.keys.nan_to_num())
    cache = onto_device(PagedIndexKeys(pool, keys.page_table, keys.seq_lens))
    for index_k in (onto_device(CertifiedKeys.quantize(p.index_k)), cache):
        attempt(select_blocks, here.index_q, index_k, 5, here.seqs, block_size=64, impl="triton", certified=True)


def few_rows_of_fp4() -> None:
    """Decodes on NVFP4 index keys, flat and paged, with blocks of one part and of two."""
    p = problem((1, 1, 0, 2), (3000, 5, 40, 530), index_heads=2, head_dim=128, dtype=torch.bfloat16)
    here, keys = p.to(DEVICE), paged(p, 256)[1]
    for name in ("nvfp4", "nvfp4 128x4"):
        store = KEY_FORMATS[name]
        cache = PagedIndexKeys(store(keys.keys.nan_to_num()), keys.page_table, keys.seq_lens)
        for index_k, block in itertools.product((store(p.index_k), cache), (128, 256)):
            operands = [onto_device(x) for x in (p.index_q, index_k)]
            attempt(block_scores, *operands, here.seqs, block_size=block, impl="triton")
            attempt(select_blocks, *operands, 2, here.seqs, block_size=block, impl="triton")


def many_rows() -> None:
    """Runs so many rows that scoring and selection are fused, and that neighbouring queries share blocks."""
    p = problem((7000, 3), (7000, 400), kv_heads=4, group=2, dtype=torch.bfloat16).to(DEVICE)
    blocks = select_blocks(p.index_q, p.index_k, 4, p.seqs, block_size=128, impl="triton")
    sparse_attention(p.q, p.k, p.v, blocks, p.seqs, block_size=128, impl="triton_prefill")
    sparse_attention(p.q, p.k, p.v, random_blocks(p, 9, 128, 4), p.seqs, block_size=128, impl="triton_prefill")
    for size in (128, 200):  # pages that hold whole tiles and others
        cache = paged(p, size)[1]
        cache = PagedIndexKeys(E4M3.quantize(cache.keys.nan_to_num()), cache.page_table, cache.seq_lens)
        for index_k in (E4M3.quantize(p.index_k, per="head"), cache):
            block_scores(E4M3.quantize(p.index_q, per="head"), index_k, p.seqs, impl="triton")
    for num_blocks in (1, 100, 3000):
        select_blocks_from_scores(torch.randn(2, 9, num_blocks, device=DEVICE), min(16, num_blocks), impl="triton")


def many_readers() -> None:
    """Attends to stored keys that so many queries read that they become numbers first."""
    options = {"kv_heads": 2, "group": 3, "head_dim": 48, "dtype": torch.bfloat16, "offsets": (3, 0, 30)}
    p = problem((67, 0, 40), (70, 0, 75), **options)
    blocks = random_blocks(p, 12, 16, 2)
    blocks[blocks < 0] = 2**30
    for name in ("e4m3 head", "nvfp4", "nvfp4 128x4"):
        store = KEY_FORMATS[name]
        kv = paged(p, 7)[0]
        cache = PagedKV(store(kv.k.nan_to_num()), store(kv.v.nan_to_num()), kv.page_table, kv.seq_lens)
        for k, v in ((store(p.k), store(p.v)), (cache, None)):
            operands = [onto_device(x) for x in (p.q, k, v, blocks)]
            attempt(sparse_attention, *operands, p.to(DEVICE).seqs, impl="triton_prefill", block_size=16, return_lse=True)


def appends() -> None:
    """Appends new tokens to every sequence of a paged cache, and reads caches as numbers."""
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    new, pool = torch.randn(4, 2, 64, device=DEVICE, dtype=torch.bfloat16), torch.randn(4, 2, 5, 64)
    for store in KEY_FORMATS.values():
        onto_device(PagedKV(store(pool), store(pool), table, torch.tensor([4, 0], dtype=torch.int32))).append(new, new)
    for store in (*INDEX_FORMATS.values(), CertifiedKeys.quantize):
        cache = onto_device(PagedIndexKeys(store(pool), table, torch.tensor([4, 0], dtype=torch.int32)))
        cache.append(new)
        if isinstance(cache.keys, Stored):
            cache.keys.dequantize()


def host_memory() -> None:
    """Appends to host memory, and steps over a block cache that holds what one step chooses."""
    p = problem((2, 2, 2), (300, 2, 70), kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=torch.bfloat16)
    kv, keys = paged(p, 64)
    here, index_keys = p.to(DEVICE), onto_device(keys)
    sizes = {"page_size": 64, "max_pages": keys.page_table.shape[1], "block_size": 32, "topk": 3, "new_tokens": 2}
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "index_dim": 32}
    plan = HostDecodePlan(max_batch=3, **heads, **sizes, device=DEVICE)
    for store in (lambda x: x, E4M3.quantize, NVFP4.quantize):
        cache = PagedKV(store(kv.k.nan_to_num()), store(kv.v.nan_to_num()), kv.page_table, kv.seq_lens)
        host = HostKV.of(cache, DEVICE, cache_blocks=36, block_size=32, topk=3, new_tokens=2)
        host.seq_lens.sub_(2)
        host.append(here.q[:, :2], here.q[:, 2:4])
        for sign in (1, -1):
            plan.run(here.q, host, sign * here.index_q, index_keys)


def drop_in() -> None:
    """Runs the kernels around the launches of `fmha_sm100`, on rows whose first page and lengths lie anywhere."""
    first, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, -3, 2**30], [300, 0, 40, 17]))
    triton_rows.cut(torch.arange(9, dtype=torch.int32, device=DEVICE), first, 7)
    blocks = torch.tensor([[[0, -1, 2**30]]], dtype=torch.int32, device=DEVICE).expand(4, 2, 3)
    triton_rows.shift(blocks, first, lens, lens - 1, 9, 64)


@triton.jit
def write_past_the_end(x, n):
    """Writes one element past the end of a tensor of n."""
    tl.store(x + n, 1.0)


PARTS: dict[str, Callable[[], None]] = {
    **{f"attention, {name}": functools.partial(attention, name) for name in KEY_FORMATS},
    "backward": backward,
    "index branch": index_branch,
    "decode step": decode_step,
    "few rows": few_rows,
    "few rows of FP4": few_rows_of_fp4,
    "many rows": many_rows,
    "many readers": many_readers,
    "appends": appends,
    "host memory": host_memory,
    "drop-in": drop_in,
}


def main(part: str) -> None:
    """Runs one part, or the deliberate fault that compute-sanitizer must find."""
    names: set[str] = set()
    triton.knobs.compilation.listener = lambda *, src, **_: names.add(src.name)
    if part == "fault":
        write_past_the_end[(1,)](torch.zeros(128, device=DEVICE), 128)
    else:
        PARTS[part]()
    torch.cuda.synchronize()
    print(LAUNCHED, *sorted(names))


if __name__ == "__main__":
    main(sys.argv[1])
