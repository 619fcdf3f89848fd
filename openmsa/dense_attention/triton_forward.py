# SPDX-License-Identifier: MIT
# ruff: noqa: RUF005 (kernels know no unpacking)
"""Dense attention in Triton: prefill, short queries on a long prefix, and decode, by one kernel.

A tile's rows are (query token, head of the group) pairs of one sequence and KV head, tokens outermost, so that a key is read
once for the whole group and any group size fills the tile. Where the rows alone do not fill the GPU the keys are split over
programs; each leaves a normalised partial, rounded as the outputs are, and its lse, and the last program of a tile to
arrive, found by a counter that it resets, merges them. Keys that all rows of a tile see are walked without masks, through TMA
descriptors where strides allow; the rest, at the diagonal and at the end of a sequence, by masked loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.dense_attention import chosen_results
from openmsa.kv_cache import PagedKV
from openmsa.runtime import devices
from openmsa.runtime.devices import COMPILE_TARGETS, Device
from openmsa.runtime.variants import Variant
from openmsa.types import Layout

MAX_SPLITS = 64
MIN_SHARE = tl.constexpr(4)  # spans of keys that are worth a program
LONGEST_WALK = 1 << 16  # keys a program may have to walk where a batch holds sequences of very different lengths


@dataclass(frozen=True)
class Config:
    """rows: (token, head) pairs a program; keys: keys a tile; splits: programs that share the keys of a tile of rows."""

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def configure(
    batch: int, max_seqlen_q: int, max_seqlen_k: int, num_kv_heads: int, group: int, head_dim: int, device: Device
) -> Config:
    """Tiles and split for one regime. A pure function."""
    pairs, roomy = max_seqlen_q * group, device.shared_bytes > 128 * 1024
    if pairs <= 32:  # bound by bytes: one program a multiprocessor with deep buffers
        config, resident = Config(16 if pairs <= 16 else 32, 64 if head_dim <= 128 else 32, 1, 4, 4 if roomy else 3), 1
    elif head_dim <= 128 and device.arch == 90 and pairs >= 512:
        config, resident = Config(128, 64, 1, 4, 2), 2
    elif head_dim <= 128:
        config, resident = Config(64, 64, 1, 4, 3 if roomy else 2), 2
    else:
        config, resident = Config(64, 32, 1, 8, 2), 2
    programs = max(batch * num_kv_heads * triton.cdiv(pairs, config.rows), 1)
    splits = max(resident * device.num_sms // programs, max_seqlen_k // LONGEST_WALK if pairs <= 32 else 1)
    useful = triton.cdiv(max_seqlen_k, MIN_SHARE.value * config.keys)
    return replace(config, splits=max(1, min(splits, useful, MAX_SPLITS)))


@triton.jit
def _partial(part, part_lse, i_p, i_s, n_s, splits, o_d, D: tl.constexpr, BM: tl.constexpr, OUT: tl.constexpr):
    """One partial [BM, BD] and its lse [BM]; past the last one zeros and -inf."""
    o_s = (i_p * splits + i_s) * BM + tl.arange(0, BM)
    b_lse = tl.load(part_lse + o_s, mask=tl.full([BM], 1, tl.int1) & (i_s < n_s), other=-float("inf"), cache_modifier=".cg")
    b_part = b_lse
    if OUT:
        p_part = part + o_s[:, None].to(tl.int64) * D + o_d[None, :]
        b_part = tl.load(p_part, mask=(o_d < D)[None, :] & (i_s < n_s), other=0.0, cache_modifier=".cg")
    return b_lse, b_part


@triton.jit
def _merge(part, part_lse, i_p, n_s, splits, o_d, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, OUT: tl.constexpr):
    """Sum of the first n_s partials, weighted, [BM, BD], the greatest lse and the sum of weights [BM]. As many as registers
    hold are read at once."""
    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    AHEAD: tl.constexpr = min(8, max(1, 16384 // (BM * BD)))
    for i_s in tl.range(0, n_s, AHEAD, num_stages=1):
        b_new = b_m
        lses, parts = (), ()
        for j in tl.static_range(AHEAD):
            b_lse, b_part = _partial(part, part_lse, i_p, i_s + j, n_s, splits, o_d, D, BM, OUT)
            lses, parts = lses + (b_lse,), parts + (b_part,)
            b_new = tl.maximum(b_new, b_lse)
        b_safe = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_old = tl.exp2(b_m - b_safe)
        b_z *= b_old
        b_acc *= b_old[:, None]
        for j in tl.static_range(AHEAD):
            b_w = tl.exp2(lses[j] - b_safe)
            b_z += b_w
            if OUT:
                b_acc += b_w[:, None] * parts[j].to(tl.float32)
        b_m = b_new
    return b_acc, b_m, b_z


@triton.jit
def _store(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D: tl.constexpr):
    """out = acc / z and the natural-log lse; 0 and -inf where nothing was read."""
    if out is not None:
        b_out = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        tl.store(out + o_out[:, None] + o_d[None, :], b_out.to(out.dtype.element_ty), mask=m_r[:, None] & (o_d[None, :] < D))
    if lse is not None:
        tl.store(lse + o_lse, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=m_r)


@triton.jit
def _walk(
    b_q,
    b_m,
    b_z,
    b_acc,
    k,
    v,
    k_desc,
    v_desc,
    p_table,
    p_max,
    m_r,
    b_last,
    i_lo,
    i_hi,
    i_k0,
    i_h,
    n_k,
    num_pages,
    num_blocks,
    scale,
    stride_kp,
    stride_kn,
    stride_kd,
    stride_vp,
    stride_vn,
    stride_vd,
    stride_tp,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    NB: tl.constexpr,
    SOFTMAX: tl.constexpr,
    OUT: tl.constexpr,
    MASKED: tl.constexpr,
    TMA: tl.constexpr,
    POSITIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles [i_lo, i_hi) of the keys. SPAN keys make one tile, or where they are more than BN the tiles of one block."""
    C: tl.constexpr = (SPAN + BN - 1) // BN
    o_n = tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    b_best = tl.full([BM], -float("inf"), tl.float32)
    i_next_page = 0
    if PAGE and PAGE % BN == 0 and SPAN % BN == 0:  # a tile lies in one page, looked up one tile ahead
        i_next = i_lo // C * SPAN + i_lo % C * BN
        i_next_page = tl.load(p_table + (i_next // PAGE) * stride_tp, mask=i_lo < i_hi, other=0)
    for i in tl.range(i_lo, i_hi, num_stages=STAGES):
        i_first = (i // C) * SPAN + (i % C) * BN
        o_key = i_first + o_n
        m_n = o_key < n_k
        if SPAN % BN:
            m_n &= o_key < (i // C + 1) * SPAN
        if PAGE and (PAGE % BN or SPAN % BN):
            b_page = tl.load(p_table + (o_key // PAGE) * stride_tp, mask=m_n, other=0)
            b_page = tl.minimum(tl.maximum(b_page, 0), num_pages - 1).to(tl.int64)
            o_k = b_page * stride_kp + (o_key % PAGE) * stride_kn
            o_v = b_page * stride_vp + (o_key % PAGE) * stride_vn
        elif PAGE:
            i_page = tl.minimum(tl.maximum(i_next_page, 0), num_pages - 1)
            i_next = (i + 1) // C * SPAN + (i + 1) % C * BN
            i_next_page = tl.load(p_table + (i_next // PAGE) * stride_tp, mask=i + 1 < i_hi, other=0)
            i_row = i_first % PAGE
            o_k = i_page.to(tl.int64) * stride_kp + (i_row + o_n) * stride_kn
            o_v = i_page.to(tl.int64) * stride_vp + (i_row + o_n) * stride_vn
        else:
            i_page = 0
            i_row = i_k0 + i_first
            o_k = i_row.to(tl.int64) * stride_kn + o_n * stride_kn
            o_v = i_row.to(tl.int64) * stride_vn + o_n * stride_vn
        if TMA:
            b_k = k_desc.load([i_page, i_h, i_row, 0]).reshape(BN, BD)
        elif MASKED:
            b_k = tl.load(k + o_k[:, None] + o_d[None, :] * stride_kd, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0)
        elif D == BD:
            b_k = tl.load(k + o_k[:, None] + o_d[None, :] * stride_kd)
        else:
            b_k = tl.load(k + o_k[:, None] + o_d[None, :] * stride_kd, mask=o_d[None, :] < D, other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k))  # [BM, BN], raw products
        if MASKED:
            m_s = m_n[None, :] & (o_key[None, :] <= b_last[:, None])
        if p_max is not None:
            b_x = tl.where(b_s == b_s, b_s, -float("inf"))
            if MASKED:
                b_x = tl.where(m_s, b_x, -float("inf"))
            if NB > 1:
                o_b = i * NB + tl.arange(0, NB)
                b_x = tl.max(tl.reshape(b_x, (BM, NB, BN // NB)), 2)  # [BM, NB]
                tl.store(p_max[:, None] + o_b[None, :], b_x, mask=m_r[:, None] & (o_b < num_blocks)[None, :])
            else:
                b_best = tl.maximum(tl.max(b_x, 1), tl.where(i % C == 0, -float("inf"), b_best))
                tl.store(p_max + i // C, b_best, mask=m_r & (i // C < num_blocks))
        if SOFTMAX:
            if MASKED or not POSITIVE:
                b_s *= scale
                if MASKED:
                    b_s = tl.where(m_s, b_s, -float("inf"))
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1))
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
                b_p = tl.exp2(b_s - b_safe[:, None])
            else:
                b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * scale)
                b_safe = tl.where(b_m_new == -float("inf"), 0.0, b_m_new)
                b_p = tl.exp2(b_s * scale - b_safe[:, None])
            b_old = tl.exp2(b_m - b_safe)
            b_z = b_z * b_old + tl.sum(b_p, 1)
            b_m = b_m_new
            if OUT:
                b_acc = b_acc * b_old[:, None]
                if TMA:
                    b_v = v_desc.load([i_page, i_h, i_row, 0]).reshape(BN, BD)
                elif MASKED:
                    b_v = tl.load(
                        v + o_v[:, None] + o_d[None, :] * stride_vd, mask=m_n[:, None] & (o_d[None, :] < D), other=0.0
                    )
                elif D == BD:
                    b_v = tl.load(v + o_v[:, None] + o_d[None, :] * stride_vd)
                else:
                    b_v = tl.load(v + o_v[:, None] + o_d[None, :] * stride_vd, mask=o_d[None, :] < D, other=0.0)
                b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
    return b_m, b_z, b_acc


@triton.jit(do_not_specialize=["tiles", "num_pages", "num_blocks", "capacity", "splits"])
def dense_kernel(
    q,
    k,
    v,
    k_desc,
    v_desc,
    page_table,
    cu_q,
    cu_k,
    q_offset,
    out,
    lse,
    max_score,
    part,
    part_lse,
    arrived,
    scale,
    tiles,
    splits,
    num_pages,
    num_blocks,
    capacity,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kp,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vp,
    stride_vh,
    stride_vn,
    stride_vd,
    stride_tb,
    stride_tp,
    stride_ot,
    stride_oh,
    stride_lt,
    stride_mh,
    stride_mt,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    NB: tl.constexpr,
    CAUSAL: tl.constexpr,
    POSITIVE: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (sequences * tiles of rows, KV heads, splits). scale includes log2(e). PAGE 0: flat keys."""
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
    i_first_position = tl.load(q_offset + i_b)

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
        n_share = tl.maximum((n_spans + splits - 1) // splits, MIN_SHARE)
        n_active = tl.maximum((n_spans + n_share - 1) // n_share, 1)
        if i_s >= n_active:
            return
        i_lo = i_s * n_share * C
        i_hi = tl.minimum(i_hi, i_lo + n_share * C)
    i_full = tl.maximum(tl.minimum(i_full // C * C, i_hi), i_lo)  # a block is not divided between the walks

    o_token = (i_q0 + o_t).to(tl.int64)
    p_q = q + o_token[:, None] * stride_qt + o_h[:, None] * stride_qh + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]
    p_table = page_table
    if PAGE:
        p_table = page_table + i_b.to(tl.int64) * stride_tb
    p_max = max_score
    if max_score is not None:
        p_max = max_score + o_h.to(tl.int64) * stride_mh + o_token * stride_mt
    k += i_h.to(tl.int64) * stride_kh
    v += i_h.to(tl.int64) * stride_vh
    SOFTMAX: tl.constexpr = out is not None or lse is not None
    OUT: tl.constexpr = out is not None

    b_m = tl.full([BM], -float("inf"), tl.float32)
    b_z = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BD], tl.float32)
    TMA: tl.constexpr = k_desc is not None
    # fmt: off
    if SPAN % BN == 0:
        b_m, b_z, b_acc = _walk(
            b_q, b_m, b_z, b_acc, k, v, k_desc, v_desc, p_table, p_max, m_r, b_last, i_lo, i_full, i_k0, i_h, n_k, num_pages,
            num_blocks, scale, stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd, stride_tp,
            D, BM, BN, BD, PAGE, SPAN, NB, SOFTMAX, OUT, False, TMA, POSITIVE, STAGES,
        )
    b_m, b_z, b_acc = _walk(
        b_q, b_m, b_z, b_acc, k, v, k_desc, v_desc, p_table, p_max, m_r, b_last, i_full, i_hi, i_k0, i_h, n_k, num_pages,
        num_blocks, scale, stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd, stride_tp,
        D, BM, BN, BD, PAGE, SPAN, NB, SOFTMAX, OUT, True, False, POSITIVE, STAGES,
    )
    # fmt: on

    if SOFTMAX:
        o_out = o_token * stride_ot + o_h * stride_oh
        o_lse = o_token * stride_lt + o_h
        if SPLIT:
            i_p = tl.program_id(0) * tl.num_programs(1) + i_h
            o_p = (i_p * splits + i_s) * BM + tl.arange(0, BM)
            if OUT:
                b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
                tl.store(
                    part + o_p[:, None].to(tl.int64) * D + o_d[None, :], b_part.to(part.dtype.element_ty), mask=o_d[None, :] < D
                )
            tl.store(part_lse + o_p, b_m + tl.log2(b_z))
            tl.debug_barrier()  # every thread's partial is written before one thread publishes it
            if tl.atomic_add(arrived + i_p, 1, sem="acq_rel") == n_active - 1:
                b_acc, b_m, b_z = _merge(part, part_lse, i_p, n_active, splits, o_d, D, BM, BD, OUT)
                _store(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D)
                tl.store(arrived + i_p, 0)
        else:
            _store(out, lse, b_acc, b_m, b_z, o_out, o_lse, o_d, m_r, D)


def dense_attention(
    q: Tensor,
    k: Tensor | PagedKV,
    v: Tensor | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """See `openmsa.dense_attention.dense_attention`. config: None: `configure`."""
    total_q, heads, head_dim = q.shape
    pools = (k.k, k.v) if isinstance(k, PagedKV) else (_as_page(k), _as_page(v))
    num_blocks, group = seqs.num_blocks(block_size), heads // pools[0].shape[1]
    out = torch.empty((total_q, heads, head_dim), dtype=q.dtype, device=q.device) if return_out else None
    lse = torch.empty((total_q, heads), dtype=torch.float32, device=q.device) if return_lse else None
    shape = (heads, total_q, num_blocks)
    max_score = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device) if return_max_score else None
    if config is None:
        sizes = (seqs.batch, seqs.max_seqlen_q, seqs.max_seqlen_k)
        config = configure(*sizes, pools[0].shape[1], group, head_dim, devices.facts(q.device))
    if total_q and heads:
        _launch(config, q, k, pools, seqs, causal, softmax_scale, block_size, num_blocks, out, lse, max_score)
    return chosen_results(out, lse, max_score)


def _launch(
    config: Config,
    q: Tensor,
    k: Tensor | PagedKV,
    pools: tuple[Tensor, Tensor],
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    num_blocks: int,
    out: Tensor | None,
    lse: Tensor | None,
    max_score: Tensor | None,
) -> None:
    num_pages, num_kv_heads, page_rows, head_dim = pools[0].shape
    table = k.page_table if isinstance(k, PagedKV) else None
    capacity = page_rows if table is None else table.shape[1] * page_rows * (num_pages > 0)
    group = q.shape[1] // num_kv_heads
    tiles = triton.cdiv(seqs.max_seqlen_q * group, config.rows)
    programs = seqs.batch * tiles * num_kv_heads
    splits = config.splits if out is not None or lse is not None else 1
    span, blocks_a_tile = spans(config.keys, block_size if max_score is not None else None)
    descriptors = (None, None)
    if span % config.keys == 0 and (table is None or page_rows % config.keys == 0):
        descriptors = _descriptors(pools, config.keys)
    partials = (None, None, None)
    if splits > 1:
        partials = (
            torch.empty(programs * splits * config.rows * head_dim, dtype=q.dtype, device=q.device),
            torch.empty(programs * splits * config.rows, dtype=torch.float32, device=q.device),
            torch.zeros(programs, dtype=torch.int32, device=q.device),
        )
    dense_kernel[(seqs.batch * tiles, num_kv_heads, splits)](
        q,
        *pools,
        *descriptors,
        table,
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        out,
        lse,
        max_score,
        *partials,
        softmax_scale * 1.4426950408889634,
        tiles,
        splits,
        num_pages,
        num_blocks,
        capacity,
        *q.stride(),
        *pools[0].stride(),
        *pools[1].stride(),
        *(table.stride() if table is not None else (0, 0)),
        *(out.stride()[:2] if out is not None else (0, 0)),
        lse.stride(0) if lse is not None else 0,
        *(max_score.stride()[:2] if max_score is not None else (0, 0)),
        G=group,
        D=head_dim,
        BM=config.rows,
        BN=config.keys,
        BD=triton.next_power_of_2(head_dim),
        PAGE=0 if table is None else page_rows,
        SPAN=span,
        NB=blocks_a_tile,
        CAUSAL=causal,
        POSITIVE=softmax_scale > 0,
        SPLIT=splits > 1,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def spans(keys: int, block_size: int | None) -> tuple[int, int]:
    """Keys a span and blocks a tile: without max scores (block_size None) a span is a tile; with them tiles keep to blocks,
    several blocks a tile where they divide it, else one block a span of one or more tiles."""
    if block_size is None:
        return keys, 1
    return (keys, keys // block_size) if keys % block_size == 0 else (block_size, 1)


def _descriptors(pools: tuple[Tensor, Tensor], keys: int) -> tuple[TensorDescriptor, ...] | tuple[None, None]:
    """TMA descriptors of tiles [1, 1, keys, head_dim], where the strides allow them."""
    box = [1, 1, keys, triton.next_power_of_2(pools[0].shape[3])]
    for pool in pools:
        units = [stride * pool.element_size() % 16 for stride in pool.stride()[:3]]
        if pool.stride(3) != 1 or any(units) or pool.data_ptr() % 16 or 0 in pool.shape or min(pool.stride()) < 1:
            return None, None
    return tuple(TensorDescriptor(pool, list(pool.shape), list(pool.stride()), box) for pool in pools)


def _as_page(rows: Tensor) -> Tensor:
    """Packed keys [total_k, heads, dim] as one page [1, heads, total_k, dim]."""
    return rows.transpose(0, 1)[None]


def compile_variants(arch: int) -> Iterator[Variant]:
    """Prefill, short queries and decode of M3 heads, flat and paged, with each result, and other dims."""
    cases = (  # name, dtype, batch, queries, keys, group, head_dim, page_size, block_size, results
        ("prefill flat", "bf16", 1, 16384, 131072, 16, 128, 0, None, ("out",)),
        ("prefill pages", "bf16", 1, 16384, 131072, 16, 128, 128, None, ("out", "lse")),
        ("prefill max score", "bf16", 1, 16384, 131072, 16, 128, 0, 128, ("out", "lse", "max_score")),
        ("max score alone", "bf16", 1, 16384, 131072, 16, 128, 0, 128, ("max_score",)),
        ("short queries", "fp16", 1, 64, 131072, 16, 128, 128, None, ("out", "lse")),
        ("decode pages", "bf16", 32, 1, 32768, 16, 128, 128, None, ("out", "lse")),
        ("decode pages of 16", "bf16", 32, 1, 32768, 16, 128, 16, None, ("out",)),
        ("decode max score", "bf16", 8, 1, 32768, 16, 128, 64, 16, ("out", "max_score")),
        ("prefill d64", "fp16", 1, 8192, 8192, 3, 64, 0, None, ("out", "lse")),
        ("prefill d96", "bf16", 1, 8192, 8192, 1, 96, 0, None, ("out", "lse")),
        ("prefill d256", "bf16", 1, 8192, 8192, 8, 256, 0, 48, ("out", "max_score")),
        ("decode d256", "bf16", 8, 1, 32768, 8, 256, 64, None, ("out",)),
    )
    for name, dtype, batch, queries, keys, group, head_dim, page_size, block_size, results in cases:
        config = configure(batch, queries, keys, 4, group, head_dim, COMPILE_TARGETS[arch])
        yield variant(name, config, dtype, group, head_dim, page_size, block_size, results, tma=arch >= 90)


def variant(
    name: str,
    config: Config,
    dtype: str,
    group: int,
    head_dim: int,
    page_size: int,
    block_size: int | None,
    results: tuple[str, ...],
    tma: bool,
) -> Variant:
    """As `dense_attention` launches it."""
    strides = [f"stride_{x}" for x in ["qt", "qh", "kp", "kh", "kn", "vp", "vh", "vn", "tb", "ot", "oh"]]
    arguments = {x: f"*{dtype}" for x in ("q", "k", "v", "out")} | {"lse": "*fp32", "max_score": "*fp32", "scale": "fp32"}
    arguments |= dict.fromkeys(("cu_q", "cu_k", "q_offset", "page_table"), "*i32")
    arguments |= dict.fromkeys(strides, "i32:16") | dict.fromkeys(("stride_lt", "stride_mh", "stride_mt"), "i32")
    arguments |= dict.fromkeys(("tiles", "splits", "num_pages", "num_blocks", "capacity"), "i32")
    constants: dict[str, object] = dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_tp"), 1)
    padded = triton.next_power_of_2(head_dim)
    span, blocks_a_tile = spans(config.keys, block_size)
    box = f"tensordesc<{dtype}[1, 1, {config.keys}, {padded}]>"
    described = tma and span % config.keys == 0 and page_size % config.keys == 0
    (arguments if described else constants).update(dict.fromkeys(("k_desc", "v_desc"), box if described else None))
    partials = {"part": f"*{dtype}", "part_lse": "*fp32", "arrived": "*i32"}
    arguments |= partials
    absent = {"out", "lse", "max_score"} - set(results) | (set(partials) if config.splits == 1 else set())
    constants |= dict.fromkeys(absent | (set() if page_size else {"page_table"}))
    constants |= {"G": group, "D": head_dim, "BM": config.rows, "BN": config.keys, "BD": padded, "PAGE": page_size}
    constants |= {"SPAN": span, "NB": blocks_a_tile, "CAUSAL": True, "POSITIVE": True, "SPLIT": config.splits > 1}
    constants |= {"STAGES": config.num_stages}
    arguments = {key: kind for key, kind in arguments.items() if key not in constants}
    may_spill = 512 if config.rows == 128 else 96  # 128 rows on 4 warps spill and are still the fastest of those measured
    return Variant(
        f"{name} {dtype}",
        dense_kernel,
        arguments,
        constants,
        config.num_warps,
        config.num_stages,
        wgmma=config.rows >= 64,
        dot=True,
        may_spill=may_spill,
    )
