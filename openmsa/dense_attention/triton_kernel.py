# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"
"""This is the dense kernel: a program holds one tile of (query token, head of the group) rows and walks keys, all or a share.

Keys and values are loaded as they are stored and become numbers in registers; every conversion is exact. A stored operand
becomes float16: E4M3 codes are float16 numbers, and so is an E2M1 code times its E4M3 scale (at most six significant bits from
2**-10 to 2688). Factors of a tensor, a head or a page are not multiplied into the elements: the walk applies them to products.
Where E4M3 is not native (before sm_89) the host passes its bytes as uint8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from openmsa.dense_attention import triton_config
from openmsa.kv_cache.triton_numbers import E4M3, NVFP4, PLAIN, e4m3, swizzled_byte, swizzled_word
from openmsa.primitives import operands
from openmsa.primitives.results import finish

GROUP_UNIT = tl.constexpr(256.0)
"""Elements of rows with groups are kept so many times smaller, and products with them multiplied by it in the end."""
WHOLE = tl.constexpr(32768.0)
"""Weights, at most 1, are kept so many times larger in float16, so that small ones stay normal numbers."""
WHOLE_LOG2 = tl.constexpr(15.0)
MIN_SHARE = tl.constexpr(triton_config.MIN_SHARE)
WHOLE_FACTOR = tl.constexpr(operands.WHOLE_FACTOR)
PAGE_FACTOR = tl.constexpr(operands.PAGE_FACTOR)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
UNPACK = tl.constexpr("""{
.reg .b32 a, b, e, s;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shl.b32 e, a, 9;  and.b32 e, e, 0x0E000E00;  shl.b32 s, a, 12;  and.b32 s, s, 0x80008000;  or.b32 $0, e, s;
shl.b32 e, b, 9;  and.b32 e, e, 0x0E000E00;  shl.b32 s, b, 12;  and.b32 s, s, 0x80008000;  or.b32 $1, e, s;
shl.b32 e, a, 5;  and.b32 e, e, 0x0E000E00;  shl.b32 s, a, 8;  and.b32 s, s, 0x80008000;  or.b32 $2, e, s;
shl.b32 e, b, 5;  and.b32 e, e, 0x0E000E00;  shl.b32 s, b, 8;  and.b32 s, s, 0x80008000;  or.b32 $3, e, s;
}""")


class HeadRows(NamedTuple):
    """Holds keys or values of one head inside the kernel: the rows of all heads, where those of this head start, and the TMA
    descriptor or None."""

    rows: Any
    p_head: Any
    box: Any


class TileRows(NamedTuple):
    """Holds the rows of a tile inside the kernel: the factors of products [rows, dim], which rows exist, the last key that each
    one sees, what turns their products into raw products (a number a row or None) and what turns them into logits to base 2,
    and where their maximum scores go or None, those of neighbouring blocks s_max apart."""

    b_q: Any
    m_row: Any
    b_last: Any
    b_raw: Any
    b_logit: Any
    p_max: Any
    s_max: Any


class Sums(NamedTuple):
    """Holds the state of an online softmax: each row's largest logit, sum of weights and weighted sum of values; that last sum
    counts in units of b_unit, the largest page factor so far."""

    b_m: Any
    b_z: Any
    b_acc: Any
    b_unit: Any


@triton.jit
def e4m3_half(codes):
    """Makes float16 of E4M3 numbers or of their bytes."""
    if codes.dtype == tl.uint8:
        return e4m3(codes)
    else:
        return codes.to(tl.float16)


@triton.jit
def key_offsets(i_page, i_row, o_n, s_page, s_row, ONE: tl.constexpr):
    """Returns the offsets of the keys of a tile: from row i_row of one page, or each key in a page and row of its own."""
    if ONE:
        return i_page.to(tl.int64) * s_page + i_row.to(tl.int64) * s_row + o_n * s_row
    else:
        return i_page.to(tl.int64) * s_page + i_row.to(tl.int64) * s_row


@triton.jit
def load_groups(
    rows, i_page, i_row, o_n, m_n, i_h, CUT: tl.constexpr, FORM: tl.constexpr, ONE: tl.constexpr, MASKED: tl.constexpr
):
    """Loads scales of groups of 16 elements, float16 times 2**6, [keys, groups of the padded row]. Words of four are copied
    ahead like keys; bytes cannot be."""
    BN: tl.constexpr = CUT.keys
    BD: tl.constexpr = CUT.dim_pad
    WORDS: tl.constexpr = rows.scales.dtype.element_ty == tl.int32
    PER: tl.constexpr = 64 if WORDS else 16  # elements that one load serves
    COUNT: tl.constexpr = (CUT.dim + PER - 1) // PER
    o_g = tl.arange(0, BD // PER)
    o_r = key_offsets(i_page, i_row, o_n, rows.s_scales_page, rows.s_scales_row, ONE) + i_h.to(tl.int64) * rows.s_scales_head
    if FORM.swizzled and WORDS:
        o_s = swizzled_word(o_r[:, None], o_g[None, :], COUNT)
    elif FORM.swizzled:
        o_s = swizzled_byte(o_r[:, None], o_g[None, :], COUNT)
    else:
        o_s = o_r[:, None] + o_g[None, :] * rows.s_scales_group
    p = rows.scales + o_s
    if MASKED:
        codes = tl.load(p, mask=m_n[:, None] & (o_g < COUNT)[None, :], other=0)
    elif COUNT * PER == BD:
        codes = tl.load(p)
    else:
        codes = tl.load(p, mask=(o_g < COUNT)[None, :], other=0)
    if WORDS:
        each = codes[:, :, None] >> (tl.arange(0, 4) * 8)[None, None, :]
        return e4m3(each.to(tl.uint8).reshape(BN, BD // 16)) * 64.0
    else:
        if FORM.native:
            codes = codes.to(tl.float8e4nv, bitcast=True)
        return e4m3_half(codes) * 64.0


@triton.jit
def e2m1_halves(packed):
    """Returns both elements of each byte, float16 times 2**-14: sign and three bits go where a float16 has them. The
    instructions do for four bytes what the expressions, which the interpreter takes, do for one."""
    if INTERPRETED:
        codes = packed.to(tl.uint16)
        low = (((codes & 8) << 12) | ((codes & 7) << 9)).to(tl.float16, bitcast=True)
        high = (((codes & 0x80) << 8) | ((codes & 0x70) << 5)).to(tl.float16, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def e2m1_groups(packed, groups, CUT: tl.constexpr):
    """Makes float16 [keys, dim_pad] / GROUP_UNIT of E2M1 codes, two a byte, and the scales of their groups."""
    BN: tl.constexpr = CUT.keys
    BD: tl.constexpr = CUT.dim_pad
    low, high = e2m1_halves(packed)
    each = tl.broadcast_to(groups[:, :, None], (BN, BD // 16, 8)).reshape(BN, BD // 2)
    return tl.join(low * each, high * each).reshape(BN, BD)


@triton.jit
def load_tile(
    head, i_page, i_row, o_n, m_n, i_h,
    CUT: tl.constexpr, FORMAT: tl.constexpr, FORM: tl.constexpr, ONE: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads keys or values of a `HeadRows`, [keys, dim_pad]: plain and E4M3 numbers as they are stored, FP4 as float16 /
    GROUP_UNIT. ONE: they lie in one page. MASKED: some of them may not exist."""
    BN: tl.constexpr = CUT.keys
    ITEMS: tl.constexpr = 2 if FORMAT == NVFP4 else 1  # elements an item
    COLUMNS: tl.constexpr = CUT.dim // ITEMS
    WIDTH: tl.constexpr = CUT.dim_pad // ITEMS
    o_c = tl.arange(0, WIDTH)
    if TMA:
        tile = head.box.load([i_page, i_h, i_row, 0]).reshape(BN, WIDTH)
    else:
        o_k = key_offsets(i_page, i_row, o_n, head.rows.s_page, head.rows.s_row, ONE)
        p = head.p_head + o_k[:, None] + o_c[None, :] * head.rows.s_dim
        if MASKED:
            tile = tl.load(p, mask=m_n[:, None] & (o_c < COLUMNS)[None, :], other=0.0)
        elif COLUMNS == WIDTH:
            tile = tl.load(p)
        else:
            tile = tl.load(p, mask=(o_c < COLUMNS)[None, :], other=0.0)
    if FORMAT == NVFP4:
        tile = e2m1_groups(tile, load_groups(head.rows, i_page, i_row, o_n, m_n, i_h, CUT, FORM, ONE, MASKED), CUT)
    return tile


