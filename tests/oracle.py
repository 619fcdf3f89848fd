# SPDX-License-Identifier: MIT
"""The oracle computes the truth in float64, apart from the package: one query row at a time, its keys one list at a time.

Functions ``honest_*`` are what anyone would write in PyTorch, a sequence's whole masked matrix in the dtype of the inputs;
their error is the yardstick (see `openmsa.testing.compare`). All run on the CPU, on one thread, and are meant for small sizes.
"""

import functools
import math

import torch

from tests.products import products as products_of


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
    """Returns the keys of sequence b, [k_len, heads, dim]."""
    start = sum(p.k_lens[:b])
    return x[start : start + p.k_lens[b]]


def from_pages(pool, page_table, lens):
    """Returns packed keys, [total_k, heads, dim], token by token."""
    page_size = pool.shape[2]
    tokens = [pool[int(page_table[b, j // page_size]), :, j % page_size] for b, n in enumerate(lens.tolist()) for j in range(n)]
    return torch.stack(tokens) if tokens else pool.new_empty(0, pool.shape[1], pool.shape[3])


@on_one_thread
def block_scores(p, block_size, q=None, k=None, causal=True, num_blocks=None):
    """Returns [index_heads, total_q, num_blocks], from the index branch or from the given q and k."""
    q, k = (p.index_q if q is None else q).double(), (p.index_k if k is None else k).double()
    group = q.shape[1] // k.shape[1]
    if num_blocks is None:
        num_blocks = math.ceil(max(p.k_lens, default=0) / block_size)
    scores = torch.full((q.shape[1], q.shape[0], num_blocks), -math.inf, dtype=torch.float64)
    for row, b, last in rows(p):
        visible = keys_of(k, p, b)[: max(last + 1, 0) if causal else p.k_lens[b]]
        for head in range(q.shape[1]):
            products = visible[:, head // group] @ q[row, head]
            products = torch.where(products.isnan(), -math.inf, products)
            for block, piece in enumerate(products.split(block_size)) if len(products) else ():
                scores[head, row, block] = piece.max()
    return scores


@on_one_thread
def honest_scores(p, block_size, q=None, k=None, causal=True, num_blocks=None):
    """Returns the same in PyTorch, accumulated in float32 or, for float64 inputs, in float64; q and k may be `Codes`."""
    q, k = p.index_q if q is None else q, p.index_k if k is None else k
    wide, group = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    if num_blocks is None:
        num_blocks = math.ceil(max(p.k_lens, default=0) / block_size)
    scores = torch.full((q.shape[1], q.shape[0], num_blocks), -math.inf, dtype=wide)
    for b in range(len(p.q_lens)):
        own, keys = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1])), keys_of(k, p, b)
        last = torch.tensor([last for _, sequence, last in rows(p) if sequence == b], dtype=torch.int64)
        hidden = torch.arange(len(keys)) > last[:, None] if causal else torch.zeros(len(last), len(keys), dtype=torch.bool)
        for head in range(q.shape[1]):
            products = products_of(q[own, head], keys[:, head // group])
            products = torch.where(products.isnan(), -math.inf, products)
            for block, piece in enumerate(products.masked_fill(hidden, -math.inf).split(block_size, dim=1)):
                if piece.numel():
                    scores[head, own, block] = piece.amax(1)
    return scores


def select(scores, visible, topk, init_blocks=0, local_blocks=1):
    """Returns the ids of the blocks that one row selects. scores: a list of floats; visible: how many leading blocks may be
    read."""
    visible = min(visible, len(scores))
    forced = {b for b in range(visible) if b < init_blocks or b >= visible - local_blocks}
    free = [b for b in range(visible) if b not in forced and scores[b] > -math.inf]  # NaN is not greater either
    free.sort(key=lambda b: (-scores[b], b))
    chosen = sorted([*forced, *free[: topk - len(forced)]])
    return chosen + [-1] * (topk - len(chosen))


def select_blocks(p, scores, block_size, topk, init_blocks=0, local_blocks=1):
    """Returns int32 [total_q, index_heads, topk] from the scores [index_heads, total_q, num_blocks]."""
    blocks = torch.empty(scores.shape[1], scores.shape[0], topk, dtype=torch.int32)
    for row, _, last in rows(p):
        for head in range(scores.shape[0]):
            seen = max(last, -1) // block_size + 1
            blocks[row, head] = torch.tensor(select(scores[head, row].tolist(), seen, topk, init_blocks, local_blocks))
    return blocks


def reads_of_blocks(blocks, block_size):
    """Returns a function (row, kv_head, sequence, last key) -> ids, which says for each row and KV head which keys of its
    blocks it sees."""

    def reads(row, kv_head, b, last):
        ids = blocks[row, kv_head if blocks.shape[1] > 1 else 0].tolist()
        return [j for block in ids if block >= 0 for j in range(block * block_size, (block + 1) * block_size) if j <= last]

    return reads


def reads_everything(p, causal=True):
    """Returns the same for dense attention."""
    return lambda row, kv_head, b, last: list(range(last + 1 if causal else p.k_lens[b]))


def attend(q, keys, values, scale):
    """Attends with query heads [group, dim] of one row to keys and values [n, dim]: out [group, dim], lse [group]."""
    logits = (q @ keys.T) * scale
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@on_one_thread
def attention(p, reads, scale=None):
    """Returns out [total_q, num_q_heads, head_dim] and lse [total_q, num_q_heads]."""
    group, scale = p.q.shape[1] // p.k.shape[1], p.q.shape[2] ** -0.5 if scale is None else scale
    q, k, v = p.q.double(), p.k.double(), p.v.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -math.inf, dtype=q.dtype)
    for row, b, last in rows(p):
        keys, values = keys_of(k, p, b), keys_of(v, p, b)
        for kv in range(k.shape[1]):
            ids, own = reads(row, kv, b, last), slice(kv * group, (kv + 1) * group)
            if ids:
                ids = torch.tensor(ids)
                out[row, own], lse[row, own] = attend(q[row, own], keys[ids, kv], values[ids, kv], scale)
    return out, lse


@on_one_thread
def honest_attention(p, reads, scale=None, q=None, k=None):
    """Returns the same from PyTorch in the dtype of the inputs; the lse is accumulated in float32 at least, over weights of
    that dtype, and of the products of q and k, `Codes`, where they are given."""
    q, k = p.q if q is None else q, p.k if k is None else k
    dtype, wide = p.q.dtype, torch.promote_types(p.q.dtype, torch.float32)
    group, scale = p.q.shape[1] // p.k.shape[1], p.q.shape[2] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(p.q), torch.full(p.q.shape[:2], -math.inf, dtype=wide)
    for b in range(len(p.q_lens)):
        own, keys, values = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1])), keys_of(p.k, p, b), keys_of(p.v, p, b)
        factors = keys_of(k, p, b)
        for head in range(p.q.shape[1]) if len(keys) else ():
            kv, mask = head // group, torch.full((p.q_lens[b], len(keys)), -math.inf, dtype=wide)
            for row, _, last in (r for r in rows(p) if r[1] == b):
                mask[row - own.start, reads(row, kv, b, last)] = 0
            logits = products_of(q[own, head], factors[:, kv]) * scale + mask
            peak = logits.amax(1, keepdim=True).clamp(min=-1e30)  # an empty row: exp(-inf) and log(0)
            lse[own, head] = peak[:, 0] + (logits - peak).exp().to(dtype).to(wide).sum(1).log()
            weights = ((p.q[own, head] @ keys[:, kv].T) * scale + mask).softmax(-1).nan_to_num(0).to(dtype)
            out[own, head] = weights @ values[:, kv]
    return out, lse
