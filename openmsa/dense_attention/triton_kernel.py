# SPDX-License-Identifier: MIT
"""The dense kernel: one tile of (query token, head of the group) rows walks its keys, or its share of them."""

from __future__ import annotations

import triton
import triton.language as tl

from openmsa.dense_attention.triton_config import MIN_SHARE
from openmsa.dense_attention.triton_merge import merge, store_rows
from openmsa.dense_attention.triton_tiles import GROUP_UNIT, WHOLE, e4m3_half, half_rows, load_tile, page_scales

_MIN_SHARE = tl.constexpr(MIN_SHARE)


@triton.jit
def _walk(
    b_q, b_m, b_z, b_acc, i_unit, keys, values, p_table, p_max, m_r, b_last, b_row, b_logit, i_lo, i_hi, i_k0, i_h, n_k,
    num_pages, num_blocks, stride_tp,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
    NB: tl.constexpr, FORMAT: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, QK8: tl.constexpr,
    SOFTMAX: tl.constexpr, OUT: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr, POSITIVE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [i_lo, i_hi) of the keys. SPAN keys make one tile, or where they are more than BN the tiles of one block.
    b_row: what makes raw products of a row's products; b_logit: what makes logits of them, base 2. Numbers or [BM]."""
    C: tl.constexpr = (SPAN + BN - 1) // BN
    ONE: tl.constexpr = PAGE == 0 or (PAGE % BN == 0 and SPAN % BN == 0)  # a tile lies in one page, looked up one tile ahead
    SHIFT: tl.constexpr = 15.0 if FORMAT != 0 else 0.0  # log2 of WHOLE
    o_n = tl.arange(0, BN)
    b_best = tl.full([BM], -float("inf"), tl.float32)
    i_next_page = 0
    if PAGE and ONE:
        i_next = i_lo // C * SPAN + i_lo % C * BN
        i_next_page = tl.load(p_table + (i_next // PAGE) * stride_tp, mask=i_lo < i_hi, other=0)
    for i in tl.range(i_lo, i_hi, num_stages=STAGES):
        i_first = (i // C) * SPAN + (i % C) * BN
        o_key = i_first + o_n
        m_n = o_key < n_k
        if SPAN % BN:
            m_n &= o_key < (i // C + 1) * SPAN
        if not ONE:
            i_page = tl.load(p_table + (o_key // PAGE) * stride_tp, mask=m_n, other=0)
            i_page = tl.minimum(tl.maximum(i_page, 0), num_pages - 1)
            i_row = o_key % PAGE
        elif PAGE:
            i_page = tl.minimum(tl.maximum(i_next_page, 0), num_pages - 1)
            i_next = (i + 1) // C * SPAN + (i + 1) % C * BN
            i_next_page = tl.load(p_table + (i_next // PAGE) * stride_tp, mask=i + 1 < i_hi, other=0)
            i_row = i_first % PAGE
        else:
            i_page = i_k0 * 0
            i_row = i_k0 + i_first
        b_k = load_tile(keys, i_page, i_row, o_n, m_n, i_h, FORMAT, KS, D, BN, BD, ONE, TMA, MASKED)
        if FORMAT == 1 and not QK8:
            b_k = e4m3_half(b_k)
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BM, BN]
        if KS == 2:
            b_scale = page_scales(keys, i_page, i_h, m_n, i_first < n_k, ONE)
            b_s *= b_scale if ONE else b_scale[None, :]
        if MASKED:
            m_s = m_n[None, :] & (o_key[None, :] <= b_last[:, None])
        if p_max is not None:
            b_x = tl.where(b_s == b_s, b_s, -float("inf"))
            if MASKED:
                b_x = tl.where(m_s, b_x, -float("inf"))
            if NB > 1:
                o_b = i * NB + tl.arange(0, NB)
                b_x = tl.max(tl.reshape(b_x, (BM, NB, BN // NB)), 2)  # [BM, NB]
                if b_row is not None:
                    b_x = tl.where(b_x > -float("inf"), b_x * b_row[:, None], b_x)
                tl.store(p_max[:, None] + o_b[None, :], b_x, mask=m_r[:, None] & (o_b < num_blocks)[None, :])
            else:
                b_best = tl.maximum(tl.max(b_x, 1), tl.where(i % C == 0, -float("inf"), b_best))
                b_x = b_best
                if b_row is not None:
                    b_x = tl.where(b_x > -float("inf"), b_x * b_row, b_x)
                tl.store(p_max + i // C, b_x, mask=m_r & (i // C < num_blocks))
        if SOFTMAX:
            if MASKED or not POSITIVE:
                b_s *= b_logit if b_row is None else b_logit[:, None]
                if MASKED:
                    b_s = tl.where(m_s, b_s, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new) - SHIFT
                b_p = tl.exp2(b_s - b_safe[:, None])
            else:
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * b_logit)
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new) - SHIFT
                b_p = tl.exp2(b_s * (b_logit if b_row is None else b_logit[:, None]) - b_safe[:, None])
            b_old = tl.exp2(b_m - (b_safe + SHIFT))
            b_z = b_z * b_old + tl.sum(b_p, 1)
            b_m = b_m_new
            if OUT:
                if VS == 2:  # sums are kept in units of the largest scale so far, weights stay at most WHOLE
                    b_scale = page_scales(values, i_page, i_h, m_n, i_first < n_k, ONE)
                    i_top = tl.maximum(i_unit, b_scale if ONE else tl.max(b_scale, 0))
                    i_safe = tl.where(i_top == 0, 1.0, i_top)
                    b_scale = b_scale / i_safe
                    b_p *= b_scale if ONE else b_scale[None, :]
                    b_old *= i_unit / i_safe
                    i_unit = i_top
                b_acc = b_acc * b_old[:, None]
                b_v = load_tile(values, i_page, i_row, o_n, m_n, i_h, FORMAT, VS, D, BN, BD, ONE, TMA, MASKED)
                if FORMAT == 1:
                    b_v = e4m3_half(b_v)
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
    return b_m, b_z, b_acc, i_unit


@triton.jit(do_not_specialize=["tiles", "num_pages", "num_blocks", "capacity", "splits"])
def dense_kernel(
    q, k, v, k_desc, v_desc, q_scale, k_scale, v_scale, k_global, v_global, page_table, cu_q, cu_k, q_offset, out, lse,
    max_score, staged, part, part_lse, arrived, scale, tiles, splits, num_pages, num_blocks, capacity,
    stride_qt, stride_qh, stride_qd, stride_kp, stride_kh, stride_kn, stride_kd, stride_vp, stride_vh, stride_vn, stride_vd,
    stride_qs, stride_ksp, stride_ksh, stride_ksn, stride_ksg, stride_vsp, stride_vsh, stride_vsn, stride_vsg,
    stride_tb, stride_tp, stride_ot, stride_oh, stride_lt, stride_mh, stride_mt,
    G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr, NB: tl.constexpr, FORMAT: tl.constexpr, KS: tl.constexpr, VS: tl.constexpr, QK8: tl.constexpr,
    CAUSAL: tl.constexpr, POSITIVE: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (sequences * tiles of rows, KV heads, splits). scale includes log2(e). PAGE 0: flat keys. FORMAT of keys and values
    and the forms KS, VS of their scales: `openmsa.dense_attention.triton_tiles`."""
    i_b, i_m = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i_h, i_s = tl.program_id(1), tl.program_id(2)
    i_q0 = tl.load(cu_q + i_b)
    n_q = tl.load(cu_q + i_b + 1) - i_q0
    n_tiles = (n_q * G + BM - 1) // BM
    if i_m >= n_tiles:
        return
    i_m = n_tiles - 1 - i_m  # the rows that see the most keys first
    i_k0 = tl.load(cu_k + i_b)
    n_k = tl.minimum(tl.load(cu_k + i_b + 1) - i_k0, capacity)
    i_first_position = tl.load(cu_k + i_b + 1) - i_k0 - n_q if q_offset is None else tl.load(q_offset + i_b)

    o_r = i_m * BM + tl.arange(0, BM)
    o_t = o_r // G  # token of the sequence
    o_h = i_h * G + o_r % G
    m_r = o_t < n_q
    o_d = tl.arange(0, BD)
    n_all = n_k  # keys that every row sees
    n_any = n_k  # keys that some row sees
    b_last = tl.full([BM], 0, tl.int32) + (n_k - 1)
    if CAUSAL:
        b_last = tl.minimum(b_last, i_first_position + o_t)
        n_all = tl.maximum(tl.minimum(n_k, i_first_position + (i_m * BM) // G + 1), 0)
        n_any = tl.minimum(n_k, i_first_position + tl.minimum((i_m * BM + BM - 1) // G, n_q - 1) + 1)
    C: tl.constexpr = (SPAN + BN - 1) // BN
    n_spans = (tl.maximum(n_any, 0) + SPAN - 1) // SPAN
    i_full = 0
    if SPAN % BN == 0:
        i_full = n_all // BN
    i_lo = 0
    i_hi = n_spans * C
    n_active = 1  # splits that have keys; a short sequence does not use them all
    if SPLIT:
        n_share = tl.maximum((n_spans + splits - 1) // splits, _MIN_SHARE)
        n_active = tl.maximum((n_spans + n_share - 1) // n_share, 1)
        if i_s >= n_active:
            return
        i_lo = i_s * n_share * C
        i_hi = tl.minimum(i_hi, i_lo + n_share * C)
    i_full = tl.maximum(tl.minimum(i_full // C * C, i_hi), i_lo)  # a block is not divided between the walks

    o_token = (i_q0 + o_t).to(tl.int64)
    p_q = q + o_token[:, None] * stride_qt + o_h[:, None] * stride_qh + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]
    b_row, b_logit, i_value = None, scale, 1.0
    if FORMAT != 0 or q.dtype.element_ty != k.dtype.element_ty:
        b_row = tl.full([BM], 1.0, tl.float32)
        if FORMAT == 0:
            b_q = e4m3_half(b_q).to(k.dtype.element_ty)
        elif not QK8:
            b_q, b_row = half_rows(b_q)
        if (
            staged is not None
        ):  # only what is loaded goes to the matrix unit through shared memory; computed rows fill registers
            p_stage = staged + o_token[:, None] * (tl.num_programs(1) * G * D) + o_h[:, None] * D + o_d[None, :]
            m_stage = m_r[:, None] & (o_d[None, :] < D)
            tl.store(p_stage, b_q.to(tl.int16, bitcast=True), mask=m_stage)
            tl.debug_barrier()
            b_q = tl.load(p_stage.to(tl.pointer_type(b_q.dtype), bitcast=True), mask=m_stage, other=0.0)
        if q_scale is not None:
            b_row *= tl.load(q_scale + o_h * stride_qs)
        if KS == 1:
            b_row *= tl.load(k_scale + i_h * stride_ksh)
        elif KS > 2:
            b_row *= GROUP_UNIT if k_global is None else GROUP_UNIT * tl.load(k_global)
        b_logit = b_row * scale
        if FORMAT != 0:
            i_value = 1.0 / WHOLE
        if VS == 1:
            i_value *= tl.load(v_scale + i_h * stride_vsh)
        elif VS > 2:
            i_value *= GROUP_UNIT if v_global is None else GROUP_UNIT * tl.load(v_global)
    p_table = page_table
    if PAGE:
        p_table = page_table + i_b.to(tl.int64) * stride_tb
    p_max = max_score
    if max_score is not None:
        p_max = max_score + o_h.to(tl.int64) * stride_mh + o_token * stride_mt
    key_scales = (stride_ksp, stride_ksh, stride_ksn, stride_ksg)
    value_scales = (stride_vsp, stride_vsh, stride_vsn, stride_vsg)
    keys = (k + i_h.to(tl.int64) * stride_kh, k_desc, k_scale, (stride_kp, stride_kn, stride_kd), key_scales)
    values = (v + i_h.to(tl.int64) * stride_vh, v_desc, v_scale, (stride_vp, stride_vn, stride_vd), value_scales)
    SOFTMAX: tl.constexpr = out is not None or lse is not None
    OUT: tl.constexpr = out is not None

    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    i_unit = tl.full([], 0.0, tl.float32)
    TMA: tl.constexpr = k_desc is not None
    if SPAN % BN == 0:
        b_m, b_z, b_acc, i_unit = _walk(
            b_q, b_m, b_z, b_acc, i_unit, keys, values, p_table, p_max, m_r, b_last, b_row, b_logit, i_lo, i_full, i_k0, i_h,
            n_k, num_pages, num_blocks, stride_tp,
            D, BM, BN, BD, PAGE, SPAN, NB, FORMAT, KS, VS, QK8, SOFTMAX, OUT, False, TMA, POSITIVE, STAGES,
        )  # fmt: skip
    b_m, b_z, b_acc, i_unit = _walk(
        b_q, b_m, b_z, b_acc, i_unit, keys, values, p_table, p_max, m_r, b_last, b_row, b_logit, i_full, i_hi, i_k0, i_h, n_k,
        num_pages, num_blocks, stride_tp,
        D, BM, BN, BD, PAGE, SPAN, NB, FORMAT, KS, VS, QK8, SOFTMAX, OUT, True, False, POSITIVE, STAGES,
    )  # fmt: skip

    if SOFTMAX:
        if FORMAT != 0:
            b_z *= 1.0 / WHOLE
            b_acc *= i_value * i_unit if VS == 2 else i_value
        o_out = o_token * stride_ot + o_h * stride_oh
        o_lse = o_token * stride_lt + o_h
        if SPLIT:
            i_p = tl.program_id(0) * tl.num_programs(1) + i_h
            o_p = (i_p * splits + i_s) * BM + tl.arange(0, BM)
            if OUT:
                b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
                p_part = part + o_p[:, None].to(tl.int64) * D + o_d[None, :]
                tl.store(p_part, b_part.to(part.dtype.element_ty), mask=o_d[None, :] < D)
            tl.store(part_lse + o_p, b_m + tl.log2(b_z))
            tl.debug_barrier()  # every thread's partial is written before one thread publishes it
            if tl.atomic_add(arrived + i_p, 1, sem="acq_rel") == n_active - 1:
                b_acc, b_m, b_z = merge(part, part_lse, i_p, n_active, splits, o_d, D, BM, BD, OUT)
                store_rows(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D)
                tl.store(arrived + i_p, 0)
        else:
            store_rows(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D)
