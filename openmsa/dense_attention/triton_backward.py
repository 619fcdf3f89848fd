# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""This module computes the gradients of `dense_attention` in Triton with two kernels: in one a program holds a tile of keys and
walks the rows that see them, in the other it holds a tile of rows and walks the keys that they see.

A row is a (query token, head of the group) pair, tokens outermost. Every sum is taken in a fixed order, without atomics:
results repeat bit for bit. Rows of K and V up to the last key that some query of the sequence sees must be finite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.primitives.gradients import RowTerms, weights_and_slopes
from openmsa.primitives.operands import Bounds
from openmsa.primitives.rows import key_rows, query_rows
from openmsa.runtime.devices import Device, facts
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.types import Layout


@dataclass(frozen=True)
class Tile:
    """Says how one of the kernels is cut: keys and rows of a tile, warps of a program, tiles whose loads are on their way."""

    keys: int
    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class BackwardConfig:
    """Says how the gradients of one call are tiled: those of keys and values, and those of queries."""

    of_keys: Tile
    of_rows: Tile


@functools.lru_cache(256)
def backward_config(head_dim: int, element_bytes: int, device: Device) -> BackwardConfig:
    """Chooses the tiles of a call; it is a pure function."""
    wide, roomy = head_dim > 128, device.shared_bytes > 128 * 1024
    if element_bytes == 4:  # Products of float32 numbers are made without the matrix unit.
        return BackwardConfig(Tile(32, 16, 8, 1), Tile(16, 32, 8, 1))
    if device.arch == 90:
        if wide:
            return BackwardConfig(Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))
        return BackwardConfig(Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    if wide:
        return BackwardConfig(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1))
    return BackwardConfig(Tile(64, 64 if roomy else 32, 8, 2), Tile(64 if roomy else 32, 64, 8, 2))


class Shape(NamedTuple):
    """Says how rows and keys are cut; it is a constant of the kernels.

    group:      query heads of a key head.
    keys, rows: keys and rows of a tile.
    dim:        elements of a head; dim_pad: of a tile's row.
    causal:     whether a query sees only keys at or before its position.
    precision:  of products, as Triton names it.
    """

    group: int
    keys: int
    rows: int
    dim: int
    dim_pad: int
    causal: bool
    precision: str


class Gradients(NamedTuple):
    """The kernels write these, contiguous and of the shapes of q, k and v."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


def dense_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    out: Tensor,
    lse: Tensor,
    max_score: None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, summed in float32.

    The first arguments are those of the call, out and lse its results, grad_out and grad_lse their gradients (None: lse was not
    used). What to return says nothing here, nor do `block_size` and `max_score`.

    config: tiles; None: those of `backward_config`.
    """
    if not q.numel() or not k.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if config is None:
        config = backward_config(q.shape[2], q.element_size(), facts(q.device))
    results = Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
    grad_out = grad_out if grad_out.stride(2) == 1 else grad_out.contiguous()
    terms, group, kv_heads = RowTerms.of(out, lse, grad_out, grad_lse), q.shape[1] // k.shape[1], k.shape[1]
    for kernel, tile, tiles in (
        (key_gradients, config.of_keys, ceil_div(seqs.max_seqlen_k, config.of_keys.keys)),
        (row_gradients, config.of_rows, ceil_div(seqs.max_seqlen_q * group, config.of_rows.rows)),
    ):
        launch_kernel(
            kernel,
            (seqs.batch * tiles, kv_heads),
            query_rows(q, True),
            query_rows(grad_out, True),
            terms,
            key_rows(k),
            key_rows(v),
            Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset),
            results,
            softmax_scale,
            kv_heads,
            tiles,
            SHAPE=_shape(tile, group, q, causal),
            STAGES=tile.stages,
            num_warps=tile.warps,
        )
    return results.dq, results.dk, results.dv


def _shape(tile: Tile, group: int, q: Tensor, causal: bool) -> Shape:
    dim_pad, precision = max(16, next_power_of_two(q.shape[2])), "ieee" if q.dtype == torch.float32 else "tf32"
    return Shape(group, tile.keys, tile.rows, q.shape[2], dim_pad, causal, precision)


