# SPDX-License-Identifier: MIT
"""Split decode attention over selected blocks, in the interpreter without a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import PagedKV
from openmsa.sparse_attention import triton_decode
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from openmsa.types import layout
from tests import oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(p, blocks, block_size, kv=None, v=None, **changes):
    """The kernel's own host function on checked arguments, with poisoned outputs."""
    q, k, v = (p.q, p.k, p.v) if kv is None else (strided(p.q, 2), kv, v)
    moved = p.to(DEVICE)
    seqs = moved.seqs
    total_k = None if isinstance(k, PagedKV) else k.shape[0]
    cached = {"cached_lens": k.seq_lens.to(DEVICE), "cache_capacity": k.capacity} if total_k is None else {}
    lengths = layout(seqs, q.shape[0], total_k, torch.device(DEVICE), **cached)
    if isinstance(k, PagedKV):
        k = PagedKV(*(x.to(DEVICE) for x in (k.k, k.v, k.page_table, k.seq_lens)))
    else:
        k, v = k.to(DEVICE), v.to(DEVICE)
    with PoisonedOutputs():
        arguments = {"block_size": block_size, "softmax_scale": 0.2, "return_lse": True} | changes
        return triton_decode.sparse_attention(q.to(DEVICE), k, v, blocks.to(DEVICE), lengths, **arguments)


def check(p, blocks, block_size, result):
    reads = oracle.reads_of_blocks(blocks, block_size)
    truth, lse = oracle.attention(p, reads, 0.2)
    honest, honest_lse = oracle.attention(p, reads, 0.2, honest=p.q.dtype)
    assert_close("out", result[0].cpu(), honest, truth)
    assert_close("lse", result[1].cpu(), honest_lse, lse)


CASES = [  # head_dim, group, kv_heads, block_size, page_size, topk, dtype
    (128, 16, 2, 128, 128, 4, torch.float16),
    (64, 3, 2, 64, 64, 5, torch.float16),
    (96, 1, 1, 64, 128, 3, torch.float32),
    (64, 16, 1, 48, 7, 3, torch.float32),
    (32, 2, 2, 16, 16, 6, torch.bfloat16),
    (16, 20, 1, 256, 0, 2, torch.float16),
    (48, 3, 1, 32, 0, 4, torch.float32),
]


@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "block", "page", "topk", "dtype"), CASES)
def test_against_the_truth(head_dim, group, kv_heads, block, page, topk, dtype):
    """Ragged, several new tokens, zero lengths, queries before position 0, shuffled and shared pages, wild ids everywhere."""
    q_lens, k_lens = (2, 1, 0, 3, 1), (2 * block + 5, 0, block, 7 * block - 1, 1)
    p = problem(
        q_lens,
        k_lens,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        shared_prefix=block,
        offsets=(2 * block + 3, 0, block, -1, 0),
    )
    blocks = random_blocks(p, topk, block, kv_heads if group != 3 else 1)
    wild = blocks.clone()
    wild[blocks < 0] = torch.tensor([-1, 2**31 - 1, 2**25, -(2**31)], dtype=torch.int32)[torch.arange((blocks < 0).sum()) % 4]
    if page:
        kv, _ = paged(p, page, interleaved=page != 64)
        check(p, blocks, block, run(p, wild, block, kv))
    else:
        check(p, blocks, block, run(p, wild, block, strided(p.k), strided(p.v)))
