# SPDX-License-Identifier: MIT
"""This module makes batches as callers of the drop-in package hold them, and what they must get by the float64 oracle."""

import functools

import torch

from openmsa.testing.compare import assert_close
from openmsa.testing.inputs import paged, problem, random_blocks
from tests import oracle

Q_LENS, K_LENS = (3, 40, 1, 0, 2, 1), (300, 210, 0, 90, 2, 129)  # short and long in any order, nothing at all, one key
SHORT = (1, 3, 0, 2, 1)
LENS = {"mixed": (Q_LENS, K_LENS), "short": (SHORT, (300, 130, 40, 0, 65)), "decode": ((1,) * 4, (513, 64, 1, 200))}


@functools.cache
def batch(lens="mixed", dtype=torch.float32, kv_heads=2, group=2, head_dim=32, offsets=None, index_heads=None):
    q_lens, k_lens = LENS[lens]
    options = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype, "offsets": offsets}
    return problem(q_lens, k_lens, index_heads=index_heads, **options)


def lengths(p):
    """Returns the plan's lengths as engines have them, on the CPU."""
    return torch.tensor(p.q_lens, dtype=torch.int32), torch.tensor(p.k_lens, dtype=torch.int32)


def pages(p, page_size, interleaved=False, fixed=False):
    """Returns the k and v pools, the index key pool, the flat page table, and the width of a request's part of it. With `fixed`
    each request starts at a multiple of that width; otherwise the table is packed, and the width None."""
    kv, index_keys = paged(p, page_size, interleaved=interleaved)
    table = kv.page_table
    if fixed:
        return kv.k, kv.v, index_keys.keys, table.flatten(), table.shape[1]
    counts = [-(-n // page_size) for n in p.k_lens]
    flat = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])
    return kv.k, kv.v, index_keys.keys, flat, None


def selection(p, page_size, topk=3, heads=None, seed=0):
    return random_blocks(p, topk, page_size, heads or p.k.shape[1], seed)


def truth(p, blocks=None, block_size=None, scale=None, causal=True):
    """Returns ((out, lse) in float64, the same from honest PyTorch), of selected blocks or of all keys."""
    p = p.to("cpu")
    reads = oracle.reads_everything(p, causal) if blocks is None else oracle.reads_of_blocks(blocks.cpu(), block_size)
    return oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)


def per_query_head(p, blocks, block_size):
    """Returns what `truth` returns where each query head has a selection of its own, as if it had its own KV head."""
    p = p.to("cpu")
    group = p.q.shape[1] // p.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (p.k, p.v))
    return truth(type(p)(**{**vars(p), "k": k, "v": v}), blocks, block_size)


def assert_results(found, expected, names=("out", "lse")):
    exact, honest = expected
    for name, x, h, t in zip(names, found, honest, exact, strict=False):
        assert_close(name, x, h.to(x.dtype), t)


def scores_truth(p, q=None, k=None, block_size=128):
    """Returns scores [heads, total_q, tiles] in float64, and as honest PyTorch gives them in float32."""
    p = p.to("cpu")
    q, k = (p.index_q if q is None else q), (p.index_k if k is None else k)
    return oracle.block_scores(p, block_size, q, k), oracle.honest_scores(p, block_size, q, k)


def assert_scores(name, found, p, q=None, k=None, block_size=128, elsewhere=-torch.inf):
    """Checks `found`, [heads, total_q, max_k_tiles]: tiles that a query sees hold their scores, all others `elsewhere` or
    -inf."""
    exact, honest = scores_truth(p, q, k, block_size)
    tiles = exact.shape[2]
    found = found.cpu()
    seen = torch.nn.functional.pad(exact, (0, found.shape[2] - tiles), value=-torch.inf) > -torch.inf
    assert bool(((found == elsewhere) | (found == -torch.inf))[~seen].all()), name
    assert_close(name, found[..., :tiles].masked_fill(~seen[..., :tiles], -torch.inf), honest.float(), exact)