class Lengths(NamedTuple):
    """Holds, inside a kernel, the first query and key of a sequence, how many it has, and the position of its first query."""

    i_q0: tl.tensor
    i_k0: tl.tensor
    n_q: tl.tensor
    n_k: tl.tensor
    position: tl.tensor


@triton.jit
def sequence_lengths(bounds, i_b):
    """Loads the `Lengths` of a sequence."""
    i_q0, i_k0 = tl.load(bounds.cu_q + i_b), tl.load(bounds.cu_k + i_b)
    n_q, n_k = tl.load(bounds.cu_q + i_b + 1) - i_q0, tl.load(bounds.cu_k + i_b + 1) - i_k0
    position = n_k - n_q if bounds.q_offset is None else tl.load(bounds.q_offset + i_b)
    return Lengths(i_q0, i_k0, n_q, n_k, position)


@triton.jit
def load_keys(rows, i_h, i_row, m, DIM_PAD: tl.constexpr):
    """Loads rows of keys or values of a head, [keys, DIM_PAD]; m: those that exist, with their elements."""
    o_d = tl.arange(0, DIM_PAD)
    p = rows.data + i_h.to(tl.int64) * rows.s_head + i_row.to(tl.int64)[:, None] * rows.s_row + o_d[None, :] * rows.s_dim
    return tl.load(p, mask=m, other=0.0)


@triton.jit
def load_rows(rows, token, head, m, DIM_PAD: tl.constexpr):
    """Loads rows of queries, or of gradients of the output, [rows, DIM_PAD]; m: those that exist, with their elements."""
    o_d = tl.arange(0, DIM_PAD)
    p = rows.data + (token.to(tl.int64) * rows.s_token + head * rows.s_head)[:, None] + o_d[None, :] * rows.s_dim
    return tl.load(p, mask=m, other=0.0)


