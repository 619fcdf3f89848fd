# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""One launch prepares a step's new tokens in an engine's sparse layer, from their projection to what its plan reads: queries
and keys are normalised and rotated, and keys and values are stored in the layer's caches.

It ends where a plan begins, so it lets the plan's first kernel start at once: that kernel finds its work and sends for index
keys meanwhile, and waits before it reads what is prepared here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.integrations.sizes import LayerSizes
from openmsa.kv_cache.triton_numbers import e4m3_code
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div, launch_kernel


class Norms(NamedTuple):
    """Holds the weights ``[dim]`` of a layer's norms, to which the norm adds 1: of queries, keys, index queries, index keys."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor


class Places(NamedTuple):
    """Says where new tokens stand, one after the other.

    positions:    int64 ``[tokens]``, of each in its sequence. angles: ``[positions, rotary_dim]``, cosines of a position's
                  angles and then their sines.
    slots:        int64 ``[placed]``, ``page * page_size + row`` in the main cache; negative where nothing is stored, as of
                  tokens behind them.
    index_slots:  the same in the index cache.
    """

    positions: Tensor
    angles: Tensor
    slots: Tensor
    index_slots: Tensor


class Caches(NamedTuple):
    """Holds a layer's caches as their rows' numbers, or as bytes of E4M3: keys and values
    ``[num_pages, heads, page_size, 2 * dim]``, and index keys ``[num_pages, page_size, dim]``."""

    kv: Tensor
    index_k: Tensor


class KernelCaches(NamedTuple):
    """Holds `Caches` and their strides."""

    kv: Tensor
    s_page: int
    s_head: int
    s_row: int
    index_k: Tensor
    s_index_page: int
    s_index_row: int


class Prepared(NamedTuple):
    """Receives queries ``[tokens, heads * dim]`` and index queries ``[tokens, index_heads * dim]``, each without gaps."""

    q: Tensor
    index_q: Tensor


class Layer(NamedTuple):
    """Holds the sizes that the kernel is compiled for. tokens: of a program."""

    heads: int
    kv_heads: int
    index_heads: int
    dim: int
    rotary_dim: int
    page: int
    index_page: int
    tokens: int


@triton.jit
def store_row(p_row, row, mask):
    """Stores rows ``[tokens, dim]`` as numbers, or as E4M3 codes where the addresses are of bytes."""
    if p_row.dtype.element_ty == tl.uint8:
        row = e4m3_code(row)
    tl.store(p_row, row.to(p_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tokens", "placed"])
def new_tokens_kernel(
    qkv, s_token, norms, places, caches, prepared, tokens, placed, eps, LAYER: tl.constexpr, PDL: tl.constexpr
):
    """Prepares LAYER.tokens tokens of one head, in a grid of tokens and heads: those of queries, keys, values and index
    queries, and the index keys, in the order in which a row of `qkv` has them. PDL: the next kernel may start while this one
    runs, and this one before the one in front has ended, which may write nothing that is read here but `qkv`."""
    DIM: tl.constexpr = LAYER.dim
    HALF: tl.constexpr = LAYER.rotary_dim // 2
    KEYS: tl.constexpr = LAYER.heads
    VALUES: tl.constexpr = KEYS + LAYER.kv_heads
    INDEX_QUERIES: tl.constexpr = VALUES + LAYER.kv_heads
    INDEX_KEYS: tl.constexpr = INDEX_QUERIES + LAYER.index_heads
    # 1. What no kernel in front writes is loaded: positions, angles and the weights of the norm.
    if PDL:
        gdc_launch_dependents()
    i_h = tl.program_id(1)
    o_t = tl.program_id(0) * LAYER.tokens + tl.arange(0, LAYER.tokens)
    m_t = o_t < tokens
    o_d = tl.arange(0, DIM)
    o_pair = tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))  # the other number of a plane
    p_norm, p_slot = norms.q, places.slots
    if i_h >= INDEX_KEYS:
        p_norm, p_slot = norms.index_k, places.index_slots
    elif i_h >= INDEX_QUERIES:
        p_norm = norms.index_q
    elif i_h >= KEYS:
        p_norm = norms.k
    weight, weight_pair = tl.load(p_norm + o_d).to(tl.float32), tl.load(p_norm + o_pair).to(tl.float32)
    position = tl.load(places.positions + o_t, mask=m_t, other=0).to(tl.int64)
    p_angle = places.angles + position[:, None] * (2 * HALF) + (o_d % HALF)[None, :]
    cos, sin = tl.load(p_angle).to(tl.float32), tl.load(p_angle + HALF).to(tl.float32)
    slot = tl.load(p_slot + o_t, mask=m_t & (o_t < placed), other=-1).to(tl.int64)
    m_slot = (m_t & (slot >= 0))[:, None]
    if PDL:
        gdc_wait()

    # 2. Rows are normalised and the first 2 * HALF numbers rotated; values stay.
    p_x = qkv + o_t[:, None].to(tl.int64) * s_token + i_h * DIM
    x = tl.load(p_x + o_d[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    x_pair = tl.load(p_x + o_pair[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    unit = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None]
    y, y_pair = x * unit * (1.0 + weight)[None, :], x_pair * unit * (1.0 + weight_pair)[None, :]
    turned = y * cos + tl.where(o_d < HALF, -y_pair, y_pair) * sin
    y = tl.where((o_d < 2 * HALF)[None, :], turned, y)

    # 3. They go where the plan looks for them.
    if i_h < KEYS:
        p_q = prepared.q + o_t[:, None].to(tl.int64) * (LAYER.heads * DIM) + i_h * DIM
        store_row(p_q + o_d[None, :], y, m_t[:, None])
    elif i_h < INDEX_QUERIES:
        p_kv = caches.kv + slot // LAYER.page * caches.s_page + (i_h - KEYS) % LAYER.kv_heads * caches.s_head
        p_kv += slot % LAYER.page * caches.s_row
        if i_h < VALUES:
            store_row(p_kv[:, None] + o_d[None, :], y, m_slot)
        else:
            store_row(p_kv[:, None] + DIM + o_d[None, :], x, m_slot)
    elif i_h < INDEX_KEYS:
        p_q = prepared.index_q + o_t[:, None].to(tl.int64) * (LAYER.index_heads * DIM) + (i_h - INDEX_QUERIES) * DIM
        store_row(p_q + o_d[None, :], y, m_t[:, None])
    else:
        p_key = caches.index_k + slot // LAYER.index_page * caches.s_index_page + slot % LAYER.index_page * caches.s_index_row
        store_row(p_key[:, None] + o_d[None, :], y, m_slot)


def _numbers(rows: Tensor) -> Tensor:
    """Returns rows as the kernel takes them: E4M3 as bytes."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def serves(sizes: LayerSizes, rotary_dim: int) -> bool:
    """Says whether the kernel prepares such heads: all of one size, a power of two, of which a whole number of planes turns."""
    dim = sizes.head_dim
    return sizes.index_dim == dim and dim & (dim - 1) == 0 and rotary_dim % 2 == 0 and 0 < rotary_dim <= dim


