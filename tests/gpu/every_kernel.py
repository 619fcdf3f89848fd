# SPDX-License-Identifier: MIT
"""Launches each Triton kernel a few times on small, odd inputs, for compute-sanitizer: ``python -m tests.gpu.every_kernel``.

Block ids and page ids point anywhere, rows lie in wider rows, sequences are empty or short, formats have every kind of scale.
With the argument ``fault`` it writes past the end of a tensor instead, which the tool must report.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from openmsa import (
    DecodePlan,
    PagedIndexKeys,
    PagedKV,
    block_scores,
    dense_attention,
    explain,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, Int8
from openmsa.testing.inputs import Problem, paged, problem, random_blocks, strided

DEVICE = torch.device("cuda", 0)
LAUNCHED = "launched:"
EVERYTHING = {"return_lse": True, "return_max_score": True}
SHAPES = ((128, 16, 128, 128), (96, 3, 48, 7))  # head_dim, group, block_size, page_size

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


def attention(p: Problem, page_size: int, block: int, topk: int = 5) -> None:
    """Sparse and dense attention, flat and paged, in every format of keys and of queries."""
    heads = p.k.shape[1]
    blocks = random_blocks(p, topk, block, heads)
    blocks[blocks < 0] = 2**30
    kv = paged(p, page_size)[0]
    here, blocks = p.to(DEVICE), blocks.to(DEVICE)
    for name, store in KEY_FORMATS.items():
        wide = (strided(p.k), strided(p.v)) if name == "plain" else (p.k, p.v)
        flat = tuple(store(x.to(DEVICE)) for x in wide)
        pools = (store(x.to(DEVICE).nan_to_num()) for x in (kv.k, kv.v))
        cache = PagedKV(*pools, kv.page_table.to(DEVICE), kv.seq_lens.to(DEVICE))
        for q in (here.q, E4M3.quantize(here.q, per="head")) if name in ("plain", "e4m3 head") else (here.q,):
            for k, v in (flat, (cache, None)):
                for impl in ("triton_decode", "triton_prefill"):
                    attempt(sparse_attention, q, k, v, blocks, here.seqs, block_size=block, impl=impl, return_lse=True)
                attempt(dense_attention, q, k, v, here.seqs, block_size=block, impl="triton", **EVERYTHING)
                attempt(dense_attention, q, k, v, here.seqs, impl="triton")


def index_branch(p: Problem, page_size: int, block: int) -> None:
    """Scores and selections, flat and paged, in every format of index keys."""
    here = p.to(DEVICE)
    keys = paged(p, page_size)[1]
    for name, store in INDEX_FORMATS.items():
        pool = store(keys.keys.to(DEVICE).nan_to_num())
        cache = PagedIndexKeys(pool, keys.page_table.to(DEVICE), keys.seq_lens.to(DEVICE))
        for q in (here.index_q, E4M3.quantize(here.index_q, per="head")) if name == "e4m3 head" else (here.index_q,):
            for index_k in (store(here.index_k), cache):
                attempt(block_scores, q, index_k, here.seqs, block_size=block, impl="triton")
                attempt(select_blocks, q, index_k, 5, here.seqs, block_size=block, impl="triton")


def decode_step() -> None:
    """A plan, and the kernel that scores and selects at once."""
    p = problem((1, 1), (3000, 5), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    here = p.to(DEVICE)
    kv, keys = (type(c)(**{name: x.to(DEVICE) for name, x in vars(c).items()}) for c in paged(p, 128))
    dense_attention(here.q, kv, None, here.seqs, impl="triton")
    sizes = {"max_batch": 2, "num_q_heads": 32, "num_kv_heads": 2, "head_dim": 128, "index_dim": 128, "page_size": 128}
    DecodePlan(**sizes, max_pages=kv.page_table.shape[1], device=DEVICE).run(here.q, kv, here.index_q, keys)


def many_rows() -> None:
    """Enough rows that scoring and selection are fused, and that neighbouring queries share blocks."""
    p = problem((7000, 3), (7000, 400), kv_heads=4, group=2, dtype=torch.bfloat16).to(DEVICE)
    blocks = select_blocks(p.index_q, p.index_k, 4, p.seqs, block_size=128, impl="triton")
    sparse_attention(p.q, p.k, p.v, blocks, p.seqs, block_size=128, impl="triton_prefill")
    together = replace(p, q_lens=(7000, 3))
    sparse_attention(p.q, p.k, p.v, random_blocks(together, 9, 128, 4), p.seqs, block_size=128, impl="triton_prefill")
    for num_blocks in (1, 100, 3000):
        select_blocks_from_scores(torch.randn(2, 9, num_blocks, device=DEVICE), min(16, num_blocks), impl="triton")


def appends() -> None:
    """New tokens for every sequence of a paged cache."""
    table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=DEVICE)
    new = torch.randn(4, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    for store in KEY_FORMATS.values():
        pools = (store(torch.randn(4, 2, 5, 64, device=DEVICE)) for _ in range(2))
        PagedKV(*pools, table, torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)).append(new, new)
    for store in INDEX_FORMATS.values():
        lens = torch.tensor([4, 0], dtype=torch.int32, device=DEVICE)
        PagedIndexKeys(store(torch.randn(4, 2, 5, 64, device=DEVICE)), table, lens).append(new)


@triton.jit
def write_past_the_end(x, n):
    """One element behind a tensor of n."""
    tl.store(x + n, 1.0)


def main() -> None:
    """Everything, or the fault."""
    names: set[str] = set()
    triton.knobs.compilation.listener = lambda *, src, **_: names.add(src.name)
    if sys.argv[1:] == ["fault"]:
        write_past_the_end[(1,)](torch.zeros(128, device=DEVICE), 128)
    else:
        for head_dim, group, block, page_size in SHAPES:
            lens = (2, 1, 0, 3), (2 * block + 5, 0, block, 7 * block - 1)
            offsets = (2 * block + 3, 0, block, -1)
            options = {"kv_heads": 2, "group": group, "head_dim": head_dim, "dtype": torch.bfloat16, "offsets": offsets}
            p = problem(*lens, **options)
            attention(p, page_size, block)
            index_branch(p, page_size, block)
        decode_step()
        many_rows()
        appends()
    torch.cuda.synchronize()
    print(LAUNCHED, *sorted(names))


if __name__ == "__main__":
    main()
