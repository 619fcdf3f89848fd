# SPDX-License-Identifier: MIT
"""This module runs `sparse_attention` on CPU. Where the machine has a C compiler, a kernel in C attends (`cpu_blocks`). Else
many queries go KV-outer: the queries of a block are gathered, and their partial results merged by lse; for few queries (decode)
the selected keys of each are gathered; runs of queries that read every block they see are left to dense attention."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention.call import DenseCall
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.rows import rows_of
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives import cpu_blocks
from openmsa.primitives.cpu_rows import reads
from openmsa.runtime.environment import cpu_workspace_bytes
from openmsa.runtime.matmul import matmul_nt
from openmsa.sparse_attention.cpu_masked import attend_masked, masked_queries
from openmsa.sparse_attention.cpu_token import attend_token
from openmsa.types import Layout, out_dtype, wide_dtype

TILE_ROWS = 4096  # (query, head) rows of a tile, whose logits take 2 MB
ROUND_ROWS = 256  # rows of a tile are rounded up to multiples of it: products then have a few shapes, not thousands
MERGED_QUERIES = 256  # so many queries are merged at a time, and their partials stay in cache
FEW_QUERIES = 8  # So few queries of a sequence share too few blocks for KV-outer by PyTorch's operations to pay.


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
    out = torch.empty(q.shape, dtype=out_dtype(q), device="cpu") if out is None else out
    lse = torch.empty(q.shape[:2], dtype=wide_dtype(q), device="cpu") if lse is None else lse
    spans = cpu_blocks.spans_of(k, v, seqs, wide_dtype(q))
    if not spans or reads(cpu_blocks.SOURCE, q, spans[0].keys.rows, spans[0].values.rows):
        cpu_blocks.attend(q, blocks, spans, block_size, softmax_scale, out, lse)
        return (out, lse) if return_lse else out
    if seqs.longest_q <= FEW_QUERIES:
        _attend(q, spans, blocks, block_size, softmax_scale, out, lse)
        return (out, lse) if return_lse else out
    for rows, whole in _runs(blocks, seqs, block_size):
        if whole:
            results = (True, True, False, out[rows], lse[rows])
            part = _part(seqs, rows, q.shape[0])
            DENSE.run("cpu", DenseCall(q[rows], k, v, part, True, softmax_scale, block_size, *results))
        for some in _not_finite(out, rows, part) if whole else [rows]:
            spans = cpu_blocks.spans_of(k, v, _part(seqs, some, q.shape[0]), wide_dtype(q))
            _attend(q[some], spans, blocks[some], block_size, softmax_scale, out[some], lse[some])
    return (out, lse) if return_lse else out


def _part(seqs: Layout, rows: slice, total_q: int) -> Layout:
    """Returns the layout of some of the packed queries."""
    return seqs if rows == slice(0, total_q) else seqs.query_chunk(rows.start, rows.stop)


def _not_finite(out: Tensor, rows: slice, part: Layout) -> list[slice]:
    """Returns the rows of each sequence that has a NaN or inf among its results. Dense attention lets in such values of keys
    behind a query."""
    if bool(out[rows].isfinite().all()):
        return []
    of_sequences = [slice(rows.start + q0, rows.start + q1) for q0, q1 in pairwise(part.cu_seqlens_q.tolist())]
    return [own for own in of_sequences if not bool(out[own].isfinite().all())]


def _runs(blocks: Tensor, seqs: Layout, block_size: int) -> list[tuple[slice, bool]]:
    """Cuts the packed queries into runs: those that read every block they see, listed in order, and the others. What a query
    belongs to depends on its own sequence alone, so that the order of sequences changes no result."""
    total_q, _, topk = blocks.shape
    visible = seqs.visible_blocks(total_q, block_size)[:, None]
    slot = torch.arange(topk, dtype=torch.int32, device="cpu")
    whole = (blocks == torch.where(slot < visible, slot, -1)[:, None]).flatten(1).all(1) & (visible[:, 0] <= topk)
    changes = (whole[1:] != whole[:-1]).nonzero().flatten() + 1
    edges = sorted({0, total_q, *changes.tolist(), *seqs.cu_seqlens_q.tolist()})
    runs: list[tuple[slice, bool]] = []
    for start, stop in pairwise(edges):
        dense = stop - start > FEW_QUERIES and bool(whole[start])
        if runs and runs[-1][1] == dense:
            start = runs.pop()[0].start
        runs.append((slice(start, stop), dense))
    return runs


def _attend(
    q: Tensor | Stored,
    spans: list[cpu_blocks.AttentionSpan],
    blocks: Tensor,
    block_size: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends to the blocks of each query alone."""
    dtype = wide_dtype(q)
    few = all(span.stop - span.first <= FEW_QUERIES for span in spans)
    for span in spans:
        q0, q1, keys, k_len, values = span.first, span.stop, span.keys, span.k_len, span.values
        last_key = (torch.arange(q1 - q0, device="cpu") + span.position).clamp_(max=k_len - 1)
        if isinstance(q, Tensor) and isinstance(keys.rows, Tensor) and not few:
            count = masked_queries(last_key, blocks.shape[2], block_size, q.dtype, softmax_scale)
            where = (blocks[q0 : (stop := q0 + count)], last_key[:count], keys, values, block_size, softmax_scale)
            if count and attend_masked(q[q0:stop], *where, out[q0:stop], lse[q0:stop]):
                q0, last_key = stop, last_key[count:]
        group = q.shape[1] // (kv_heads := keys.rows.shape[1])
        for i in range(q0, q1) if few else ():
            rows = rows_of(q, slice(i, i + 1), dtype=dtype)[0].to(dtype).unflatten(0, (kv_heads, group)) * softmax_scale
            attend_token(rows, blocks[i].tolist(), int(last_key[i - q0]), keys, values, block_size, out[i], lse[i])
        for head in range(kv_heads) if q0 < q1 and not few else ():
            of_group = slice(head * group, (head + 1) * group)
            ids = blocks[q0:q1, head if blocks.shape[1] > 1 else 0].long()
            ids = ids.masked_fill(ids * block_size > last_key[:, None], -1)
            of_head = rows_of(q, slice(q0, q1), of_group, dtype=dtype)
            problem = _Head(of_head, softmax_scale, dtype, ids, last_key, keys, values, head, block_size, k_len)
            _gather_queries(problem, out[q0:q1, of_group], lse[q0:q1, of_group])


