# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, cpu_blocks.c attends KV-outer on a CPU, to the blocks that each query has selected, or to
all: it keeps a tile of queries in cache from their logits to their sums of values, which PyTorch's operations write to memory
and read again."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives.cpu_rows import TYPES, CRows, Span, address, c_rows, factors, numbers, product_factors, sizes, strides
from openmsa.runtime import c_library
from openmsa.runtime.environment import cpu_workspace_bytes
from openmsa.types import Layout

SOURCE = Path(__file__).with_suffix(".c")
TILE_HEADS, TILE_DIM = 16, 32  # Tiles serve groups of multiples of so many heads and dims: UNIT and DEPTH of the C files.
CALL_ROWS = 8192  # (query, head) rows of a piece, whose queries and sums take 8 MB at head dim 128
PIECES_A_THREAD = 8  # A thread has so many pieces of long prefills, as some take longer than others.
ROWS_A_BLOCK = 128  # A piece has about so many rows a block, as a block's keys are packed anew in each piece.


class _Call(ctypes.Structure):
    """This is `Call` of cpu_blocks.c."""

    _fields_ = (
        *sizes("q", "q_token", "q_head", "q_type", "scales", "ids", "ids_token", "ids_head", "ids_slot"),
        ("keys", CRows),
        ("values", CRows),
        *sizes("value_scales", "queries", "group", "dim", "topk", "block_size", "k_len", "position"),
        *sizes("out", "out_token", "out_head", "out_type", "lse", "lse_token", "lse_head"),
    )


@dataclass(frozen=True)
class AttentionSpan(Span):
    """A span of queries has the values of its sequence, too."""

    values: Rows


def spans_of(k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, seqs: Layout, dtype: torch.dtype) -> list[AttentionSpan]:
    """Returns the queries of each sequence."""
    found = []
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        pages = k.page_table[b] if isinstance(k, PagedKV) else None
        pools = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
        keys, values = (Rows(pool, k0, pages, dtype) for pool in pools if pool is not None)
        found.append(AttentionSpan(q0, q1, offset, keys, k_len, values))
    return found


def attend(
    q: Tensor | Stored,
    blocks: Tensor,
    spans: list[AttentionSpan],
    block_size: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends with the queries of the spans, q ``[total_q, num_q_heads, dim]``, to the blocks that each selected, blocks
    ``[total_q, kv_heads or 1, topk]``. Writes out and lse of these queries. The spans read one cache, and `reads` is true."""
    parts = []
    for span in spans:
        size = _queries_at_a_time(span, q.shape[1], q.shape[2], blocks.shape[2], block_size)
        parts += [span.part(first, min(first + size, span.stop)) for first in range(span.first, span.stop, size)]
    if parts:
        c_library.run(task(q, blocks, parts, block_size, softmax_scale, out, lse))


def task(
    q: Tensor | Stored,
    blocks: Tensor,
    spans: list[AttentionSpan],
    block_size: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> c_library.Task:
    """Returns the task that does what `attend` says for spans that are as long as a piece of work should be. lse: None where it
    is not wanted."""
    functions, of_q = c_library.library(SOURCE).functions, numbers(q)
    assert functions is not None
    assert of_q is not None
    (_, heads, dim), topk, kv_heads = q.shape, blocks.shape[2], spans[0].keys.rows.shape[1]
    keys, values = spans[0].keys.rows, spans[0].values.rows
    scales = product_factors(q, keys, softmax_scale)
    value_scales = factors(values)
    held = [scales, value_scales, of_q, out, lse, blocks, keys, values]
    (q_token, q_head), (out_token, out_head) = strides(of_q), strides(out)
    calls = []
    for span in spans:
        (c_keys, key_pages), (c_values, value_pages) = c_rows(span.keys), c_rows(span.values)
        held += [key_pages, value_pages]
        call = _Call(
            q=address(of_q, span.first, 0),
            q_token=q_token,
            q_head=q_head,
            q_type=TYPES[of_q.dtype],
            scales=scales.data_ptr(),
            ids=address(blocks, span.first, 0),
            ids_token=blocks.stride(0),
            ids_head=blocks.stride(1) if blocks.shape[1] > 1 else 0,
            ids_slot=blocks.stride(2),
            keys=c_keys,
            values=c_values,
            value_scales=value_scales.data_ptr(),
            queries=span.stop - span.first,
            group=heads // kv_heads,
            dim=dim,
            topk=topk,
            block_size=block_size,
            k_len=span.k_len,
            position=span.position,
            out=address(out, span.first, 0),
            out_token=out_token,
            out_head=out_head,
            out_type=TYPES[out.dtype],
        )
        if lse is not None:
            call.lse, call.lse_token, call.lse_head = address(lse, span.first, 0), *lse.stride()
        calls.append(call)
    threads = c_library.threads_for(sum(call.queries for call in calls) * heads * topk * block_size * dim)
    return c_library.Task(functions, "attend", calls, kv_heads, threads, held)


def _queries_at_a_time(span: AttentionSpan, heads: int, dim: int, topk: int, block_size: int) -> int:
    """Returns how many queries a piece has: pieces for each thread, rows for each block, and what the workspace holds."""
    threads, kv_heads, queries = torch.get_num_threads(), span.keys.rows.shape[1], span.stop - span.first
    group = heads // kv_heads
    least = ROWS_A_BLOCK * -(-span.k_len // block_size) // topk
    most = min(max(CALL_ROWS, least), cpu_workspace_bytes() // (threads * 4 * (2 * dim + 2 * topk + 4)))
    for_threads = max(threads, min(PIECES_A_THREAD * threads, queries * heads // max(1, least)))
    pieces = max(-(-for_threads // kv_heads), -(-queries // max(1, most // group)))
    return max(1, -(-queries // pieces))
