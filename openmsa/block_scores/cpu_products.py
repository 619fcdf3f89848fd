# SPDX-License-Identifier: MIT
"""Where the machine has a C compiler, cpu_products.c scores blocks on a CPU: products stay in registers, or in the nearest
cache, until they are block maxima, and few rows read keys from memory at its rate."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache import Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives.cpu_rows import TYPES, CRows, Span, address, c_rows, numbers, product_factors, reads, sizes, strides
from openmsa.runtime import c_library

SOURCE = Path(__file__).with_suffix(".c")
CALL_ROWS = 1024  # (query, head) rows of a piece, which stay in an L2 cache
MOST_ROWS = 16  # few rows are so many at most: MOST_FEW_ROWS of the C file
PIECES_A_THREAD = 8  # so many pieces a thread at least where there are blocks enough; a busy core makes fewer of them
LEAST_BLOCKS = 8  # many rows: so many blocks a piece, for which the rows are prepared


class _Call(ctypes.Structure):
    """This is `Call` of cpu_products.c."""

    _fields_ = (
        *sizes("q", "q_token", "q_head", "q_type", "scales"),
        ("keys", CRows),
        *sizes("queries", "group", "dim", "block_size", "k_len", "position", "blocks", "parts"),
        *sizes("scores", "score_head", "score_token"),
    )


def score(index_q: Tensor | Stored, spans: list[Span], block_size: int, scores: Tensor, few: bool) -> None:
    """Writes the scores ``[index_heads, total_q, blocks]`` of the queries of the spans, as `task` says."""
    if any(span.first < span.stop for span in spans):
        c_library.run(task(index_q, spans, block_size, scores, few))


def score_few(q: Tensor, keys: Rows, end: int, block_size: int) -> Tensor | None:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, all of which the rows q ``[heads, rows, dim]`` of
    float32 see; or None where PyTorch's operations serve, as the kernel does not read the keys."""
    heads, rows, dim = q.shape
    if rows > MOST_ROWS or q.dtype != torch.float32 or not reads(SOURCE, q, keys.rows):
        return None
    scores = torch.empty(heads, rows, -(-end // block_size), dtype=torch.float32, device="cpu")
    one, span = q.reshape(1, heads * rows, dim), Span(0, 1, end - 1, keys, end)
    c_library.run(task(one, [span], block_size, scores.view(heads * rows, 1, -1), few=True))
    return scores


def task(index_q: Tensor | Stored, spans: list[Span], block_size: int, scores: Tensor, few: bool) -> c_library.Task:
    """Returns the task that writes the scores ``[index_heads, total_q, blocks]`` of the queries of the spans, not none, of
    index_q ``[total_q, index_heads, index_dim]``, where they see a block. The spans read one cache, and `reads` is true. few: a
    head of keys serves at most `MOST_ROWS` rows of a span, queries times heads. Keys are then read where they lie, and scores
    have the same bits as if each query came alone."""
    q, keys = numbers(index_q), spans[0].keys.rows
    assert q is not None
    key_heads, scales = keys.shape[1], product_factors(index_q, keys, 1.0)
    size = MOST_ROWS if few else max(1, CALL_ROWS * key_heads // q.shape[1])
    held: list[Any] = []
    calls = [
        _call(q, span.part(first, min(first + size, span.stop)), block_size, scales, scores, held)
        for span in spans
        for first in range(span.first, span.stop, size)
    ]
    most = max(call.blocks for call in calls) // (1 if few else LEAST_BLOCKS)
    parts = max(1, min(most, PIECES_A_THREAD * torch.get_num_threads() // (len(calls) * key_heads)))
    for call in calls:
        call.parts = parts
    name = "score_few" if few else "score"
    return _task(name, calls[::-1], key_heads * parts, held)  # The last queries, which see the most, begin.


def _call(q: Tensor, span: Span, block_size: int, scales: Tensor, scores: Tensor, held: list[Any]) -> _Call:
    """Describes a span of queries. held: gets what the addresses belong to."""
    keys, pages = c_rows(span.keys)
    held += [pages, q, scales]
    q_token, q_head = strides(q)
    queries = span.stop - span.first
    return _Call(
        q=address(q, span.first, 0),
        q_token=q_token,
        q_head=q_head,
        q_type=TYPES[q.dtype],
        scales=scales.data_ptr(),
        keys=keys,
        queries=queries,
        group=q.shape[1] // span.keys.rows.shape[1],
        dim=q.shape[2],
        block_size=block_size,
        k_len=span.k_len,
        position=span.position,
        blocks=-(-min(span.k_len, span.position + queries) // block_size),
        parts=1,
        scores=scores.data_ptr() + span.first * scores.stride(1) * scores.element_size(),
        score_head=scores.stride(0),
        score_token=scores.stride(1),
    )


def _task(name: str, calls: list[_Call], pieces: int, held: list[Any]) -> c_library.Task:
    functions = c_library.library(SOURCE).functions
    assert functions is not None
    products = sum(call.queries * call.blocks for call in calls) * calls[0].block_size * calls[0].dim * calls[0].group
    return c_library.Task(functions, name, calls, pieces, c_library.threads_for(products), held)
