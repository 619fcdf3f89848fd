# SPDX-License-Identifier: MIT
"""This module makes problems for the sparse functions, as a caller of the public package would hand them over."""

from dataclasses import replace

import torch

from fmha_sm100.sparse import build_k2q_csr
from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem, random_blocks
from tests import oracle
from tests.low_precision import honest_e4m3_attention
from tests.products import FP8


def floats(device):
    """Returns the dtype to test in: exact enough on the CPU, what the kernels take on a GPU."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def truth(p, blocks, block_size, scale=None, causal=True):
    """Returns (out, lse) in float64 and as honest PyTorch gives them."""
    if not causal:
        p = replace(p, offsets=p.k_lens)
    reads = oracle.reads_of_blocks(blocks, block_size)
    return oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)


def check(results, expected, names=("out", "lse")):
    """Compares each result with (truth, honest)."""
    exact, honest = expected
    for name, result, t, h in zip(names, results, exact, honest, strict=False):
        assert_close(name, result, h, t)


def lengths(p, device):
    """Returns cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k, as the functions name them."""
    seqs = p.to(device).seqs
    return {
        "cu_seqlens_q": seqs.cu_seqlens_q,
        "cu_seqlens_k": seqs.cu_seqlens_k,
        "max_seqlen_q": seqs.max_seqlen_q,
        "max_seqlen_k": seqs.max_seqlen_k,
    }


def csr(p, blocks, block_size, device="cpu", **options):
    """Returns `build_k2q_csr` of a token-major selection."""
    own = lengths(p, device)
    starts = own.pop("cu_seqlens_q"), own.pop("cu_seqlens_k")
    options = own | {"total_k": sum(p.k_lens)} | options
    return build_k2q_csr(blocks.to(device).transpose(0, 1), *starts, block_size, **options)


def case(q_lens=(5, 0, 3, 1), k_lens=(300, 17, 129, 1), topk=4, block_size=128, **options):
    """Returns a problem and a selection int32 [total_q, kv_heads, topk]: any order, -1 anywhere, blocks ahead, empty rows."""
    p = problem(q_lens, k_lens, **options)
    return p, random_blocks(p, topk, block_size, p.k.shape[1])


def pools(p, page_size, device, packed=True):
    """Returns K and V of the problem in pages, as two strided halves of one cache ``[num_pages, heads, page_size, 2 * dim]`` or
    apart, with the page table, in which unused entries are wild."""
    kv, _ = paged(p, page_size, seed=3)
    if packed:
        k, v = torch.cat((kv.k, kv.v), -1).to(device).split(p.k.shape[2], -1)
    else:
        k, v = kv.k.to(device), kv.v.to(device)
    return k, v, kv.page_table.to(device), kv.seq_lens.to(device)


def as_fp8(x):
    """Converts to e4m3 as PyTorch does, which keeps the NaN of unused pages."""
    return x.to(FP8)


def with_numbers(p, q=None, k=None, v=None):
    """Returns the problem with other numbers in q, k and v."""
    return replace(p, q=p.q if q is None else q, k=p.k if k is None else k, v=p.v if v is None else v)


def honest_fp8(p, blocks, block_size, scale=None, q=None, k=None):
    """Returns (out, lse) with e4m3 weights: PyTorch rounds the softmax numerators, 448 at the row's maximum, for an FP8
    product.

    q, k: `Codes` on the device where both are e4m3.
    """
    return honest_e4m3_attention(p, oracle.reads_of_blocks(blocks, block_size), scale, q, k)
