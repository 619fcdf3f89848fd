# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""A program of decode attention walks its share of the selected keys here, where they are stored as E4M3 or NVFP4.

Rows are read as 16-bit words of 2 (E4M3) or 4 (NVFP4) neighbouring elements, the parts of a word. Element p of every word is
taken out in registers, where the words already lie as the matrix instruction wants them, so that bytes pass shared memory once
and as bytes; part p of the keys meets part p of the queries, and part p of the values gives part p of the outputs. Every
conversion is exact in float16: each row of queries is scaled by a power of two, and NVFP4 elements are multiplied by the scale
of their group. All other scales are float32 factors of a tile.

Warps that share a tile meet in every tile, for the greatest logit of a row and for the weights. A warp that holds all rows and
their sums can walk keys of its own and needs the other warps only once, at the end: tensors then have a leading dimension of
walks, one a warp. That pays where a tile has few bytes and many instructions, as stored rows do.

The constexprs are those of `openmsa.sparse_attention.triton_decode_walk`, and FORM, a `Form` of `openmsa.primitives.rows`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from openmsa.kv_cache.triton_numbers import e4m3, swizzled_byte
from openmsa.primitives.codes import e2m1_parts
from openmsa.runtime.devices import Device
from openmsa.sparse_attention.triton_decode_walk import pick

if TYPE_CHECKING:
    from openmsa.sparse_attention.triton_decode import Config