def _gather_queries(p: _Head, out: Tensor, lse: Tensor) -> None:
    """Attends KV-outer with a chunk of queries at a time, whose partial results fill the workspace."""
    q_len, group, dim = p.q.shape
    topk = p.ids.shape[1]
    chunk = max(1, min(q_len, cpu_workspace_bytes() // (topk * group * dim * p.dtype.itemsize)))
    # The rows are in (block, query) order; the last is the neutral element, which skipped slots point at.
    partial = torch.empty(chunk * topk + 1, group * dim, dtype=p.dtype, device="cpu")
    partial_lse = torch.empty(chunk * topk + 1, group, dtype=p.dtype, device="cpu")
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
    place = torch.empty(rows * topk, dtype=torch.int32, device="cpu")
    place[order] = torch.arange(rows * topk, dtype=torch.int32, device="cpu")
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
            hidden = torch.arange(first, stop, device="cpu") > seen[:inside, None]
            logits.view(-1, group, stop - first)[:inside].masked_fill_(hidden[:, None], -torch.inf)
        largest = logits[: m * group].amax(1)
        weights = torch.softmax(logits, 1, out=logits)
        sums = largest - weights[: m * group].amax(1).log_()  # The largest is 1 / denominator.
        infinite = largest.isinf()
        if bool(infinite.any()):  # Such a row has no weights if its largest logit is -inf, and is NaN if it is inf.
            weights[: m * group].masked_fill_((largest == -torch.inf)[:, None], 0)
            sums = torch.where(infinite, largest, sums)
        lse[n : n + m] = sums.view(m, group)
        out[n : n + m] = matmul_nt(weights, values.t())[: m * group].view(m, -1)


def _merge(partial: Tensor, partial_lse: Tensor, place: Tensor, out: Tensor, lse: Tensor) -> None:
    """Combines the partial results of each query: out ``[rows, group, dim]``, lse ``[rows, group]``."""
    topk, group = place.shape[1], partial_lse.shape[1]
    head = torch.arange(group, dtype=torch.int32, device="cpu")[:, None]
    partial = partial.view(partial.shape[0] * group, -1)  # There is a row for each (pair, head).
    for start in range(0, place.shape[0], MERGED_QUERIES):
        rows = slice(start, start + MERGED_QUERIES)
        at = place[rows]
        logs = partial_lse.index_select(0, at.flatten()).view(-1, topk, group).transpose(1, 2).contiguous()
        total = logs.logsumexp(2)  # [rows, group]
        weights = logs.sub_(total.clamp(min=torch.finfo(logs.dtype).min)[..., None]).exp_()  # [rows, group, topk]
        index = (at[:, None] * group + head).flatten()
        bags = torch.arange(0, index.numel(), topk, dtype=torch.int32, device="cpu")
        # This is a weighted sum of gathered rows in one pass, which int32 indices make fast.
        merged = torch.embedding_bag(partial, index, bags, mode=0, per_sample_weights=weights.flatten())[0]
        out[rows] = merged.view(len(at), group, -1)
        lse[rows] = total
