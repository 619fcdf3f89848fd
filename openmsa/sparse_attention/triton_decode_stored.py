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

from openmsa.index_branch.triton_codes import e2m1_parts
from openmsa.kv_cache import E4M3, NVFP4, PagedKV, Stored
from openmsa.kv_cache.stored import in_items
from openmsa.kv_cache.triton_numbers import FORMAT_IDS, e4m3
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
    return max(triton.next_power_of_2(head_dim), {0: 16, 1: 32, 3: 64}[form])


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
def query_parts(p_q, m_r, stride_qd, D: tl.constexpr, BD: tl.constexpr, PARTS: tl.constexpr):
    """Parts of the rows as float16, PARTS x [rows, BD // PARTS], each row times a power of two, and the inverses [rows]."""
    o_w = tl.arange(0, BD // PARTS)
    parts = ()
    b_most = tl.zeros([p_q.shape[0]], tl.float32)
    for p in tl.static_range(PARTS):
        o_d = o_w * PARTS + p
        b_q = tl.load(p_q[:, None] + (o_d * stride_qd)[None, :], mask=m_r[:, None] & (o_d < D)[None, :], other=0)
        if b_q.dtype == tl.uint8:
            b_q = e4m3(b_q)
        b_q = b_q.to(tl.float32)
        parts = parts + (b_q,)
        b_most = tl.maximum(b_most, tl.max(tl.abs(b_q), 1))
    b_power = (b_most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_power = tl.where(b_power < 7.888609052210118e-31, 7.888609052210118e-31, b_power)  # 2**-100; infinity stays
    numbers = ()
    for p in tl.static_range(PARTS):
        numbers = numbers + ((parts[p] * (1024.0 / b_power)[:, None]).to(tl.float16),)
    return numbers, b_power * 0.0009765625


@triton.jit
def load_groups(
    scales, i_page, i_h, o_row, m_n, s_p, s_h, s_n, s_g,
    D: tl.constexpr, BD: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """float16 scales of the words of rows o_row, [rows, BD // 4]. scales: bytes or int32 of four."""
    ROWS: tl.constexpr = o_row.shape[0]
    COLS: tl.constexpr = BD // 16
    PACK: tl.constexpr = 4 if scales.dtype.element_ty == tl.int32 else 1
    o_g = tl.arange(0, COLS // PACK)[None, :] * PACK
    o_s = (i_page * s_p + i_h.to(tl.int64) * s_h + o_row.to(tl.int64) * s_n)[:, None]
    if SWIZZLED:
        i_tile = (o_s // 128) * ((D // 16 + 3) // 4) + o_g // 4
        o_s = (i_tile * 512 + (o_s % 32) * 16 + (o_s % 128 // 32) * 4 + o_g % 4) // PACK
    else:
        o_s = o_s + o_g // PACK * s_g
    codes = tl.load(scales + o_s, mask=m_n[:, None] & (o_g < D // 16), other=0)
    if PACK == 4:
        codes = tl.reshape(codes[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :], [ROWS, COLS]).to(tl.uint8)
    b_g = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if NATIVE else e4m3(codes)
    return tl.reshape(tl.broadcast_to(b_g[:, :, None], [ROWS, COLS, 4]), [ROWS, BD // 4])


@triton.jit
def walk_stored(
    b_qs, b_row, k, v, k_factor, v_factor, k_groups, v_groups, b_first, b_page, i_h, tiles, i_k0, n_k, scale,
    stride_kp, stride_kh, stride_kn, stride_vp, stride_vh, stride_vn, s_kfp, s_kfh, s_vfp, s_vfh,
    s_kgp, s_kgh, s_kgn, s_kgg, s_vgp, s_vgh, s_vgn, s_vgg,
    D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, SWIZZLED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """As `triton_decode_tiles.walk`, of query parts b_qs with row factors b_row."""
    PARTS: tl.constexpr = 2 if FORMAT == 1 else 4
    FOLD: tl.constexpr = 1.0 if FORMAT == 1 else 16384.0
    W: tl.constexpr = BD // PARTS
    o_n = tl.arange(0, BN)
    o_w = tl.arange(0, W)
    m_w = (o_w < D // PARTS)[None, :]
    b_home = tl.where(b_first < n_k, b_page, 0) if PAGE else tl.zeros([TILES], tl.int32)
    b_kf = tl.full([TILES], FOLD, tl.float32)
    b_vf = tl.full([TILES], FOLD, tl.float32)
    if k_factor is not None:
        b_kf = b_kf * tl.load(k_factor + b_home.to(tl.int64) * s_kfp + i_h * s_kfh, mask=b_first < n_k, other=1.0)
    if v_factor is not None:
        b_vf = b_vf * tl.load(v_factor + b_home.to(tl.int64) * s_vfp + i_h * s_vfh, mask=b_first < n_k, other=1.0)
    k += i_h.to(tl.int64) * stride_kh
    v += i_h.to(tl.int64) * stride_vh
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    accs = ()
    for _ in tl.static_range(PARTS):
        accs = accs + (tl.zeros([BM, W], tl.float32),)
    for u in tl.range(0, tiles, num_stages=STAGES):
        i_first, i_page = pick(b_first, u), pick(b_home, u).to(tl.int64)
        m_n = i_first + o_n < n_k
        o_row = (i_first % PAGE + o_n) if PAGE else (i_k0 + i_first + o_n)
        o_k = i_page * stride_kp + o_row.to(tl.int64) * stride_kn
        o_v = i_page * stride_vp + o_row.to(tl.int64) * stride_vn
        b_k = tl.load(k + o_k[:, None] + o_w[None, :], mask=m_n[:, None] & m_w, other=0)  # [BN, W] int16
        b_v = tl.load(v + o_v[:, None] + o_w[None, :], mask=m_n[:, None] & m_w, other=0)
        if FORMAT == 3:
            b_kg = load_groups(k_groups, i_page, i_h, o_row, m_n, s_kgp, s_kgh, s_kgn, s_kgg, D, BD, SWIZZLED, NATIVE)
            b_vg = load_groups(v_groups, i_page, i_h, o_row, m_n, s_vgp, s_vgh, s_vgn, s_vgg, D, BD, SWIZZLED, NATIVE)
        b_s = tl.zeros([BM, BN], tl.float32)
        k_parts, v_parts = parts_of(b_k, FORMAT, NATIVE), parts_of(b_v, FORMAT, NATIVE)
        for p in tl.static_range(PARTS):
            b_kp = k_parts[p]
            if FORMAT == 3:
                b_kp = b_kp * b_kg
            b_s = tl.dot(b_qs[p], tl.trans(b_kp), b_s)
        b_s = b_s * (b_row * (scale * 1.4426950408889634 * pick(b_kf, u)))[:, None]
        b_s = tl.where(m_n[None, :], b_s, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_z = b_z * b_old + tl.sum(b_p, 1)
        i_vf = pick(b_vf, u)
        b_p = b_p.to(tl.float16)
        sums = ()
        for p in tl.static_range(PARTS):
            b_vp = v_parts[p]
            if FORMAT == 3:
                b_vp = b_vp * b_vg
            sums = sums + (accs[p] * b_old[:, None] + tl.dot(b_p, b_vp) * i_vf,)
        accs = sums
        b_m = b_m_new
    pairs = accs if PARTS == 2 else (tl.join(accs[0], accs[2]), tl.join(accs[1], accs[3]))
    b_acc = tl.join(pairs[0], pairs[1])
    return tl.reshape(b_acc, [BM, BD]), b_m, b_z
