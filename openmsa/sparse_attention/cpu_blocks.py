# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, cpu_blocks.c attends KV-outer on a CPU: it keeps a tile of queries in cache from their
logits to their sums of values, which PyTorch's operations write to memory and read again."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from openmsa.kv_cache import Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives.cpu_rows import TYPES, CRows, Span, address, factors, numbers, rows_of_heads, sizes, strides
from openmsa.runtime import c_library
from openmsa.runtime.environment import cpu_workspace_bytes

SOURCE = Path(__file__).with_suffix(".c")
CALL_ROWS = 8192  # (query, head) rows of a call, whose queries and sums take 8 MB at head dim 128
ROWS_A_BLOCK = 128  # A call has about so many rows a block, as a block's keys are packed anew in each call.


class _Call(ctypes.Structure):
    """This is `Call` of cpu_blocks.c."""

    _fields_ = (
        *sizes("q", "q_token", "q_head", "q_type", "scales", "ids", "ids_token", "ids_slot"),
        ("keys", CRows),
        ("values", CRows),
        ("value_scale", ctypes.c_double),
        *sizes("queries", "group", "dim", "topk", "block_size", "k_len", "position"),
        *sizes("out", "out_token", "out_head", "out_type", "lse", "lse_token", "lse_head"),
    )


@dataclass(frozen=True)
class AttentionSpan(Span):
    """A span of queries has the values of its sequence, too."""

    values: Rows


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
    functions, of_q = c_library.library(SOURCE).functions, numbers(q)
    if not spans:
        return
    assert functions is not None
    assert of_q is not None
    keys, values = spans[0].keys.rows, spans[0].values.rows
    scales = factors(q) * factors(keys).repeat_interleave(q.shape[1] // keys.shape[1]) * softmax_scale
    queries = sum(span.stop - span.first for span in spans)
    threads = c_library.threads_for(queries * q.shape[1] * blocks.shape[2] * block_size * q.shape[2])
    held: list[Tensor] = []  # memory whose addresses stand in the calls
    places = (scales, factors(values).tolist(), out, lse)
    calls = [call for span in spans for call in _calls(of_q, blocks, span, block_size, *places, threads, held)]
    c_library.run(functions, "attend", calls, threads)


def _calls(
    q: Tensor,
    blocks: Tensor,
    span: AttentionSpan,
    block_size: int,
    scales: Tensor,
    value_scales: list[float],
    out: Tensor,
    lse: Tensor,
    threads: int,
    held: list[Tensor],
) -> Iterator[_Call]:
    """Gives the calls of a span: one for each KV head and some queries."""
    (all_keys, key_runs), (all_values, value_runs) = rows_of_heads(span.keys), rows_of_heads(span.values)
    held += [key_runs, value_runs]
    group, topk = q.shape[1] // len(all_keys), blocks.shape[2]
    size = _queries_at_a_time(span, group, q.shape[2], topk, block_size, -(-threads // len(all_keys)), threads)
    for head, (keys, values) in enumerate(zip(all_keys, all_values, strict=True)):
        for first in range(span.first, span.stop, size):
            q_token, q_head = strides(q)
            out_token, out_head = strides(out)
            yield _Call(
                q=address(q, first, head * group),
                q_token=q_token,
                q_head=q_head,
                q_type=TYPES[q.dtype],
                scales=scales.data_ptr() + head * group * scales.element_size(),
                ids=address(blocks, first, head if blocks.shape[1] > 1 else 0),
                ids_token=blocks.stride(0),
                ids_slot=blocks.stride(2),
                keys=keys,
                values=values,
                value_scale=value_scales[head],
                queries=min(size, span.stop - first),
                group=group,
                dim=q.shape[2],
                topk=topk,
                block_size=block_size,
                k_len=span.k_len,
                position=span.position + first - span.first,
                out=address(out, first, head * group),
                out_token=out_token,
                out_head=out_head,
                out_type=TYPES[out.dtype],
                lse=address(lse, first, head * group),
                lse_token=lse.stride(0),
                lse_head=lse.stride(1),
            )


def _queries_at_a_time(span: Span, group: int, dim: int, topk: int, block_size: int, least_calls: int, threads: int) -> int:
    """Returns how many queries a call has: rows for each block, a part for each thread, and what the workspace holds."""
    rows = max(CALL_ROWS, ROWS_A_BLOCK * -(-span.k_len // block_size) // topk)
    rows = min(rows, cpu_workspace_bytes() // (threads * 4 * (2 * dim + topk + 4)))
    queries = span.stop - span.first
    calls = max(least_calls, -(-queries // max(1, rows // group)))
    return max(1, -(-queries // calls))
