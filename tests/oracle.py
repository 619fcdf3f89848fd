# SPDX-License-Identifier: MIT
"""The truth, written apart from the package: one query row at a time, its keys gathered one list at a time, float64.

With ``honest`` set to a dtype the same loops run in that precision, with the sums in reverse order: the error that honest
PyTorch makes (see `openmsa.testing.compare`), also in float64. Slow; small sizes only; on the CPU, on one thread.
"""

import functools
import math

import torch


def on_one_thread(function):
    """Threads only get in the way of tiny operations."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(threads)

    return call


def rows(p):
    """Every query token: its packed row, its sequence and the last key it sees (below 0: none)."""
    row = 0
    for b, q_len in enumerate(p.q_lens):
        for i in range(q_len):
            yield row, b, min(p.offsets[b] + i, p.k_lens[b] - 1)
            row += 1


def keys_of(x, p, b):
    """The keys of sequence b, [k_len, heads, dim]."""
    start = sum(p.k_lens[:b])
    return x[start : start + p.k_lens[b]]


def from_pages(pool, page_table, lens):
    """Packed keys, [total_k, heads, dim], token by token."""
    page_size = pool.shape[2]
    tokens = [pool[int(page_table[b, j // page_size]), :, j % page_size] for b, n in enumerate(lens.tolist()) for j in range(n)]
    return torch.stack(tokens) if tokens else pool.new_empty(0, pool.shape[1], pool.shape[3])


@on_one_thread
def block_scores(p, block_size, honest=None, q=None, k=None, causal=True, num_blocks=None):
    """[index_heads, total_q, num_blocks] in float64 or in `honest`, from the index branch or from the given q and k."""
    dtype = honest or torch.float64
    q, k = (p.index_q if q is None else q).to(dtype), (p.index_k if k is None else k).to(dtype)
    if honest:
        q, k = q.flip(-1), k.flip(-1)
    group = q.shape[1] // k.shape[1]
    if num_blocks is None:
        num_blocks = math.ceil(max(p.k_lens, default=0) / block_size)
    scores = torch.full((q.shape[1], q.shape[0], num_blocks), -math.inf, dtype=dtype)
    for row, b, last in rows(p):
        visible = keys_of(k, p, b)[: max(last + 1, 0) if causal else p.k_lens[b]]
        for head in range(q.shape[1]):
            products = visible[:, head // group] @ q[row, head]
            products = torch.where(products.isnan(), -math.inf, products)
            for block, piece in enumerate(products.split(block_size)) if len(products) else ():
                scores[head, row, block] = piece.max()
    return scores


def select(scores, visible, topk, init_blocks=0, local_blocks=1):
    """One row: ids of the selected blocks. scores: a list of floats; visible: how many leading blocks may be read."""
    visible = min(visible, len(scores))
    forced = {b for b in range(visible) if b < init_blocks or b >= visible - local_blocks}
    free = [b for b in range(visible) if b not in forced and scores[b] > -math.inf]  # NaN is not greater either
    free.sort(key=lambda b: (-scores[b], b))
    chosen = sorted([*forced, *free[: topk - len(forced)]])
    return chosen + [-1] * (topk - len(chosen))


def select_blocks(p, scores, block_size, topk, init_blocks=0, local_blocks=1):
    """int32 [total_q, index_heads, topk] from the scores [index_heads, total_q, num_blocks]."""
    blocks = torch.empty(scores.shape[1], scores.shape[0], topk, dtype=torch.int32)
    for row, _, last in rows(p):
        for head in range(scores.shape[0]):
            seen = max(last, -1) // block_size + 1
            blocks[row, head] = torch.tensor(select(scores[head, row].tolist(), seen, topk, init_blocks, local_blocks))
    return blocks


def reads_of_blocks(blocks, block_size):
    """For each row and KV head the keys of its blocks that it sees, as a function (row, kv_head, sequence, last key) -> ids."""

    def reads(row, kv_head, b, last):
        ids = blocks[row, kv_head if blocks.shape[1] > 1 else 0].tolist()
        return [j for block in ids if block >= 0 for j in range(block * block_size, (block + 1) * block_size) if j <= last]

    return reads


def reads_everything(p, causal=True):
    """The same for dense attention."""
    return lambda row, kv_head, b, last: list(range(last + 1 if causal else p.k_lens[b]))


def attend(q, keys, values, scale):
    """The query heads [group, dim] of one row on its keys and values [n, dim]: out [group, dim], lse [group]."""
    logits = (q @ keys.T) * scale
    wide = logits.to(torch.promote_types(q.dtype, torch.float32))
    return wide.softmax(-1).to(q.dtype) @ values, wide.logsumexp(-1)


@on_one_thread
def attention(p, reads, scale=None, honest=None):
    """out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads] in float64; or in `honest`, the lse from float32 at
    least, which is what every implementation accumulates in."""
    dtype = honest or torch.float64
    wide = torch.promote_types(dtype, torch.float32)
    group, scale = p.q.shape[1] // p.k.shape[1], p.q.shape[2] ** -0.5 if scale is None else scale
    out = torch.zeros(p.q.shape, dtype=dtype)
    lse = torch.full(p.q.shape[:2], -math.inf, dtype=wide)
    for row, b, last in rows(p):
        keys, values = keys_of(p.k, p, b), keys_of(p.v, p, b)
        for kv in range(p.k.shape[1]):
            ids = reads(row, kv, b, last)
            if ids:
                ids, own = torch.tensor(ids[::-1] if honest else ids), slice(kv * group, (kv + 1) * group)
                gathered = [x.flip(-1) if honest else x for x in (p.q[row, own], keys[ids, kv], values[ids, kv])]
                result, lse[row, own] = attend(*(x.to(wide) for x in gathered), scale)
                if dtype != wide:
                    result, _ = attend(*(x.to(dtype) for x in gathered), scale)
                out[row, own] = result.flip(-1) if honest else result
    return out, lse
