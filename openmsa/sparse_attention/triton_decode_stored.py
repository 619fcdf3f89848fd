# SPDX-License-Identifier: MIT
# ruff: noqa: RET505, RUF005 (kernels return from branches on constants and know no unpacking)
"""Decode attention over keys and values in E4M3 or NVFP4, read as they are stored.

Rows are read as 16-bit words of PARTS = 2 (e4m3) or 4 (NVFP4) neighbouring elements. Element p of every word is taken out in
registers, where the words already lie as the matrix instruction wants them, so that bytes pass shared memory once and as bytes;
part p of the keys meets part p of the queries, and part p of the values gives part p of the outputs. Every conversion is exact
in float16: queries are scaled by a power of two a row, NVFP4 elements are multiplied by their group's scale. All other scales
are factors of a tile, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from openmsa.kv_cache import E4M3, NVFP4, PagedKV, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.kv_cache.triton_numbers import FORMAT_IDS, e4m3
from openmsa.primitives.codes import e2m1_parts
from openmsa.runtime.integers import next_power_of_two
from openmsa.sparse_attention.triton_decode_apart import in_order, joined, key_columns, per_walk, tile_keys
from openmsa.sparse_attention.triton_decode_tiles import pick

GROUP = 16  # elements of one NVFP4 scale

# Both bytes of each half of a word: the low ones, then the high ones.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b32 t; .reg .b16 a, b;
prmt.b32 t, $2, $2, 0x2020; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;
prmt.b32 t, $2, $2, 0x3131; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $1, a; }""")


@dataclass(frozen=True)
class Source:
    """Where a kernel finds one of keys and values. words: int16 pool [pages, heads, rows, words]; plain rows stand as they are.
    factor: float32 scale of a tensor, head or page. groups: scales of groups, bytes or, where their number and their strides
    allow it, four of them an int32; their strides in items, or in rows (128x4)."""

    words: Tensor
    factor: Tensor | None = None
    factor_strides: tuple[int, int] = (0, 0)
    groups: Tensor | None = None
    group_strides: tuple[int, int, int, int] = (0, 0, 0, 0)

    @classmethod
    def of(cls, rows: Tensor | Stored, paged: bool) -> Source:
        """rows: a pool, or packed keys [total_k, heads, dim], which become one page."""

        def pool(x: Tensor) -> Tensor:
            return x if paged else x.transpose(0, 1)[None]

        if isinstance(rows, E4M3):
            page, head = rows.scale_strides
            return cls(pool(_words(rows.data)), rows.scale, (page, head))
        if isinstance(rows, NVFP4):
            scale = in_items(rows.scale.view(torch.uint8), torch.int32, rows.groups % 4 == 0)
            heads, size = rows.shape[1], rows.shape[-2]
            if rows.layout == "linear":
                strides = pool(scale).stride()
            else:
                strides = (heads * size, size, 1, 0) if paged else (0, 1, heads, 0)
            return cls(pool(_words(rows.data)), rows.global_scale, (0, 0), scale, tuple(strides))  # type: ignore[arg-type]
        assert isinstance(rows, Tensor)
        return cls(pool(rows))


def _words(data: Tensor) -> Tensor:
    return data.view(torch.uint8).view(torch.int16)


def refuse(rows: Tensor | Stored | PagedKV) -> str | None:
    """Why keys or values in this format cannot be read as words, or None."""
    for part in (rows.k, rows.v) if isinstance(rows, PagedKV) else (rows,):
        if not isinstance(part, Stored):
            continue
        data = part.data
        even = data.stride(-1) == 1 and all(s % 2 == 0 for s in data.stride()[:-1]) and data.storage_offset() % 2 == 0
        if not even or part.shape[-1] % 4:
            return f"it reads {part.format} rows of contiguous bytes at even addresses, got strides {tuple(data.stride())}"
    return None


def format_id(rows: Tensor | Stored | PagedKV) -> int:
    """The constexpr FORMAT."""
    part = rows.k if isinstance(rows, PagedKV) else rows
    return FORMAT_IDS[getattr(part, "format", "plain")]


def swizzled(rows: Tensor | Stored | PagedKV) -> bool:
    """Whether group scales lie in 128x4 tiles."""
    return getattr(rows.k if isinstance(rows, PagedKV) else rows, "layout", "linear") == "128x4"


def padded_dim(head_dim: int, form: int) -> int:
    """The constexpr BD: a matrix instruction takes 16 words or more."""
    return max(next_power_of_two(head_dim), {0: 16, 1: 32, 3: 64}[form])


@triton.jit
def parts_of(words, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """The elements of each int16 word as float16, the lowest first, a tuple: two of e4m3, four of e2m1 times 2**-14. NATIVE: by
    instructions on pairs."""
    if FORMAT == 3:
        return e2m1_parts(words, tl.float16)
    elif NATIVE:
        FP16: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [words], dtype=FP16, is_pure=True, pack=2)
    else:
        return e4m3(words & 0xFF), e4m3((words >> 8) & 0xFF)