# This turns the two bytes of each half of a word, first the low bytes, then the high ones, into float16.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b32 t; .reg .b16 a, b;
prmt.b32 t, $2, $2, 0x2020; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;
prmt.b32 t, $2, $2, 0x3131; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $1, a; }""")


@triton.jit
def tile_keys(BN: tl.constexpr, WALKS: tl.constexpr):
    """Returns the places of the keys in a tile, [BN] or [WALKS, BN // WALKS]: neighbouring keys go to one warp."""
    if WALKS == 1:
        return tl.arange(0, BN)
    else:
        return (tl.arange(0, WALKS) * (BN // WALKS))[:, None] + tl.arange(0, BN // WALKS)[None, :]


@triton.jit
def key_columns(BN: tl.constexpr, WALKS: tl.constexpr, FOURS: tl.constexpr):
    """Says, like `tile_keys`, which keys the columns of a product of queries and keys are. Of 16 columns a thread has 2c,
    2c + 1 and the two that are eight further. With FOURS, where the product with values takes four neighbouring keys of a
    thread because words hold four elements, these columns are keys 4c to 4c + 3."""
    o_n = tile_keys(BN, WALKS)
    if FOURS:
        o_n = (o_n & ~14) + (o_n & 6) * 2 + (o_n & 8) // 4
    return o_n


@triton.jit
def in_order(x, FOURS: tl.constexpr):
    """Puts the columns of `key_columns`, of x [walks, rows, keys], in the order of keys."""
    if FOURS:
        pairs = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 16, 2, 4, 2])
        x = tl.reshape(tl.permute(pairs, (0, 1, 2, 4, 3, 5)), x.shape)
    return x


@triton.jit
def per_walk(x, WALKS: tl.constexpr):
    """Returns one copy of x, a vector or a matrix, for each walk, in a leading dimension; x itself for one walk."""
    if WALKS == 1:
        return x
    elif len(x.shape) == 1:
        return tl.broadcast_to(x[None, :], [WALKS, x.shape[0]])
    else:
        return tl.broadcast_to(x[None, :, :], [WALKS, x.shape[0], x.shape[1]])


@triton.jit
def joined(b_acc, b_m, b_z):
    """Joins the sums [WALKS, BM, DIM_PAD], greatest logits and sums of weights [WALKS, BM] of several walks to those of one."""
    b_top = tl.max(b_m, 0)
    b_w = tl.exp2(b_m - tl.where(b_top == -float("inf"), 0.0, b_top)[None, :])
    b_sum = tl.permute(b_acc * b_w[:, :, None], (1, 2, 0))  # [BM, DIM_PAD, WALKS]
    for _ in tl.static_range(b_m.shape[0] // 4 + 1):  # 1, 2 or 3 halvings of 2, 4 or 8 walks
        b_left, b_right = tl.split(tl.reshape(b_sum, [b_sum.shape[0], b_sum.shape[1], b_sum.shape[2] // 2, 2]))
        b_sum = b_left + b_right
    return tl.reshape(b_sum, [b_sum.shape[0], b_sum.shape[1]]), b_top, tl.sum(b_z * b_w, 0)


@triton.jit
def parts_of(words, FORM: tl.constexpr):
    """Returns the elements of each int16 word as float16, the lowest first, a tuple: two of E4M3, or four of e2m1 times
    2**-14. With FORM.native instructions on pairs convert E4M3."""
    if FORM.format == 3:
        return e2m1_parts(words, tl.float16)
    elif FORM.native:
        FP16: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [words], dtype=FP16, is_pure=True, pack=2)
    else:
        return e4m3(words & 0xFF), e4m3((words >> 8) & 0xFF)


@triton.jit
def load_parts(p_q, m_r, s_dim, SHAPE: tl.constexpr, PARTS: tl.constexpr):
    """Loads every PARTS-th element of the rows at p_q, from elements 0 to PARTS - 1 on: PARTS tensors [rows, DIM_PAD // PARTS],
    as they are stored."""
    parts = ()
    for p in tl.static_range(PARTS):
        o_d = tl.arange(0, SHAPE.dim_pad // PARTS) * PARTS + p
        m_q = m_r[:, None] & (o_d < SHAPE.dim)[None, :]
        parts = parts + (tl.load(p_q[:, None] + (o_d * s_dim)[None, :], mask=m_q, other=0),)
    return parts


@triton.jit
def query_parts(parts, WALKS: tl.constexpr):
    """Returns parts of the rows as float16 for each walk, each row times a power of two, and the inverses [rows]."""
    numbers, halves = (), ()
    b_most = tl.zeros(parts[0].shape, tl.float32)
    for p in tl.static_range(len(parts)):
        b_q = e4m3(parts[p]) if parts[p].dtype == tl.uint8 else parts[p].to(tl.float32)
        numbers = numbers + (b_q,)
        b_most = tl.maximum(b_most, tl.abs(b_q))
    b_most = tl.max(b_most, 1)
    b_power = (b_most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    b_power = tl.where(b_power < 7.888609052210118e-31, 7.888609052210118e-31, b_power)  # 2**-100; infinity stays infinite
    for p in tl.static_range(len(parts)):
        halves = halves + (per_walk((numbers[p] * (1024.0 / b_power)[:, None]).to(tl.float16), WALKS),)
    return halves, b_power * 0.0009765625


@triton.jit
def load_groups(rows, i_page, i_h, o_row, m_n, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Loads the float16 scales of the words of rows o_row, [rows, DIM_PAD // 4]. The scales lie in bytes, or in int32 of four,
    so that four are copied at a time. They are read as bytes: every thread finds those of its own words and exchanges none."""
    COLS: tl.constexpr = SHAPE.dim_pad // 16
    PACK: tl.constexpr = 4 if rows.scales.dtype.element_ty == tl.int32 else 1
    o_g = tl.arange(0, COLS)
    o_s = i_page * rows.s_scales_page + i_h.to(tl.int64) * rows.s_scales_head + o_row.to(tl.int64) * rows.s_scales_row
    o_s = tl.expand_dims(o_s, -1)
    if FORM.swizzled:
        o_s = swizzled_byte(o_s, o_g, SHAPE.dim // 16)
    elif PACK == 4:
        o_s = o_s * 4 + (o_g // 4 * rows.s_scales_group * 4 + o_g % 4)
    else:
        o_s = o_s + o_g * rows.s_scales_group
    p_s = rows.scales.to(tl.pointer_type(tl.uint8)) + o_s
    codes = tl.load(p_s, mask=tl.expand_dims(m_n, -1) & (o_g < SHAPE.dim // 16), other=0)
    b_g = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16) if FORM.native else e4m3(codes)
    wide = tl.broadcast_to(tl.expand_dims(b_g, -1), o_row.shape + (COLS, 4))
    return tl.reshape(wide, o_row.shape + (SHAPE.dim_pad // 4,))


@triton.jit
def factors(rows, i_page, i_h, m_u):
    """Loads the float32 factors of head i_h in pages i_page, int64; returns 1 where there are none."""
    if rows.factor is None:
        return 1.0
    else:
        return tl.load(rows.factor + i_page * rows.s_factor_page + i_h * rows.s_factor_head, mask=m_u, other=1.0)


@triton.jit
def walk_stored(
    b_qs, b_row, k, v, k_f, v_f, b_first, b_home, i_h, tiles, i_k0, n_k, scale,
    SHAPE: tl.constexpr, CUT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Attends query parts b_qs with row factors b_row to stored keys, and returns what `walk` returns. b_home holds the pages
    of all tiles, inside the pool; k_f and v_f hold the factors of the tiles (BY_PAGE), or of all keys and values.
    TOGETHER tiles share a greatest logit: sums are rescaled once for them, and one tile's work fills another's waits."""
    PARTS: tl.constexpr = FORM.split
    BY_PAGE: tl.constexpr = FORM.factor == 2
    FOLD: tl.constexpr = 1.0 if FORM.format == 1 else 16384.0
    WALKS: tl.constexpr = CUT.walks
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    PAGE: tl.constexpr = SHAPE.page
    TOGETHER: tl.constexpr = CUT.together
    W: tl.constexpr = SHAPE.dim_pad // PARTS
    FOURS: tl.constexpr = FORM.format == 3 and WALKS > 1
    o_n, o_nk = tile_keys(BN, WALKS), key_columns(BN, WALKS, FOURS)
    o_w = tl.arange(0, W)
    m_w = o_w < SHAPE.dim // PARTS
    b_row *= FOLD * 1.4426950408889634 * scale
    if not BY_PAGE:
        b_row *= k_f
    p_k0 = k.data + i_h.to(tl.int64) * k.s_head
    p_v0 = v.data + i_h.to(tl.int64) * v.s_head
    b_m = per_walk(tl.full([BM], -float("inf"), tl.float32), WALKS)
    # Where warps walk apart, b_z holds a sum of weights for every column until the end, so that threads need not meet.
    b_z = per_walk(tl.zeros([BM, BN // WALKS if WALKS > 1 else 1], tl.float32), WALKS)
    accs = ()
    for _ in tl.static_range(PARTS):
        accs = accs + (per_walk(tl.zeros([BM, W], tl.float32), WALKS),)
    for u_0 in tl.range(0, tiles, TOGETHER, num_stages=CUT.num_stages):
        # 1. Logits of the tiles of this step, and the words of their values.
        logits, values, value_groups = (), (), ()
        b_m_new = b_m
        for i in tl.static_range(TOGETHER):
            u = u_0 + i
            i_first, i_page = pick(b_first, u), pick(b_home, u).to(tl.int64)
            m_n, m_nk = i_first + o_n < n_k, i_first + o_nk < n_k
            m_k = (i_first < n_k) & (o_nk >= 0) if PAGE else m_nk  # All rows of a page exist.
            i_row = i_first % PAGE if PAGE else i_k0 + i_first
            p_k = p_k0 + (i_page * k.s_page + i_row.to(tl.int64) * k.s_row)  # Offsets in a tile are 32 bits wide.
            p_v = p_v0 + (i_page * v.s_page + i_row.to(tl.int64) * v.s_row)
            m_kw, m_vw = tl.expand_dims(m_k, -1) & m_w, tl.expand_dims(m_n, -1) & m_w
            b_k = tl.load(p_k + (tl.expand_dims(o_nk * k.s_row, -1) + o_w), mask=m_kw, other=0)  # [BN, W] int16
            values = values + (tl.load(p_v + (tl.expand_dims(o_n * v.s_row, -1) + o_w), mask=m_vw, other=0),)
            if FORM.format == 3:
                b_kg = load_groups(k, i_page, i_h, i_row + o_nk, m_k, SHAPE, FORM)
                b_vg = load_groups(v, i_page, i_h, i_row + o_n, m_n, SHAPE, FORM)
                value_groups = value_groups + (b_vg,)
            b_s = per_walk(tl.zeros([BM, BN // WALKS], tl.float32), WALKS)
            k_parts = parts_of(b_k, FORM)
            for p in tl.static_range(PARTS):
                b_kp = k_parts[p]
                if FORM.format == 3:
                    b_kp = b_kp * b_kg
                b_s = tl.dot(b_qs[p], tl.trans(b_kp), b_s)
            b_s *= (b_row * pick(k_f, u) if BY_PAGE else b_row)[:, None]
            b_s = tl.where(tl.expand_dims(m_nk, -2), b_s, -float("inf"))
            b_m_new = tl.maximum(b_m_new, tl.max(b_s, -1))
            logits = logits + (b_s,)
        # 2. The sums so far are rescaled to the new greatest logits.
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_old = tl.expand_dims(tl.exp2(b_m - b_safe), -1)
        b_m = b_m_new
        b_z *= b_old
        sums = ()
        for p in tl.static_range(PARTS):
            sums = sums + (accs[p] * b_old,)
        # 3. Weights times values are added.
        for i in tl.static_range(TOGETHER):
            b_p = tl.exp2(logits[i] - tl.expand_dims(b_safe, -1))
            b_z += b_p if WALKS > 1 else tl.sum(b_p, -1, keep_dims=True)
            b_p = in_order(b_p.to(tl.float16), FOURS)
            v_parts = parts_of(values[i], FORM)
            accs, sums = sums, ()
            for p in tl.static_range(PARTS):
                b_vp = v_parts[p]
                if FORM.format == 3:
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
        return tl.reshape(b_acc, [BM, SHAPE.dim_pad]), b_m, b_z
    else:
        return joined(tl.reshape(b_acc, [WALKS, BM, SHAPE.dim_pad]), b_m, b_z)


def for_stored(config: Config, form: int, head_dim: int, alone: bool, device: Device) -> Config:
    """Returns the configuration for rows in a stored format, with as many splits; it is a pure function. Warps walk apart where
    one warp can hold the sums of all rows; otherwise they share tiles, narrow ones where wider ones spill. alone: whether a
    multiprocessor has at most one program, whose warps take tiles of NVFP4 in pairs, as no other program fills their waits."""
    if config.rows > 16:
        return narrowed(config, 32 if device.arch < 90 else 64 if form == 3 else 128)
    if head_dim > 128:
        return config
    if form == 1 and not alone:
        config = narrowed(config, 64)._replace(num_stages=4)
    pair_bytes = 4 * config.keys * head_dim * 9 // 16  # keys and values of two tiles
    pairs = form == 3 and alone and config.tiles > 1 and (config.num_stages - 1) * pair_bytes <= device.shared_bytes
    warps = min(config.keys // 16, 8 if alone and config.tiles > 1 else 4)
    return config._replace(num_warps=warps, apart=True, together=2 if pairs else 1)


def narrowed(config: Config, keys: int) -> Config:
    """Returns the configuration with tiles of at most so many keys, a power of two."""
    keys = min(config.keys, keys)
    return config._replace(keys=keys, tiles=config.tiles * config.keys // keys)
