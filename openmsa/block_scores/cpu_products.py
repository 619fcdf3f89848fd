# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, cpu_products.c scores blocks on a CPU: products stay in registers until they are block
maxima, and few rows read keys from memory at its rate."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from openmsa.kv_cache import Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives.cpu_rows import TYPES, CRows, Span, address, factors, numbers, reads, rows_of_heads, sizes, strides
from openmsa.runtime import c_library

SOURCE = Path(__file__).with_suffix(".c")
CALL_ROWS = 1024  # (query, head) rows of a call, which stay in an L2 cache
MOST_ROWS = 16  # few rows are so many at most: MOST_FEW_ROWS of the C file
CALLS_A_THREAD = 8  # few rows: so many calls a thread, of which a busy core makes fewer
LEAST_ELEMENTS = 1 << 18  # few rows: PyTorch multiplies fewer elements of keys in the time that a call takes to be prepared.


class _Call(ctypes.Structure):
    """This is `Call` of cpu_products.c."""

    _fields_ = (
        *sizes("q", "q_token", "q_head", "q_type", "scales"),
        ("keys", CRows),
        *sizes("queries", "group", "dim", "block_size", "k_len", "position", "first_block", "end_block"),
        *sizes("scores", "score_head", "score_token"),
    )


def score(index_q: Tensor | Stored, spans: list[Span], block_size: int, scores: Tensor) -> None:
    """Writes the scores ``[index_heads, total_q, blocks]`` of the queries of the spans, index_q ``[total_q, index_heads,
    index_dim]``, where they see a block. The spans read one cache, and `reads` is true."""
    q = numbers(index_q)
    if not spans:
        return
    assert q is not None
    keys = spans[0].keys.rows
    scales = factors(index_q) * factors(keys).repeat_interleave(q.shape[1] // keys.shape[1])
    held: list[Tensor] = []  # memory whose addresses stand in the calls
    calls = [call for span in spans for call in _calls(q, span, block_size, scales, scores, held)]
    _run("score", calls[::-1])  # The last queries see the most: their calls begin first.


def score_few(q: Tensor, keys: Rows, end: int, block_size: int) -> Tensor | None:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, all of which the rows q ``[heads, rows, dim]`` of
    float32 see; or None where PyTorch's operations serve sooner, or the kernel does not read the keys."""
    heads, rows, dim = q.shape
    if rows > MOST_ROWS or heads * end * dim < LEAST_ELEMENTS or q.dtype != torch.float32 or not reads(SOURCE, q, keys.rows):
        return None
    num_blocks = -(-end // block_size)
    scores = torch.empty(heads, rows, num_blocks, dtype=torch.float32, device="cpu")
    held: list[Tensor] = []
    scales = factors(keys.rows).repeat_interleave(rows)
    span = Span(0, 1, end - 1, keys, end)
    step = max(1, num_blocks * heads // (CALLS_A_THREAD * torch.get_num_threads()))
    calls = []
    for call in _calls(q.reshape(1, heads * rows, dim), span, block_size, scales, scores.view(heads * rows, 1, -1), held):
        for first in range(0, num_blocks, step):
            calls.append(_Call.from_buffer_copy(call))
            calls[-1].first_block, calls[-1].end_block = first, min(first + step, num_blocks)
    _run("score_few", calls)
    return scores


def _calls(q: Tensor, span: Span, block_size: int, scales: Tensor, scores: Tensor, held: list[Tensor]) -> Iterator[_Call]:
    """Gives the calls of a span: one for each head of keys and some queries. held: gets memory whose addresses stand in
    them."""
    all_keys, runs = rows_of_heads(span.keys)
    held += [runs, q, scales]
    group = q.shape[1] // len(all_keys)
    size = max(1, CALL_ROWS // group)
    for head, keys in enumerate(all_keys):
        for first in range(span.first, span.stop, size):
            stop = min(first + size, span.stop)
            q_token, q_head = strides(q)
            yield _Call(
                q=address(q, first, head * group),
                q_token=q_token,
                q_head=q_head,
                q_type=TYPES[q.dtype],
                scales=scales.data_ptr() + head * group * scales.element_size(),
                keys=keys,
                queries=stop - first,
                group=group,
                dim=q.shape[2],
                block_size=block_size,
                k_len=span.k_len,
                position=span.position + first - span.first,
                first_block=0,
                end_block=-(-min(span.k_len, span.position + stop - span.first) // block_size),
                scores=scores.data_ptr() + (head * group * scores.stride(0) + first * scores.stride(1)) * scores.element_size(),
                score_head=scores.stride(0),
                score_token=scores.stride(1),
            )


def _run(name: str, calls: list[_Call]) -> None:
    functions = c_library.library(SOURCE).functions
    assert functions is not None
    blocks = sum(call.queries * call.group * (call.end_block - call.first_block) for call in calls)
    products = blocks * calls[0].block_size * calls[0].dim if calls else 0
    c_library.run(functions, name, calls, c_library.threads_for(products))
