# SPDX-License-Identifier: MIT
"""This module runs `sparse_attention` on CPU. Many queries go KV-outer: the queries of a block are gathered, and their partial
results merged by lse. For few queries (decode) the selected keys of each query are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.rows import out_dtype, rows_of, wide_dtype
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime.environment import cpu_workspace_bytes
from openmsa.runtime.matmul import attend_few, matmul_nt
from openmsa.types import Layout

TILE_ROWS = 4096  # (query, head) rows of a tile, whose logits take 2 MB
ROUND_ROWS = 256  # rows of a tile are rounded up to multiples of it: products then have a few shapes, not thousands
MERGED_QUERIES = 256  # so many queries are merged at a time, and their partials stay in cache
GATHERED_BYTES = 2 << 20  # Few queries: gathered keys of some heads, which stay in cache.
FEW_QUERIES = 8  # So few queries of a sequence share too few blocks for KV-outer to pay.


@dataclass(frozen=True)
class _Head:
    """Describes one KV head of one sequence with the queries of its group."""

    q: Tensor  # [q_len, group, dim]
    scale: float
    dtype: torch.dtype  # that of the computation
    ids: Tensor  # int64 [q_len, topk]; -1 where nothing is to be read
    last_key: Tensor  # int64 [q_len]
    keys: Rows
    values: Rows
    head: int
    block_size: int
    k_len: int


def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Does what `openmsa.sparse_attention.sparse_attention` says."""
    total_q, heads, dim = q.shape
    k_pool, v_pool = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
    assert v_pool is not None
    kv_heads = k_pool.shape[1]
    group = heads // kv_heads
    dtype = wide_dtype(q)
    out = torch.empty((total_q, heads, dim), dtype=out_dtype(q)) if out is None else out
    lse = torch.empty((total_q, heads), dtype=dtype) if lse is None else lse
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        pages = k.page_table[b] if isinstance(k, PagedKV) else None
        keys, values = (Rows(pool, k0, pages, dtype) for pool in (k_pool, v_pool))
        if seqs.longest_q <= FEW_QUERIES:
            for i in range(q0, q1):
                rows = rows_of(q, slice(i, i + 1), dtype=dtype)[0].to(dtype).unflatten(0, (kv_heads, group)) * softmax_scale
                token = min(i - q0 + offset, k_len - 1)
                of_token = _gather_keys(rows, blocks[i].tolist(), token, keys, values, block_size)
                out[i], lse[i] = (x.flatten(0, 1) for x in of_token)
            continue
        last_key = (torch.arange(q1 - q0) + offset).clamp_(max=k_len - 1)
        for head in range(kv_heads):
            of_group = slice(head * group, (head + 1) * group)
            ids = blocks[q0:q1, head if blocks.shape[1] > 1 else 0].long()
            ids = ids.masked_fill(ids * block_size > last_key[:, None], -1)
            of_head = rows_of(q, slice(q0, q1), of_group, dtype=dtype)
            problem = _Head(of_head, softmax_scale, dtype, ids, last_key, keys, values, head, block_size, k_len)
            _gather_queries(problem, out[q0:q1, of_group], lse[q0:q1, of_group])
    return (out, lse) if return_lse else out


def _gather_keys(
    q: Tensor, ids: list[list[int]], last_key: int, keys: Rows, values: Rows, block_size: int
) -> tuple[Tensor, Tensor]:
    """Attends with the queries of one token, scaled, ``[kv_heads, group, dim]``, to all keys of the blocks that each KV head
    selected, in any order, of which those that are not visible are skipped. Returns results of q's leading dimensions."""
    kv_heads, group, dim = q.shape
    visible = last_key // block_size + 1
    chosen = [sorted({i for i in of_head if 0 <= i < visible}) for of_head in ids]
    chosen = chosen * kv_heads if len(chosen) == 1 else chosen
    counts = [
        min(len(of) * block_size, len(of) * block_size + last_key + 1 - (of[-1] + 1) * block_size) if of else 0 for of in chosen
    ]
    parts: list[tuple[Tensor, Tensor]] = []
    first = 0
    while first < kv_heads:  # Heads that read as many keys are served together, as far as their keys fit into caches.
        count = counts[first]
        most = max(1, GATHERED_BYTES // max(1, count * dim * q.dtype.itemsize))
        stop = first + 1
        while stop < kv_heads and counts[stop] == count and stop - first < most:
            stop += 1
        heads = range(first, stop)
        if not count:
            parts.append((q.new_zeros(len(heads), group, dim), q.new_full((len(heads), group), -torch.inf)))
        else:
            read = [_read(rows, chosen[first:stop], heads, visible, block_size, count).to(q.dtype) for rows in (keys, values)]
            parts.append(attend_few(q[first:stop], *read))
        first = stop
    return parts[0] if len(parts) == 1 else (torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts]))


def _read(rows: Rows, ids: list[list[int]], heads: range, visible: int, block_size: int, count: int) -> Tensor:
    """Gives the rows of the blocks of some heads, ``[heads, count, dim]``: a view where all visible blocks are chosen."""
    if len(ids[0]) == visible and rows.pages is None and isinstance(rows.rows, Tensor):
        return rows.heads(0, count)[heads.start : heads.stop]
    return rows.blocks(ids, heads, block_size, count)


