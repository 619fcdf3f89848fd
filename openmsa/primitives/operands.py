# SPDX-License-Identifier: MIT
"""Operands of kernels are a tuple each: a launch passes tensors with their strides, and the kernel reads the fields by name.

A field that holds None or the integer 1 is a constant of the compiled kernel, and an integer that is a multiple of 16 is
compiled as one. A number that differs from call to call, such as a length, is therefore never a field: it is a parameter of its
own that the kernel does not specialise on. A TMA descriptor is a parameter of its own too, since Triton expands it only there.
Strides count elements of their tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class KeyRows(NamedTuple):
    """These are rows of keys or of values, packed or in pages. Packed rows are the only page, whose rows are counted over all
    sequences.

    data:    the rows, or the codes of their format.
    scales:  what the format keeps beside the codes: codes of the scales of groups, or scales of keys; None where it keeps none.
             Where they lie in the 128x4 layout, their strides count rows of scales.
    factor:  float32, what multiplies whole rows in the end: of the tensor, of each head, or of each page; None where it is 1.
    """

    data: Any
    s_page: int
    s_head: int
    s_row: int
    s_dim: int
    scales: Tensor | None = None
    s_scales_page: int = 0
    s_scales_head: int = 0
    s_scales_row: int = 0
    s_scales_group: int = 0
    factor: Tensor | None = None
    s_factor_page: int = 0
    s_factor_head: int = 0


class QueryRows(NamedTuple):
    """These are packed rows of queries ``[total_q, heads, dim]``, plain or e4m3 codes, and the float32 factor of the tensor or
    of each head, None where it is 1."""

    data: Tensor
    s_token: int
    s_head: int
    s_dim: int
    factor: Tensor | None = None
    s_factor_head: int = 0


class PageTable(NamedTuple):
    """A page table holds int32 ids of the pages of each sequence ``[batch, pages]``; ids is None where keys are packed."""

    ids: Tensor | None
    s_sequence: int = 0
    s_page: int = 0


class Bounds(NamedTuple):
    """These int32 tensors say where the rows of each sequence start and how many there are.

    cu_q:      [batch + 1], first queries; None where every sequence has equally many.
    cu_k:      [batch + 1], first keys; None where seq_lens holds the numbers of keys.
    seq_lens:  [batch], numbers of keys; None where cu_k says them.
    q_offset:  [batch], positions of the first queries; None where queries are the last positions of their keys.
    """

    cu_q: Any
    cu_k: Tensor | None
    seq_lens: Tensor | None
    q_offset: Tensor | None


class Output(NamedTuple):
    """Attention writes these: rows ``[total_q, heads, dim]`` and their natural-log sums of exponentials ``[total_q, heads]`` in
    float32; either is None where it is not needed."""

    rows: Tensor | None
    s_token: int
    s_head: int
    s_dim: int
    lse: Tensor | None = None
    s_lse_token: int = 0
    s_lse_head: int = 0


class Scores(NamedTuple):
    """Scoring writes these: float32 maxima ``[index_heads, total_q, blocks]``, None where they are not needed, and int32
    ``[total_q]``, how many blocks each query sees; visible is None where scores of blocks that a query does not see are written
    as -inf instead."""

    maxima: Any
    s_head: int
    s_token: int
    s_block: int
    visible: Tensor | None = None


class Selection(NamedTuple):
    """A selection holds int32 ids of the blocks that each query reads, ``[total_q, key heads, topk]``; -1 and ids past the
    visible blocks are skipped. s_head is 0 where all heads share one selection."""

    ids: Tensor
    s_token: int
    s_head: int
    s_slot: int


PLAIN, E4M3, INT8, NVFP4, MXFP4 = 0, 1, 2, 3, 4
NO_FACTOR, WHOLE_FACTOR, PAGE_FACTOR = 0, 1, 2