@triton.jit
def load_parts(p_q, m_r, stride_qd, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Every PARTS-th element of the rows at p_q, from element 0, 1 .. on: PARTS x [rows, BD // PARTS], as they are stored."""
    parts = ()
    for p in tl.static_range(PARTS):
        o_d = tl.arange(0, BD // PARTS) * PARTS + p
        parts = parts + (tl.load(p_q[:, None] + (o_d * stride_qd)[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0),)
    return parts


@triton.jit
def query_parts(parts, WALKS: tl.constexpr):
    """Parts of the rows as float16 for each walk, each row times a power of two, and the inverses [rows]."""
    numbers, halves = (), ()
    b_most = tl.zeros(parts[0].shape, tl.float32)
    for p in tl.static_range(len(parts)):
        b_q = e4m3(parts[p]) if parts[p].dtype == tl.uint8 else parts[p].to(tl.float32)
        numbers = numbers + (b_q,)
        b_most = tl.maximum(b_most, tl.abs(b_q))
    b_most = tl.max(b_most, 1)
    b_power = (b_most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_power = tl.where(b_power < 7.888609052210118e-31, 7.888609052210118e-31, b_power)  # 2**-100; infinity stays
    for p in tl.static_range(len(parts)):
        halves = halves + (per_walk((numbers[p] * (1024.0 / b_power)[:, None]).to(tl.float16), WALKS),)
    return halves, b_power * 0.0009765625


@triton.jit
def load_groups(
    scales, i_page, i_h, o_row, m_n, s_p, s_h, s_n, s_g,
    D: tl.constexpr, BD: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """float16 scales of the words of rows o_row, [rows, BD // 4]. scales: bytes or int32 of four, which lets four be copied at
    a time. They are read as bytes, so that every thread finds those of its own words and none are exchanged."""
    COLS: tl.constexpr = BD // 16
    PACK: tl.constexpr = 4 if scales.dtype.element_ty == tl.int32 else 1
    o_g = tl.arange(0, COLS)
    o_s = tl.expand_dims(i_page * s_p + i_h.to(tl.int64) * s_h + o_row.to(tl.int64) * s_n, -1)
    if SWIZZLED:
        i_tile = (o_s // 128) * ((D // 16 + 3) // 4) + o_g // 4
        o_s = i_tile * 512 + (o_s % 32) * 16 + (o_s % 128 // 32) * 4 + o_g % 4
    elif PACK == 4:
        o_s = o_s * 4 + (o_g // 4 * s_g * 4 + o_g % 4)
    else:
        o_s = o_s + o_g * s_g
    p_s = scales.to(tl.pointer_type(tl.uint8)) + o_s
    codes = tl.load(p_s, mask=tl.expand_dims(m_n, -1) & (o_g < D // 16), other=0)
    b_g = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if NATIVE else e4m3(codes)
    return tl.reshape(tl.broadcast_to(tl.expand_dims(b_g, -1), o_row.shape + (COLS, 4)), o_row.shape + (BD // 4,))


@triton.jit
def factors(factor, i_page, i_h, m_u, s_p, s_h):
    """float32 factors of the head in pages i_page, int64; 1 where there are none."""
    if factor is None:
        return 1.0
    else:
        return tl.load(factor + i_page * s_p + i_h * s_h, mask=m_u, other=1.0)


@triton.jit
def walk_stored(
    b_qs, b_row, k, v, k_f, v_f, k_groups, v_groups, b_first, b_home, i_h, tiles, i_k0, n_k, scale,
    stride_kp, stride_kh, stride_kn, stride_vp, stride_vh, stride_vn,
    s_kgp, s_kgh, s_kgn, s_kgg, s_vgp, s_vgh, s_vgn, s_vgg,
    D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr, BY_PAGE: tl.constexpr,
    WALKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """As `triton_decode_tiles.walk`, of query parts b_qs with row factors b_row. b_home: pages inside the pool, of all tiles.
    k_f, v_f: factors of the tiles (BY_PAGE), or those of all. WALKS: 1, or warps that walk each its keys of every tile; a
    leading dimension counts them until they are joined. TOGETHER: tiles that share a greatest logit: sums are rescaled once
    for them, and what one tile waits for the others fill."""
    PARTS: tl.constexpr = 2 if FORMAT == 1 else 4
    FOLD: tl.constexpr = 1.0 if FORMAT == 1 else 16384.0
    W: tl.constexpr = BD // PARTS
    FOURS: tl.constexpr = FORMAT == 3 and WALKS > 1
    o_n, o_nk = tile_keys(BN, WALKS), key_columns(BN, WALKS, FOURS)
    o_w = tl.arange(0, W)
    m_w = o_w < D // PARTS
    b_row *= FOLD * 1.4426950408889634 * scale
    if not BY_PAGE:
        b_row *= k_f
    k += i_h.to(tl.int64) * stride_kh
    v += i_h.to(tl.int64) * stride_vh
    b_m = per_walk(tl.full([BM], -float("inf"), tl.float32), WALKS)
    # Sums of weights: where warps walk apart, those of every column until the end, so that threads need not meet.
    b_z = per_walk(tl.zeros([BM, BN // WALKS if WALKS > 1 else 1], tl.float32), WALKS)
    accs = ()
    for _ in tl.static_range(PARTS):
        accs = accs + (per_walk(tl.zeros([BM, W], tl.float32), WALKS),)
    for u_0 in tl.range(0, tiles, TOGETHER, num_stages=STAGES):
        logits, values, value_groups = (), (), ()
        b_m_new = b_m
        for i in tl.static_range(TOGETHER):
            u = u_0 + i
            i_first, i_page = pick(b_first, u), pick(b_home, u).to(tl.int64)
            m_n, m_nk = i_first + o_n < n_k, i_first + o_nk < n_k
            m_k = (i_first < n_k) & (o_nk >= 0) if PAGE else m_nk  # of a page all rows exist
            i_row = i_first % PAGE if PAGE else i_k0 + i_first
            p_k = k + (i_page * stride_kp + i_row.to(tl.int64) * stride_kn)  # offsets in a tile are 32 bits wide
            p_v = v + (i_page * stride_vp + i_row.to(tl.int64) * stride_vn)
            m_kw, m_vw = tl.expand_dims(m_k, -1) & m_w, tl.expand_dims(m_n, -1) & m_w
            b_k = tl.load(p_k + (tl.expand_dims(o_nk * stride_kn, -1) + o_w), mask=m_kw, other=0)  # [BN, W] int16
            values = values + (tl.load(p_v + (tl.expand_dims(o_n * stride_vn, -1) + o_w), mask=m_vw, other=0),)
            if FORMAT == 3:
                b_kg = load_groups(
                    k_groups, i_page, i_h, i_row + o_nk, m_k, s_kgp, s_kgh, s_kgn, s_kgg, D, BD, SWIZZLED, NATIVE
                )
                b_vg = load_groups(v_groups, i_page, i_h, i_row + o_n, m_n, s_vgp, s_vgh, s_vgn, s_vgg, D, BD, SWIZZLED, NATIVE)
                value_groups = value_groups + (b_vg,)
            b_s = per_walk(tl.zeros([BM, BN // WALKS], tl.float32), WALKS)
            k_parts = parts_of(b_k, FORMAT, NATIVE)
            for p in tl.static_range(PARTS):
                b_kp = k_parts[p]
                if FORMAT == 3:
                    b_kp = b_kp * b_kg
                b_s = tl.dot(b_qs[p], tl.trans(b_kp), b_s)
            b_s *= (b_row * pick(k_f, u) if BY_PAGE else b_row)[:, None]
            b_s = tl.where(tl.expand_dims(m_nk, -2), b_s, -float("inf"))
            b_m_new = tl.maximum(b_m_new, tl.max(b_s, -1))
            logits = logits + (b_s,)
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_old = tl.expand_dims(tl.exp2(b_m - b_safe), -1)
        b_m = b_m_new
        b_z *= b_old
        sums = ()
        for p in tl.static_range(PARTS):
            sums = sums + (accs[p] * b_old,)
        for i in tl.static_range(TOGETHER):
            b_p = tl.exp2(logits[i] - tl.expand_dims(b_safe, -1))
            b_z += b_p if WALKS > 1 else tl.sum(b_p, -1, keep_dims=True)
            b_p = in_order(b_p.to(tl.float16), FOURS)
            v_parts = parts_of(values[i], FORMAT, NATIVE)
            accs, sums = sums, ()
            for p in tl.static_range(PARTS):
                b_vp = v_parts[p]
                if FORMAT == 3:
                    b_vp = b_vp * value_groups[i]
                if BY_PAGE:
                    sums = sums + (accs[p] + tl.dot(b_p, b_vp) * pick(v_f, u_0 + i),)
                else:
                    sums = sums + (tl.dot(b_p, b_vp, accs[p]),)
        accs = sums
    b_z = tl.sum(b_z, -1)
    pairs = accs if PARTS == 2 else (tl.join(accs[0], accs[2]), tl.join(accs[1], accs[3]))
    b_acc = tl.join(pairs[0], pairs[1]) * (FOLD if BY_PAGE else v_f * FOLD)
    if WALKS == 1:
        return tl.reshape(b_acc, [BM, BD]), b_m, b_z
    else:
        return joined(tl.reshape(b_acc, [WALKS, BM, BD]), b_m, b_z)
