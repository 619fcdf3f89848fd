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
PIECES_A_THREAD = 8  # few rows: so many pieces a thread, of which a busy core makes fewer


class _Call(ctypes.Structure):
    """This is `Call` of cpu_products.c."""

    _fields_ = (
        *sizes("q", "q_token", "q_head", "q_type", "scales"),
        ("keys", CRows),
        *sizes("queries", "group", "dim", "block_size", "k_len", "position", "blocks", "parts"),
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
    key_heads = keys.shape[1]
    scales = product_factors(index_q, keys, 1.0)
    size = max(1, CALL_ROWS * key_heads // q.shape[1])
    held: list[Any] = []
    calls = []
    for span in spans:
        for first in range(span.first, span.stop, size):
            part = span.part(first, min(first + size, span.stop))
            calls.append(_call(q, part, block_size, scales, scores, held))
    if calls:  # The last queries see the most: their calls begin first.
        c_library.run(_task("score", calls[::-1], key_heads, held))


def score_few(q: Tensor, keys: Rows, end: int, block_size: int) -> Tensor | None:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, all of which the rows q ``[heads, rows, dim]`` of
    float32 see; or None where PyTorch's operations serve, as the kernel does not read the keys."""
    heads, rows, dim = q.shape
    if rows > MOST_ROWS or q.dtype != torch.float32 or not reads(SOURCE, q, keys.rows):
        return None
    scores = torch.empty(heads, rows, -(-end // block_size), dtype=torch.float32, device="cpu")
    task = few_task(q.reshape(1, heads * rows, dim), keys, end, block_size, scores.view(heads * rows, 1, -1))
    c_library.run(task)
    return scores


def few_task(q: Tensor, keys: Rows, end: int, block_size: int, scores: Tensor) -> c_library.Task:
    """Returns the task that writes the scores ``[index_heads, 1, blocks]`` of the first `end` keys, all of which the query
    ``[1, index_heads, dim]`` sees; a head of keys serves at most `MOST_ROWS` heads."""
    key_heads = keys.rows.shape[1]
    scales = product_factors(q, keys.rows, 1.0)
    held: list[Any] = []
    call = _call(q, Span(0, 1, end - 1, keys, end), block_size, scales, scores, held)
    call.parts = max(1, min(call.blocks, PIECES_A_THREAD * torch.get_num_threads() // key_heads))
    return _task("score_few", [call], key_heads * call.parts, held)


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