def _gather_queries(p: _Head, out: Tensor, lse: Tensor) -> None:
    """Attends KV-outer with a chunk of queries at a time, whose partial results fill the workspace."""
    q_len, group, dim = p.q.shape
    topk = p.ids.shape[1]
    chunk = max(1, min(q_len, cpu_workspace_bytes() // (topk * group * dim * p.dtype.itemsize)))
    partial = torch.empty(chunk * topk + 1, group * dim, dtype=p.dtype)  # The rows are in (block, query) order; the last is
    partial_lse = torch.empty(chunk * topk + 1, group, dtype=p.dtype)  # the neutral element, which skipped slots point at.
    partial[-1], partial_lse[-1] = 0, -torch.inf
    for start in range(0, q_len, chunk):
        rows = slice(start, min(start + chunk, q_len))
        queries = (p.q[rows].to(p.dtype) * p.scale).flatten(1)  # [rows, group * dim]
        query, counts, place = by_block(p.ids[rows], -(-p.k_len // p.block_size), partial.shape[0] - 1)
        first = 0
        for block, count in enumerate(counts):
            if count:
                done = slice(first, first + count)
                _attend_block(p, queries, query[done], p.last_key[rows], block, partial[done], partial_lse[done])
                first += count
        _merge(partial, partial_lse, place, out[rows], lse[rows])


def by_block(ids: Tensor, num_blocks: int, neutral: int) -> tuple[Tensor, list[int], Tensor]:
    """Sorts the (block, query) pairs of ``ids [rows, topk]`` and drops skipped ones.

    Returns the query of each pair, ascending within a block; the number of pairs of each block; and int32 ``[rows, topk]``,
    the place of each pair in this order (`neutral` where it was dropped).
    """
    rows, topk = ids.shape
    ids = torch.where(ids < 0, num_blocks, ids).flatten()
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=num_blocks + 1)[:num_blocks].tolist()
    kept = sum(counts)
    place = torch.empty(rows * topk, dtype=torch.int32)
    place[order] = torch.arange(rows * topk, dtype=torch.int32)
    place.masked_fill_(place >= kept, neutral)
    return order[:kept] // topk, counts, place.view(rows, topk)


def _attend_block(p: _Head, queries: Tensor, query: Tensor, last_key: Tensor, block: int, out: Tensor, lse: Tensor) -> None:
    """Writes normalised attention of the chosen queries over one block: out ``[n, group * dim]``, lse ``[n, group]``."""
    group = lse.shape[1]
    first, stop = block * p.block_size, min((block + 1) * p.block_size, p.k_len)
    keys, values = (rows.span(p.head, first, stop).to(p.dtype).contiguous() for rows in (p.keys, p.values))
    tile = max(1, TILE_ROWS // group)
    for n in range(0, query.numel(), tile):
        chosen = query[n : n + tile]
        m = chosen.numel()
        rounding = max(1, (ROUND_ROWS if m * group > ROUND_ROWS else ROUND_ROWS // 8) // group)
        padded = torch.nn.functional.pad(chosen, (0, -m % rounding))  # The padding is query 0, whose results are dropped.
        logits = matmul_nt(queries.index_select(0, padded).view(-1, keys.shape[1]), keys)  # [padded * group, keys]
        if int(last_key[chosen[0]]) < stop - 1:  # Queries ascend: those inside this block come first.
            seen = last_key[chosen]
            inside = int((seen < stop - 1).sum())
            hidden = torch.arange(first, stop) > seen[:inside, None]
            logits.view(-1, group, stop - first)[:inside].masked_fill_(hidden[:, None], -torch.inf)
        largest = logits[: m * group].amax(1)
        weights = torch.softmax(logits, 1, out=logits)
        lse[n : n + m] = (largest - weights[: m * group].amax(1).log_()).view(m, group)  # The largest is 1 / denominator.
        out[n : n + m] = matmul_nt(weights, values.t())[: m * group].view(m, -1)


def _merge(partial: Tensor, partial_lse: Tensor, place: Tensor, out: Tensor, lse: Tensor) -> None:
    """Combines the partial results of each query: out ``[rows, group, dim]``, lse ``[rows, group]``."""
    topk, group = place.shape[1], partial_lse.shape[1]
    head = torch.arange(group, dtype=torch.int32)[:, None]
    partial = partial.view(partial.shape[0] * group, -1)  # There is a row for each (pair, head).
    for start in range(0, place.shape[0], MERGED_QUERIES):
        rows = slice(start, start + MERGED_QUERIES)
        at = place[rows]
        logs = partial_lse.index_select(0, at.flatten()).view(-1, topk, group).transpose(1, 2).contiguous()
        total = logs.logsumexp(2)  # [rows, group]
        weights = logs.sub_(total.clamp(min=torch.finfo(logs.dtype).min)[..., None]).exp_()  # [rows, group, topk]
        index = (at[:, None] * group + head).flatten()
        bags = torch.arange(0, index.numel(), topk, dtype=torch.int32)
        # This is a weighted sum of gathered rows in one pass, which int32 indices make fast.
        merged = torch.embedding_bag(partial, index, bags, mode=0, per_sample_weights=weights.flatten())[0]
        out[rows] = merged.view(len(at), group, -1)
        lse[rows] = total
