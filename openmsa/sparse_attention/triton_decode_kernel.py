# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""This is the kernel of split decode attention: it walks tiles of selected keys, plain or stored, and merges partials.

One program serves one query token, one KV head (the query heads of its group are the rows of the tile, padded to 16) and one
share of the token's selected blocks. The selected blocks are one list of topk * block keys, cut into tiles. Where tiles lie
inside one block and one page, a program looks up the ids of all its tiles at once and a tile is a run of neighbouring rows;
otherwise every key looks up its own block and page. Each program leaves a normalised partial, rounded as the outputs are, and
its float32 lse; the last program of a token and head, which a counter finds, merges them and resets the counter.

Stored rows, E4M3 or NVFP4, are read as 16-bit words of 2 (E4M3) or 4 (NVFP4) neighbouring elements, the parts of a word.
Element p of every word is taken out in registers, where the words already lie as the matrix instruction wants them, so that
bytes pass shared memory once and as bytes; part p of the keys meets part p of the queries, and part p of the values gives part
p of the outputs. Every conversion is exact in float16: each row of queries is scaled by a power of two, and NVFP4 elements are
multiplied by the scale of their group. All other scales are float32 factors of a tile.

Warps that share a tile meet in every tile, for the greatest logit of a row and for the weights. A warp that holds all rows and
their sums can walk keys of its own and needs the other warps only once, at the end: tensors then have a leading dimension of
walks, one a warp. That pays where a tile has few bytes and many instructions, as stored rows do.

The constexprs SHAPE, CUT and FORM are a `Shape`, a `Config` of `openmsa.sparse_attention.triton_decode` and a `Form` of
`openmsa.primitives.rows`. BM and BN are the rows and the keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.kv_cache.triton_numbers import e4m3, swizzled_byte
from openmsa.primitives.factors import e2m1_parts
from openmsa.primitives.waiting import fetch_pages

# This turns the two bytes of each half of a word, first the low bytes, then the high ones, into float16.
E4M3_TO_FP16 = tl.constexpr("""{ .reg .b32 t; .reg .b16 a, b;
prmt.b32 t, $2, $2, 0x2020; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a;
prmt.b32 t, $2, $2, 0x3131; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $1, a; }""")


class Shape(NamedTuple):
    """Holds the sizes that the kernel is compiled for, its constexpr SHAPE. group: query heads of a KV head; block: keys of a
    block; page: keys of a page, 0 for packed keys."""

    group: int
    dim: int
    dim_pad: int
    topk: int
    block: int
    page: int