@triton.jit(do_not_specialize=["tiles"])
def key_gradients(
    queries, grad_out, terms, keys, values, bounds, results, softmax_scale, num_kv_heads, tiles,
    SHAPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of a tile of keys. The grid is (sequences * tiles of keys, KV heads).

    queries, grad_out: QueryRows. terms: RowTerms. keys, values: KeyRows. results: Gradients.
    """
    # 1. The program finds its keys; those that the most rows see come first.
    GROUP: tl.constexpr = SHAPE.group
    KEYS: tl.constexpr = SHAPE.keys
    ROWS: tl.constexpr = SHAPE.rows
    DIM: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    PRECISION: tl.constexpr = SHAPE.precision
    i_b, i_h = tl.program_id(0) // tiles, tl.program_id(1)
    i_first = tl.program_id(0) % tiles * KEYS
    at = sequence_lengths(bounds, i_b)
    if i_first >= at.n_k:
        return
    o_n, o_d, o_r = i_first + tl.arange(0, KEYS), tl.arange(0, DIM_PAD), tl.arange(0, ROWS)
    m_d = o_d < DIM
    m_kd = (o_n < at.n_k)[:, None] & m_d[None, :]
    b_k = load_keys(keys, i_h, at.i_k0 + o_n, m_kd, DIM_PAD)
    b_v = load_keys(values, i_h, at.i_k0 + o_n, m_kd, DIM_PAD)

    # 2. It walks the rows that see some of them.
    i_lo = 0
    if SHAPE.causal:
        i_lo = tl.maximum(i_first - at.position, 0) * GROUP // ROWS * ROWS
    b_dk = tl.zeros([KEYS, DIM_PAD], tl.float32)
    b_dv = tl.zeros([KEYS, DIM_PAD], tl.float32)
    scale = softmax_scale * 1.4426950408889634
    for i in tl.range(i_lo, at.n_q * GROUP, ROWS, num_stages=STAGES):
        o_t = (i + o_r) // GROUP
        head = i_h * GROUP + (i + o_r) % GROUP
        m_r = o_t < at.n_q
        m_rd = m_r[:, None] & m_d[None, :]
        b_q = load_rows(queries, at.i_q0 + o_t, head, m_rd, DIM_PAD)
        b_g = load_rows(grad_out, at.i_q0 + o_t, head, m_rd, DIM_PAD)
        o_term = (at.i_q0 + o_t).to(tl.int64) * (num_kv_heads * GROUP) + head
        b_lse = tl.load(terms.lse + o_term, mask=m_r, other=float("inf"))
        b_delta = tl.load(terms.delta + o_term, mask=m_r, other=0.0)
        last_key = tl.zeros([ROWS], tl.int32) + (at.n_k - 1)
        if SHAPE.causal:
            last_key = tl.minimum(last_key, at.position + o_t)
        b_p, b_ds = weights_and_slopes(
            b_k, b_q, b_v, b_g, b_lse[None, :], b_delta[None, :], o_n[:, None] <= last_key[None, :], scale, PRECISION
        )  # [KEYS, ROWS]
        b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)

    # 3. It stores them.
    o_out = ((at.i_k0 + o_n).to(tl.int64) * num_kv_heads + i_h)[:, None] * DIM + o_d[None, :]
    tl.store(results.dk + o_out, (b_dk * softmax_scale).to(results.dk.dtype.element_ty), mask=m_kd)
    tl.store(results.dv + o_out, b_dv.to(results.dv.dtype.element_ty), mask=m_kd)


@triton.jit(do_not_specialize=["tiles"])
def row_gradients(
    queries, grad_out, terms, keys, values, bounds, results, softmax_scale, num_kv_heads, tiles,
    SHAPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes dq of a tile of rows. The grid is (sequences * tiles of rows, KV heads); arguments as in `key_gradients`."""
    # 1. The program finds its rows; those that see the most keys come first.
    GROUP: tl.constexpr = SHAPE.group
    KEYS: tl.constexpr = SHAPE.keys
    ROWS: tl.constexpr = SHAPE.rows
    DIM: tl.constexpr = SHAPE.dim
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    PRECISION: tl.constexpr = SHAPE.precision
    i_b, i_h = tl.program_id(0) // tiles, tl.program_id(1)
    at = sequence_lengths(bounds, i_b)
    i_tile = tl.cdiv(at.n_q * GROUP, ROWS) - 1 - tl.program_id(0) % tiles
    if i_tile < 0:
        return
    o_d, o_r, o_n = tl.arange(0, DIM_PAD), i_tile * ROWS + tl.arange(0, ROWS), tl.arange(0, KEYS)
    o_t = o_r // GROUP
    head = i_h * GROUP + o_r % GROUP
    m_r, m_d = o_t < at.n_q, o_d < DIM
    m_rd = m_r[:, None] & m_d[None, :]
    b_q = load_rows(queries, at.i_q0 + o_t, head, m_rd, DIM_PAD)
    b_g = load_rows(grad_out, at.i_q0 + o_t, head, m_rd, DIM_PAD)
    o_term = (at.i_q0 + o_t).to(tl.int64) * (num_kv_heads * GROUP) + head
    b_lse = tl.load(terms.lse + o_term, mask=m_r, other=float("inf"))
    b_delta = tl.load(terms.delta + o_term, mask=m_r, other=0.0)

    # 2. It walks the keys that they see.
    n_any = at.n_k
    last_key = tl.zeros([ROWS], tl.int32) + (at.n_k - 1)
    if SHAPE.causal:
        last_key = tl.minimum(last_key, at.position + o_t)
        n_any = tl.minimum(n_any, at.position + tl.minimum((i_tile * ROWS + ROWS - 1) // GROUP, at.n_q - 1) + 1)
    b_dq = tl.zeros([ROWS, DIM_PAD], tl.float32)
    scale = softmax_scale * 1.4426950408889634
    for i in tl.range(0, n_any, KEYS, num_stages=STAGES):
        m_kd = (i + o_n < at.n_k)[:, None] & m_d[None, :]
        b_k = load_keys(keys, i_h, at.i_k0 + i + o_n, m_kd, DIM_PAD)
        b_v = load_keys(values, i_h, at.i_k0 + i + o_n, m_kd, DIM_PAD)
        m_seen = (i + o_n)[None, :] <= last_key[:, None]
        _, b_ds = weights_and_slopes(
            b_q, b_k, b_g, b_v, b_lse[:, None], b_delta[:, None], m_seen, scale, PRECISION
        )  # [ROWS, KEYS]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)

    # 3. It stores dq.
    p_dq = results.dq + (o_term * DIM)[:, None] + o_d[None, :]
    tl.store(p_dq, (b_dq * softmax_scale).to(results.dq.dtype.element_ty), mask=m_rd)