def prepare(
    qkv: Tensor, norms: Norms, eps: float, places: Places, caches: Caches, sizes: LayerSizes, index_dtype: torch.dtype
) -> Prepared:
    """Normalises, rotates and stores a step's new tokens, of a layer that the kernel `serves`, and returns their queries.

    qkv:          ``[tokens, width]``: queries, keys, values, index queries and index key of each token. Each head of queries
                  and keys is divided by the root of its mean square plus `eps`, and multiplied by 1 plus the norm's weight;
                  then number i < rotary_dim / 2 is rotated with number i + rotary_dim / 2, in float32, and rounded once.
    index_dtype:  of index queries; queries have that of `qkv`.

    E4M3 rows are stored with a scale of 1. The launch right in front may not write `norms` or `places`, which are read before
    it has ended.
    """
    tokens, (heads, index_heads, dim) = qkv.shape[0], (sizes.num_q_heads, sizes.index_heads, sizes.head_dim)
    q, index_q = qkv.new_empty(tokens, heads * dim), qkv.new_empty(tokens, index_heads * dim, dtype=index_dtype)
    if not tokens:
        return Prepared(q, index_q)
    kv, index_k = caches
    each = 1 if tokens <= 16 else 4 if tokens <= 64 else 16
    pdl = devices.has_pdl(qkv.device)
    launch_kernel(
        new_tokens_kernel,
        (ceil_div(tokens, each), heads + 2 * sizes.num_kv_heads + index_heads + 1),
        qkv,
        qkv.stride(0),
        norms,
        places,
        KernelCaches(
            _numbers(kv), kv.stride(0), kv.stride(1), kv.stride(2), _numbers(index_k), index_k.stride(0), index_k.stride(1)
        ),
        Prepared(q, _numbers(index_q)),
        tokens,
        min(places.slots.shape[0], places.index_slots.shape[0]),
        eps,
        LAYER=Layer(heads, sizes.num_kv_heads, index_heads, dim, places.angles.shape[1], kv.shape[2], index_k.shape[1], each),
        PDL=pdl,
        num_warps=min(each, 4),
        **({"launch_pdl": True} if pdl else {}),
    )
    return Prepared(q, index_q)
