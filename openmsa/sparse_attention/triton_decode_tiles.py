# SPDX-License-Identifier: MIT
# ruff: noqa: RUF005 (kernels know no unpacking)
"""What the decode kernels share: the walk over tiles of selected keys, partial results and their merge."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def partial(part, part_lse, i_p, i_s, n_s, o_d, D: tl.constexpr, BM: tl.constexpr):
    """One partial [BM, BD] and its lse [BM]; past the last one zeros and -inf."""
    o_s = (i_p * n_s + i_s) * BM + tl.arange(0, BM)
    b_lse = tl.load(part_lse + o_s, mask=tl.full([BM], 1, tl.int1) & (i_s < n_s), other=-float("inf"), cache_modifier=".cg")
    p_part = part + o_s[:, None].to(tl.int64) * D + o_d[None, :]
    b_part = tl.load(p_part, mask=(o_d < D)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def merge(part, part_lse, i_p, n_s, o_d, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr):
    """Sum of n_s partials, weighted, [BM, BD], the greatest lse and the sum of weights [BM]. As many as registers
    hold are read at once."""
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (BM * BD)))
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = partial(part, part_lse, i_p, i_s + j, n_s, o_d, D, BM)
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
def store_rows(out, lse, b_acc, b_m, b_z, o_r, o_d, m_r, stride_oh, stride_od, stride_lh, D: tl.constexpr):
    """out = acc / z and the natural-log lse; 0 and -inf where nothing was read."""
    b_out = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
    p_out = out + o_r[:, None] * stride_oh + o_d[None, :] * stride_od
    tl.store(p_out, b_out.to(out.dtype.element_ty), mask=m_r[:, None] & (o_d[None, :] < D))
    if lse is not None:
        tl.store(lse + o_r * stride_lh, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=m_r)


@triton.jit
def first_keys(
    b_u, b_id, p_table, stride_tp, n_k, n_blocks, num_pages, BLOCK: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr
):
    """First key and page of tiles b_u of the list of selected keys, whose blocks are b_id; a tile to skip starts past n_k."""
    PER: tl.constexpr = BLOCK // BN
    m_u = (b_id >= 0) & (b_id < n_blocks)
    b_first = tl.where(m_u, b_id, 0) * BLOCK + (b_u % PER) * BN
    b_page = b_first
    if PAGE:
        b_page = tl.load(p_table + (b_first // PAGE) * stride_tp, mask=m_u & (b_first < n_k), other=-1)
        m_u = (b_page >= 0) & (b_page < num_pages)
    return tl.where(m_u, b_first, n_k), b_page


@triton.jit
def pick(x, i):
    """Element i of a vector (i modulo its length: a loop's loads ahead may ask for more): one exchange inside a warp. The only
    element is still looked for, because what does not depend on i leaves the loop, and its loads with it."""
    if x.shape[0] == 1:
        at = tl.arange(0, 1) == i
        element = tl.sum(tl.where(at, x, 0), 0)
    else:
        element = tl.sum(tl.gather(x, tl.full([1], i, tl.int32) % x.shape[0], 0), 0)
    return element


@triton.jit
def walk(
    b_q, k, v, b_first, b_page, p_ids, stride_bs, p_table, stride_tp, i_s, tiles, i_k0, n_k, n_blocks, num_pages, scale,
    stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd,
    D: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, TILES: tl.constexpr, LOOKUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention of rows b_q [BM, BD] to a program's tiles: sums [BM, BD], greatest logit (base 2) and sum of weights [BM].
    k, v: of the KV head. b_first, b_page: `first_keys` of the tiles, or LOOKUP: every key finds its own block and page."""
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    # `tiles` is TILES, unknown to the compiler: a loop of one tile is kept, and its keys and values arrive together.
    for u in tl.range(0, tiles, num_stages=STAGES):
        p_k, p_v = k, v  # of the tile; offsets in it are 32 bits wide, so that an address is one addition
        if LOOKUP:
            o_c = (i_s * TILES + u) * BN + o_n  # place in the list of selected keys
            b_key_id = tl.load(p_ids + (o_c // BLOCK) * stride_bs, mask=o_c < TOPK * BLOCK, other=-1)
            m_n = (b_key_id >= 0) & (b_key_id < n_blocks)
            o_key = tl.where(m_n, b_key_id, 0) * BLOCK + o_c % BLOCK
            m_n &= o_key < n_k
            if PAGE:
                b_key_page = tl.load(p_table + (o_key // PAGE) * stride_tp, mask=m_n, other=-1)
                m_n &= (b_key_page >= 0) & (b_key_page < num_pages)
                b_key_page = tl.where(m_n, b_key_page, 0).to(tl.int64)
                o_k = b_key_page * stride_kp + (o_key % PAGE) * stride_kn
                o_v = b_key_page * stride_vp + (o_key % PAGE) * stride_vn
            else:
                o_k = (i_k0 + o_key).to(tl.int64) * stride_kn
                o_v = (i_k0 + o_key).to(tl.int64) * stride_vn
        else:
            i_first = pick(b_first, u)
            m_n = o_n < n_k - i_first
            if PAGE:
                i_page = pick(b_page, u).to(tl.int64)
                i_row = (i_first % PAGE).to(tl.int64)
                p_k += i_page * stride_kp + i_row * stride_kn
                p_v += i_page * stride_vp + i_row * stride_vn
            else:
                i_row = (i_k0 + i_first).to(tl.int64)
                p_k += i_row * stride_kn
                p_v += i_row * stride_vn
            o_k, o_v = o_n * stride_kn, o_n * stride_vn
        m_nd = m_n[:, None] & (o_d[None, :] < D)
        b_k = tl.load(p_k + (o_k[:, None] + o_d[None, :] * stride_kd), mask=m_nd, other=0.0)  # [BN, BD]
        b_v = tl.load(p_v + (o_v[:, None] + o_d[None, :] * stride_vd), mask=m_nd, other=0.0)
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