@triton.jit
def page_factors(rows, i_page, i_h, m_n, m_first, ONE: tl.constexpr):
    """Loads the float32 factors of the pages of a tile's keys: one number where they lie in ONE page, else one a key; 0 where
    no key exists."""
    p = rows.factor + i_page.to(tl.int64) * rows.s_factor_page + i_h * rows.s_factor_head
    if ONE:
        return tl.load(p, mask=m_first, other=0.0)
    else:
        return tl.load(p, mask=m_n, other=0.0)


@triton.jit
def half_rows(b_q):
    """Makes float16 rows, and the factor of each that gives them back: bfloat16 rows are multiplied with a power of two, so
    that their largest element lies from 2**14 to 2**15; an element is exact unless it is 2**-31 of the largest or less."""
    if b_q.dtype == tl.bfloat16:
        wide = b_q.to(tl.float32)
        magnitude = tl.abs(wide)
        top = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), 1)
        exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 15), 254)
        up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        return (wide * up[:, None]).to(tl.float16), down
    elif b_q.dtype == tl.float16:
        return b_q, tl.full([b_q.shape[0]], 1.0, tl.float32)
    else:
        return e4m3_half(b_q), tl.full([b_q.shape[0]], 1.0, tl.float32)


@triton.jit
def walk(
    tile, sums, keys, values, p_table, s_table, i_lo, i_hi, i_k0, i_h, n_k, num_pages, num_blocks,
    CUT: tl.constexpr, K_FORM: tl.constexpr, V_FORM: tl.constexpr, SOFTMAX: tl.constexpr, OUT: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, POSITIVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns the `Sums` of a `TileRows` after tiles [i_lo, i_hi) of the keys, and stores maximum scores on the way. p_table:
    where the sequence's row of the page table starts."""
    PAGE: tl.constexpr = CUT.page_size
    SPAN: tl.constexpr = CUT.span
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    NB: tl.constexpr = CUT.blocks
    FORMAT: tl.constexpr = K_FORM.format
    C: tl.constexpr = (SPAN + BN - 1) // BN
    ONE: tl.constexpr = PAGE == 0 or (PAGE % BN == 0 and SPAN % BN == 0)  # a tile lies in one page, looked up one tile ahead
    SHIFT: tl.constexpr = WHOLE_LOG2 if FORMAT != PLAIN else 0.0
    b_q, m_r, b_last, b_raw, b_logit, p_max, s_max = tile
    b_m, b_z, b_acc, b_unit = sums
    o_n = tl.arange(0, BN)
    b_best = tl.full([BM], -float("inf"), tl.float32)
    i_next_page = 0
    if PAGE and ONE:
        i_next = i_lo // C * SPAN + i_lo % C * BN
        i_next_page = tl.load(p_table + (i_next // PAGE) * s_table, mask=i_lo < i_hi, other=0)
    for i in tl.range(i_lo, i_hi, num_stages=STAGES):
        # 1. The keys of the tile, and their page, are found.
        i_first = (i // C) * SPAN + (i % C) * BN
        o_key = i_first + o_n
        m_n = o_key < n_k
        if SPAN % BN:
            m_n &= o_key < (i // C + 1) * SPAN
        if not ONE:
            i_page = tl.load(p_table + (o_key // PAGE) * s_table, mask=m_n, other=0)
            i_page = tl.minimum(tl.maximum(i_page, 0), num_pages - 1)
            i_row = o_key % PAGE
        elif PAGE:
            i_page = tl.minimum(tl.maximum(i_next_page, 0), num_pages - 1)
            i_next = (i + 1) // C * SPAN + (i + 1) % C * BN
            i_next_page = tl.load(p_table + (i_next // PAGE) * s_table, mask=i + 1 < i_hi, other=0)
            i_row = i_first % PAGE
        else:
            i_page = i_k0 * 0
            i_row = i_k0 + i_first
        # 2. They are multiplied with the rows.
        b_k = load_tile(keys, i_page, i_row, o_n, m_n, i_h, CUT, FORMAT, K_FORM, ONE, TMA, MASKED)
        if FORMAT == E4M3 and not CUT.qk8:
            b_k = e4m3_half(b_k)
        b_s = tl.dot(b_q, tl.trans(b_k))  # [rows, keys]
        if K_FORM.factor == PAGE_FACTOR:
            b_factor = page_factors(keys.rows, i_page, i_h, m_n, i_first < n_k, ONE)
            b_s *= b_factor if ONE else b_factor[None, :]
        if MASKED:
            m_s = m_n[None, :] & (o_key[None, :] <= b_last[:, None])
        # 3. The maximum products of each block are stored.
        if p_max is not None:
            b_x = tl.where(b_s == b_s, b_s, -float("inf"))
            if MASKED:
                b_x = tl.where(m_s, b_x, -float("inf"))
            if NB > 1:
                o_b = i * NB + tl.arange(0, NB)
                b_x = tl.max(tl.reshape(b_x, (BM, NB, BN // NB)), 2)  # [rows, blocks]
                if b_raw is not None:
                    b_x = tl.where(b_x > -float("inf"), b_x * b_raw[:, None], b_x)
                tl.store(p_max[:, None] + (o_b * s_max)[None, :], b_x, mask=m_r[:, None] & (o_b < num_blocks)[None, :])
            else:
                b_best = tl.maximum(tl.max(b_x, 1), tl.where(i % C == 0, -float("inf"), b_best))
                b_x = b_best
                if b_raw is not None:
                    b_x = tl.where(b_x > -float("inf"), b_x * b_raw, b_x)
                tl.store(p_max + i // C * s_max, b_x, mask=m_r & (i // C < num_blocks))
        if SOFTMAX:
            # 4. Weights are the exponentials of logits less the largest logit so far.
            if MASKED or not POSITIVE:
                b_s *= b_logit if b_raw is None else b_logit[:, None]
                if MASKED:
                    b_s = tl.where(m_s, b_s, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new) - SHIFT
                b_p = tl.exp2(b_s - b_safe[:, None])
            else:
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * b_logit)
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new) - SHIFT
                b_p = tl.exp2(b_s * (b_logit if b_raw is None else b_logit[:, None]) - b_safe[:, None])
            b_old = tl.exp2(b_m - (b_safe + SHIFT))
            b_z = b_z * b_old + tl.sum(b_p, 1)
            b_m = b_m_new
            # 5. Weighted values are added. Factors of pages are divided by the largest so far: weights stay at most WHOLE.
            if OUT:
                if V_FORM.factor == PAGE_FACTOR:
                    b_factor = page_factors(values.rows, i_page, i_h, m_n, i_first < n_k, ONE)
                    b_top = tl.maximum(b_unit, b_factor if ONE else tl.max(b_factor, 0))
                    b_nonzero = tl.where(b_top == 0, 1.0, b_top)
                    b_factor = b_factor / b_nonzero
                    b_p *= b_factor if ONE else b_factor[None, :]
                    b_old *= b_unit / b_nonzero
                    b_unit = b_top
                b_acc = b_acc * b_old[:, None]
                b_v = load_tile(values, i_page, i_row, o_n, m_n, i_h, CUT, FORMAT, V_FORM, ONE, TMA, MASKED)
                if FORMAT == E4M3:
                    b_v = e4m3_half(b_v)
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
    return Sums(b_m, b_z, b_acc, b_unit)


@triton.jit(do_not_specialize=["tiles", "num_pages", "num_blocks", "capacity", "splits"])
def dense_kernel(
    queries, keys, values, key_box, value_box, table, bounds, out, scores, staged, partials,
    scale, tiles, splits, num_pages, num_blocks, capacity,
    CUT: tl.constexpr, K_FORM: tl.constexpr, V_FORM: tl.constexpr, CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes attention of a tile of rows. The grid is (sequences * tiles of rows, KV heads, splits).

    queries, keys, values, table, bounds, out, scores: the operands of `openmsa.primitives.operands`; elements
                of out lie side by side.
    key_box, value_box: TMA descriptors of the same keys and values, or None.
    staged:     memory for a row of 16 bits a query and head, through which converted queries pass; or None.
    scale:      the softmax scale times log2(e). POSITIVE: whether it is more than 0.
    CUT:        `Cut` of `openmsa.dense_attention.triton_config`.
    K_FORM, V_FORM: `Form` of keys and values, which have one format.
    """
    BM: tl.constexpr = CUT.rows
    BN: tl.constexpr = CUT.keys
    BD: tl.constexpr = CUT.dim_pad
    SPAN: tl.constexpr = CUT.span
    # 1. The program finds its rows; those that see the most keys come first.
    i_b, i_m = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i_h, i_s = tl.program_id(1), tl.program_id(2)
    i_q0 = tl.load(bounds.cu_q + i_b)
    n_q = tl.load(bounds.cu_q + i_b + 1) - i_q0
    n_tiles = (n_q * CUT.group + BM - 1) // BM
    if i_m >= n_tiles:
        return
    i_m = n_tiles - 1 - i_m
    i_k0 = tl.load(bounds.cu_k + i_b)
    n_k = tl.minimum(tl.load(bounds.cu_k + i_b + 1) - i_k0, capacity)
    i_position = tl.load(bounds.cu_k + i_b + 1) - i_k0 - n_q if bounds.q_offset is None else tl.load(bounds.q_offset + i_b)
    o_r = i_m * BM + tl.arange(0, BM)
    o_t = o_r // CUT.group  # token of the sequence
    o_h = i_h * CUT.group + o_r % CUT.group
    m_r = o_t < n_q
    o_d = tl.arange(0, BD)

    # 2. It finds the tiles of keys to walk: without masks up to i_full, which every row sees, then up to i_hi.
    n_all = n_k  # number of keys that every row sees
    n_any = n_k  # number of keys that some row sees
    b_last = tl.full([BM], 0, tl.int32) + (n_k - 1)
    if CAUSAL:
        b_last = tl.minimum(b_last, i_position + o_t)
        n_all = tl.maximum(tl.minimum(n_k, i_position + (i_m * BM) // CUT.group + 1), 0)
        n_any = tl.minimum(n_k, i_position + tl.minimum((i_m * BM + BM - 1) // CUT.group, n_q - 1) + 1)
    C: tl.constexpr = (SPAN + BN - 1) // BN
    n_spans = (tl.maximum(n_any, 0) + SPAN - 1) // SPAN
    i_full = 0
    if SPAN % BN == 0:
        i_full = n_all // BN
    i_lo = 0
    i_hi = n_spans * C
    n_active = 1  # number of splits that have keys; a short sequence does not use them all
    if SPLIT:
        n_share = tl.maximum((n_spans + splits - 1) // splits, MIN_SHARE)
        n_active = tl.maximum((n_spans + n_share - 1) // n_share, 1)
        if i_s >= n_active:
            return
        i_lo = i_s * n_share * C
        i_hi = tl.minimum(i_hi, i_lo + n_share * C)
    i_full = tl.maximum(tl.minimum(i_full // C * C, i_hi), i_lo)  # A block is not divided between the walks.

    # 3. It loads queries as factors of products, and finds what multiplies products and sums of values.
    o_token = (i_q0 + o_t).to(tl.int64)
    p_q = queries.data + o_token[:, None] * queries.s_token + o_h[:, None] * queries.s_head + o_d[None, :] * queries.s_dim
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d[None, :] < CUT.dim), other=0.0)  # [BM, BD]
    b_raw, b_logit, b_value = None, scale, 1.0
    if K_FORM.format != PLAIN or queries.data.dtype.element_ty != keys.data.dtype.element_ty:
        b_raw = tl.full([BM], 1.0, tl.float32)
        if K_FORM.format == PLAIN:
            b_q = e4m3_half(b_q).to(keys.data.dtype.element_ty)
        elif not CUT.qk8:
            b_q, b_raw = half_rows(b_q)
        # Only what is loaded goes to the matrix unit through shared memory; computed rows fill registers.
        if staged is not None:
            p_stage = staged + o_token[:, None] * (tl.num_programs(1) * CUT.group * CUT.dim)
            p_stage = p_stage + o_h[:, None] * CUT.dim + o_d[None, :]
            m_stage = m_r[:, None] & (o_d[None, :] < CUT.dim)
            tl.store(p_stage, b_q.to(tl.int16, bitcast=True), mask=m_stage)
            tl.debug_barrier()
            b_q = tl.load(p_stage.to(tl.pointer_type(b_q.dtype), bitcast=True), mask=m_stage, other=0.0)
        if queries.factor is not None:
            b_raw *= tl.load(queries.factor + o_h * queries.s_factor_head)
        if K_FORM.format == E4M3 and K_FORM.factor == WHOLE_FACTOR:
            b_raw *= tl.load(keys.factor + i_h * keys.s_factor_head)
        elif K_FORM.format == NVFP4:
            b_raw *= GROUP_UNIT if keys.factor is None else GROUP_UNIT * tl.load(keys.factor)
        b_logit = b_raw * scale
        if K_FORM.format != PLAIN:
            b_value = 1.0 / WHOLE
        if K_FORM.format == E4M3 and V_FORM.factor == WHOLE_FACTOR:
            b_value *= tl.load(values.factor + i_h * values.s_factor_head)
        elif K_FORM.format == NVFP4:
            b_value *= GROUP_UNIT if values.factor is None else GROUP_UNIT * tl.load(values.factor)

    # 4. It walks the keys.
    p_table = table.ids
    if CUT.page_size:
        p_table = table.ids + i_b.to(tl.int64) * table.s_sequence
    p_max = scores.maxima
    if scores.maxima is not None:
        p_max = scores.maxima + o_h.to(tl.int64) * scores.s_head + o_token * scores.s_token
    SOFTMAX: tl.constexpr = out.rows is not None or out.lse is not None
    OUT: tl.constexpr = out.rows is not None
    TMA: tl.constexpr = key_box is not None
    tile = TileRows(b_q, m_r, b_last, b_raw, b_logit, p_max, tl.full([], 0, tl.int64) + scores.s_block)
    keys = HeadRows(keys, keys.data + i_h.to(tl.int64) * keys.s_head, key_box)
    values = HeadRows(values, values.data + i_h.to(tl.int64) * values.s_head, value_box)
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    sums = Sums(b_m, b_z, b_acc, tl.full([], 0.0, tl.float32))
    if SPAN % BN == 0:
        sums = walk(
            tile, sums, keys, values, p_table, table.s_page, i_lo, i_full, i_k0, i_h, n_k, num_pages, num_blocks,
            CUT, K_FORM, V_FORM, SOFTMAX, OUT, False, TMA, POSITIVE, STAGES,
        )  # fmt: skip
    b_m, b_z, b_acc, b_unit = walk(
        tile, sums, keys, values, p_table, table.s_page, i_full, i_hi, i_k0, i_h, n_k, num_pages, num_blocks,
        CUT, K_FORM, V_FORM, SOFTMAX, OUT, True, False, POSITIVE, STAGES,
    )  # fmt: skip

    # 5. It stores results or a partial; the last program of a tile to arrive merges the partials.
    if SOFTMAX:
        if K_FORM.format != PLAIN:
            b_z *= 1.0 / WHOLE
            b_acc *= b_value * b_unit if V_FORM.factor == PAGE_FACTOR else b_value
        i_p = tl.program_id(0) * tl.num_programs(1) + i_h
        finish(out, partials, o_token, o_h, b_acc, b_m, b_z, i_p, i_s, n_active, splits, m_r, CUT.dim, SPLIT)