@triton.jit
def partial(partials, i_p, i_s, n_s, o_d, D: tl.constexpr, BM: tl.constexpr):
    """Loads the partial [BM, DIM_PAD] of split i_s and its lse [BM], which are zeros and -inf from split n_s on."""
    o_s = (i_p * n_s + i_s) * BM + tl.arange(0, BM)
    m_s = tl.full([BM], 1, tl.int1) & (i_s < n_s)
    b_lse = tl.load(partials.lse + o_s, mask=m_s, other=-float("inf"), cache_modifier=".cg")
    p_part = partials.rows + o_s[:, None].to(tl.int64) * D + o_d[None, :]
    b_part = tl.load(p_part, mask=(o_d < D)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def merge(partials, i_p, n_s, o_d, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Returns the weighted sum [BM, DIM_PAD] of the n_s partials of row tile i_p, their greatest lse and the sum of weights
    [BM]. As many partials as registers hold are read at once."""
    BM: tl.constexpr = CUT.rows
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (BM * DIM_PAD)))
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DIM_PAD], tl.float32)
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = partial(partials, i_p, i_s + j, n_s, o_d, SHAPE.dim, BM)
            lses, parts = lses + (b_lse,), parts + (b_part,)
            b_new = tl.maximum(b_new, b_lse)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_old = tl.exp2(b_m - b_safe)
        b_z *= b_old
        b_acc *= b_old[:, None]
        for j in tl.static_range(AHEAD):
            b_w = tl.exp2(lses[j] - b_safe)
            b_z += b_w
            b_acc += b_w[:, None] * parts[j].to(tl.float32)
        b_m = b_new
    return b_acc, b_m, b_z


@triton.jit
def store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D: tl.constexpr):
    """Stores acc / z and its natural-log lse; 0 and -inf where nothing was read. p_out and p_lse point at the first head of the
    group, of a token of `out`."""
    b_out = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
    p_rows = p_out + o_r[:, None] * out.s_head + o_d[None, :] * out.s_dim
    tl.store(p_rows, b_out.to(out.rows.dtype.element_ty), mask=m_r[:, None] & (o_d[None, :] < D))
    if out.lse is not None:
        tl.store(p_lse + o_r * out.s_lse_head, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=m_r)


@triton.jit
def first_keys(b_u, b_id, p_table, s_page, n_k, n_blocks, num_pages, SHAPE: tl.constexpr, CUT: tl.constexpr):
    """Returns the first key and the page of tiles b_u of the list of selected keys, whose blocks are b_id; a tile to skip
    starts past n_k. p_table is the sequence's row of the page table, with its ids s_page apart."""
    PER: tl.constexpr = SHAPE.block // CUT.keys
    m_u = (b_id >= 0) & (b_id < n_blocks)
    b_first = tl.where(m_u, b_id, 0) * SHAPE.block + (b_u % PER) * CUT.keys
    b_page = b_first
    if SHAPE.page:
        b_page = tl.load(p_table + (b_first // SHAPE.page) * s_page, mask=m_u & (b_first < n_k), other=-1)
        m_u = (b_page >= 0) & (b_page < num_pages)
    return tl.where(m_u, b_first, n_k), b_page


@triton.jit
def pick(x, i):
    """Returns element i of a vector in one exchange inside a warp. i counts modulo the vector's length, because the loads ahead
    of a loop may ask for more. The only element of a vector is looked for as well: what does not depend on i would leave the
    loop, and its loads with it."""
    if x.shape[0] == 1:
        at = tl.arange(0, 1) == i
        element = tl.sum(tl.where(at, x, 0), 0)
    else:
        element = tl.sum(tl.gather(x, tl.full([1], i, tl.int32) % x.shape[0], 0), 0)
    return element


@triton.jit
def walk(
    b_q, k, v, i_h, b_first, b_page, p_ids, s_slot, p_table, s_page, i_s, tiles, i_k0, n_k, n_blocks, num_pages, scale,
    SHAPE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Attends rows b_q [BM, DIM_PAD] to the keys of KV head i_h in a program's tiles: returns sums [BM, DIM_PAD], the greatest
    logit (base 2) and the sum of weights [BM]. b_first and b_page are `first_keys` of the tiles; where CUT.lookup says that
    every key looks up its own block and page, p_ids and p_table point at the token's blocks and the sequence's pages."""
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    DIM_PAD: tl.constexpr = SHAPE.dim_pad
    PAGE: tl.constexpr = SHAPE.page
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, DIM_PAD)
    p_k0, p_v0 = k.data + i_h.to(tl.int64) * k.s_head, v.data + i_h.to(tl.int64) * v.s_head
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, DIM_PAD], tl.float32)
    # `tiles` is CUT.tiles, unknown to the compiler: a loop of one tile is kept, and its keys and values arrive together.
    for u in tl.range(0, tiles, num_stages=CUT.num_stages):
        p_k, p_v = p_k0, p_v0  # These point at the tile; offsets in it are 32 bits wide, so that an address is one addition.
        if CUT.lookup:
            o_c = (i_s * CUT.tiles + u) * BN + o_n  # places in the list of selected keys
            b_key_id = tl.load(p_ids + (o_c // SHAPE.block) * s_slot, mask=o_c < SHAPE.topk * SHAPE.block, other=-1)
            m_n = (b_key_id >= 0) & (b_key_id < n_blocks)
            o_key = tl.where(m_n, b_key_id, 0) * SHAPE.block + o_c % SHAPE.block
            m_n &= o_key < n_k
            if PAGE:
                b_key_page = tl.load(p_table + (o_key // PAGE) * s_page, mask=m_n, other=-1)
                m_n &= (b_key_page >= 0) & (b_key_page < num_pages)
                b_key_page = tl.where(m_n, b_key_page, 0).to(tl.int64)
                o_k = b_key_page * k.s_page + (o_key % PAGE) * k.s_row
                o_v = b_key_page * v.s_page + (o_key % PAGE) * v.s_row
            else:
                o_k = (i_k0 + o_key).to(tl.int64) * k.s_row
                o_v = (i_k0 + o_key).to(tl.int64) * v.s_row
        else:
            i_first = pick(b_first, u)
            m_n = o_n < n_k - i_first
            if PAGE:
                i_page = pick(b_page, u).to(tl.int64)
                i_row = (i_first % PAGE).to(tl.int64)
                p_k += i_page * k.s_page + i_row * k.s_row
                p_v += i_page * v.s_page + i_row * v.s_row
            else:
                i_row = (i_k0 + i_first).to(tl.int64)
                p_k += i_row * k.s_row
                p_v += i_row * v.s_row
            o_k, o_v = o_n * k.s_row, o_n * v.s_row
        m_nd = m_n[:, None] & (o_d[None, :] < SHAPE.dim)
        b_k = tl.load(p_k + (o_k[:, None] + o_d[None, :] * k.s_dim), mask=m_nd, other=0.0)  # [BN, DIM_PAD]
        b_v = tl.load(p_v + (o_v[:, None] + o_d[None, :] * v.s_dim), mask=m_nd, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * (scale * 1.4426950408889634)  # [BM, BN], base 2
        b_s = tl.where(m_n[None, :], b_s, -float("inf"))
        b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
        b_p = tl.exp2(b_s - b_safe[:, None])
        b_old = tl.exp2(b_m - b_safe)
        b_z = b_z * b_old + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None])
        b_m = b_m_new
    return b_acc, b_m, b_z


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


@triton.jit(do_not_specialize=["queries", "num_pages", "capacity", "tiles"])
def sparse_decode_kernel(
    q, k, v, blocks, table, bounds, out, partials, scale,
    queries, num_pages, capacity, tiles,
    SHAPE: tl.constexpr, CUT: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends, and merges partials, in a grid of (sequences * queries, KV heads * row tiles, splits) programs.

    q is `QueryRows`, k and v are `KeyRows`, blocks is `Selection`, table is `PageTable`, bounds is `Bounds`, out is `Output`,
    and partials is `Partials`. Lengths come from bounds.seq_lens, with `queries` tokens a sequence that are the last of its
    keys; or, where that is None, from cu_q, cu_k and q_offset, with at most `queries` tokens a sequence. num_pages and capacity
    count the pool's pages and the keys that a row of the page table has room for. PDL: the kernel may start before the one in
    front has ended, and waits for it."""
    PAGE: tl.constexpr = SHAPE.page
    G: tl.constexpr = SHAPE.group
    D: tl.constexpr = SHAPE.dim
    TILES: tl.constexpr = CUT.tiles
    FORMAT: tl.constexpr = FORM.format
    BY_PAGE: tl.constexpr = FORM.factor == 2
    ROW_TILES: tl.constexpr = (G + CUT.rows - 1) // CUT.rows
    # 1. The program finds its token, heads and split, and how many keys the token sees.
    i_b, i_q = tl.program_id(0) // queries, tl.program_id(0) % queries
    i_h, i_s = tl.program_id(1) // ROW_TILES, tl.program_id(2)
    o_r = (tl.program_id(1) % ROW_TILES) * CUT.rows + tl.arange(0, CUT.rows)  # heads in the group
    m_r = o_r < G
    o_d = tl.arange(0, SHAPE.dim_pad)
    if PDL:
        gdc_launch_dependents()

    i_k0 = 0
    if bounds.seq_lens is not None:
        i_t = tl.program_id(0)
        n_k = tl.load(bounds.seq_lens + i_b)
        last = n_k - queries + i_q
    else:
        i_t = tl.load(bounds.cu_q + i_b) + i_q
        end = tl.load(bounds.cu_q + i_b + 1)
        if i_t >= end:
            return
        i_k0 = tl.load(bounds.cu_k + i_b)
        n_k = tl.load(bounds.cu_k + i_b + 1) - i_k0
        last = n_k - end + i_t if bounds.q_offset is None else tl.load(bounds.q_offset + i_b) + i_q
    if PAGE:
        n_k = tl.minimum(n_k, capacity)
    n_k = tl.minimum(n_k, last + 1)  # The query sees so many keys, none where this is below 1.
    n_blocks = (n_k + SHAPE.block - 1) // SHAPE.block

    # 2. Queries and factors, which need no block ids, are loaded, and the page table is fetched.
    p_q = q.data + i_t.to(tl.int64) * q.s_token + (i_h * G + o_r) * q.s_head
    if FORMAT == 0:
        b_q = tl.load(p_q[:, None] + o_d[None, :] * q.s_dim, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, DIM_PAD]
    else:
        parts, q_f = load_parts(p_q, m_r, q.s_dim, SHAPE, FORM.split), 1.0
        if q.factor is not None:
            q_f = tl.load(q.factor + (i_h * G + o_r) * q.s_factor_head, mask=m_r, other=0.0)
        if not BY_PAGE:
            k_f, v_f = factors(k, 0, i_h, True), factors(v, 0, i_h, True)
    p_ids = blocks.ids + i_t.to(tl.int64) * blocks.s_token + i_h * blocks.s_head
    p_table = table.ids
    if PAGE:
        p_table = table.ids + i_b.to(tl.int64) * table.s_sequence
    o_u = tl.arange(0, TILES)
    if PDL and PAGE:  # Index keys have driven the page table out of the cache.
        fetch_pages(p_table, table.s_page, tl.cdiv(tl.maximum(n_k, 0), PAGE))
    if PDL:  # Only `blocks` comes from the kernel in front.
        if FORMAT != 0:
            b_qs, b_row = query_parts(parts, CUT.walks)
        gdc_wait()

    # 3. The walk goes over the tiles of this split.
    b_first, b_page = o_u, o_u
    if not CUT.lookup:
        b_u = i_s * TILES + o_u
        PER: tl.constexpr = SHAPE.block // CUT.keys
        b_id = tl.load(p_ids + (b_u // PER) * blocks.s_slot, mask=b_u < SHAPE.topk * PER, other=-1)
        b_first, b_page = first_keys(b_u, b_id, p_table, table.s_page, n_k, n_blocks, num_pages, SHAPE, CUT)
    if FORMAT == 0:
        b_acc, b_m, b_z = walk(
            b_q, k, v, i_h, b_first, b_page, p_ids, blocks.s_slot, p_table, table.s_page, i_s, tiles, i_k0, n_k, n_blocks,
            num_pages, scale, SHAPE, CUT,
        )  # fmt: skip
    else:
        m_u = b_first < n_k
        b_home = tl.where(m_u, b_page, 0) if PAGE else tl.zeros([TILES], tl.int32)
        if BY_PAGE:
            i_page = b_home.to(tl.int64)
            k_f, v_f = factors(k, i_page, i_h, m_u), factors(v, i_page, i_h, m_u)
        if not PDL:  # The page table is read meanwhile.
            b_qs, b_row = query_parts(parts, CUT.walks)
        b_acc, b_m, b_z = walk_stored(
            b_qs, b_row * q_f, k, v, k_f, v_f, b_first, b_home, i_h, tiles, i_k0, n_k, scale, SHAPE, CUT, FORM
        )

    # 4. The output is stored, or a partial, which the last program of the token and head merges with the others.
    p_out = out.rows + (i_t.to(tl.int64) * out.s_token + i_h * G * out.s_head)
    p_lse = out.lse
    if out.lse is not None:
        p_lse = out.lse + (i_t.to(tl.int64) * out.s_lse_token + i_h * G * out.s_lse_head)
    if CUT.splits == 1:
        store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D)
    else:
        i_p = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        o_s = (i_p * CUT.splits + i_s) * CUT.rows + tl.arange(0, CUT.rows)
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        p_part = partials.rows + o_s[:, None].to(tl.int64) * D + o_d[None, :]
        tl.store(p_part, b_part.to(partials.rows.dtype.element_ty), mask=o_d[None, :] < D)
        tl.store(partials.lse + o_s, b_m + tl.log2(b_z))
        tl.debug_barrier()  # Every thread's partial is written before one thread publishes it.
        if tl.atomic_add(partials.arrived + i_p, 1, sem="acq_rel") == CUT.splits - 1:
            b_acc, b_m, b_z = merge(partials, i_p, tl.num_programs(2), o_d, SHAPE, CUT)
            store_rows(out, p_out, p_lse, b_acc, b_m, b_z, o_r, o_d, m_r, D)
            tl.store(partials.arrived + i_p, 0)
