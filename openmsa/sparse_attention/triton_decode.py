# SPDX-License-Identifier: MIT
"""Sparse attention for a few new tokens a sequence: split over the selected blocks, merged by the last program to arrive.

One program = one query token x one KV head (its group of query heads are the rows of the tile, padded to 16) x a share of the
token's selected blocks. The selected blocks are walked as one list of topk * block_size keys, cut into tiles: where tiles lie
inside one block and one page, the ids of all tiles of a program are looked up at once and a tile is a contiguous run of rows;
otherwise every key looks up its own block and page. Each program leaves a normalised partial, rounded as the outputs are, and
its float32 lse; the last one of a token and head, found by a counter that it resets, merges them: one launch.
Bytes bound it: 2 * topk * block_size * head_dim elements a token and KV head. bfloat16 and float16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.kv_cache import E4M3, PagedKV, Stored
from openmsa.kv_cache.stored import out_dtype
from openmsa.primitives.waiting import fetch_pages
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention import triton_decode_stored
from openmsa.sparse_attention.triton_decode_stored import (
    Source,
    factors,
    format_id,
    load_parts,
    padded_dim,
    query_parts,
    swizzled,
    walk_stored,
)
from openmsa.sparse_attention.triton_decode_tiles import first_keys, merge, store_rows, walk
from openmsa.types import Layout

MIN_KEYS = 256  # a program


@dataclass(frozen=True)
class Config:
    """rows: query heads a program, padded; keys: keys a tile; tiles: tiles a program; lookup: whether every key looks up its
    own block and page; apart: whether every warp walks keys of its own, 16 of a tile or more; together: tiles of a
    step (stored rows alone)."""

    rows: int
    keys: int
    tiles: int
    splits: int
    lookup: bool
    num_warps: int
    num_stages: int
    apart: bool = False
    together: int = 1

    @property
    def walks(self) -> int:
        """The constexpr WALKS."""
        return self.num_warps if self.apart else 1


def row_tiles(group: int, head_dim: int) -> tuple[int, int]:
    """Rows a program and programs a group: heads of one group, padded to what a matrix instruction takes."""
    rows = min(max(16, next_power_of_two(group)), 64 if head_dim <= 128 else 32)
    return rows, ceil_div(group, rows)


def configure(
    tokens: int, num_kv_heads: int, group: int, head_dim: int, topk: int, block_size: int, page_size: int, device: Device,
    form: int = 0,
) -> Config:  # fmt: skip
    """The tiles and the split; page_size 0: flat keys. A pure function. Measured: up to one program a multiprocessor, deep
    buffers and the widest tiles stream best, two of them take two buffers each, three take narrow tiles; a program of fewer
    than `MIN_KEYS` keys costs more in the merge than it saves, unless half of the multiprocessors would idle."""
    rows, parts = row_tiles(group, head_dim)
    programs = max(tokens * num_kv_heads * parts, 1)
    three = 2 * device.num_sms < programs <= 3 * device.num_sms
    widest = (128 if head_dim <= 128 else 64) // (2 if three or device.shared_bytes < 160 * 1024 else 1)
    run = block_size if page_size == 0 else math.gcd(block_size, page_size)  # keys in a row that are sure to be neighbours
    keys = min(widest, run & -run)
    if lookup := keys < 32:
        keys = 64 if head_dim <= 128 else 32
    units = ceil_div(topk * block_size, keys)
    tiles = next_power_of_two(units)
    while tiles > 1:
        room = device.num_sms if tiles * keys > MIN_KEYS else device.num_sms // 2
        if programs * ceil_div(units, tiles // 2) > room or tiles * keys <= MIN_KEYS // 2:
            break
        tiles //= 2
    splits = ceil_div(units, tiles)
    crowded = device.num_sms < programs * splits <= 2 * device.num_sms or programs > 3 * device.num_sms
    config = Config(rows, keys, tiles, splits, lookup, 4, 2 if crowded else 3)
    return config if form == 0 else for_stored(config, form, head_dim, programs * splits <= device.num_sms, device)


def for_stored(config: Config, form: int, head_dim: int, alone: bool, device: Device) -> Config:
    """For rows in a stored format, with as many splits. A pure function. Warps walk apart where one can hold the sums of all
    rows; otherwise they share tiles, narrow ones where wider ones spill. alone: at most one program a multiprocessor, whose
    warps then take tiles of NVFP4 in pairs, for want of others to fill their waits (32 sequences: 26.6 us, not 29.1; e4m3,
    which converts less, 24.8 and 25.1, with 8 sequences 17.4 and 16.7).
    Measured on an H200, 16 blocks of 128 keys, 4 KV heads, warps x keys a tile x stages:
    32 sequences: e4m3 26.5 us with 8x128x3 (4x128x3 29.4, 8x128x5 27.8), NVFP4 28.7 (4x128x4 32.2, 8x128x5 28.2);
    64 sequences: e4m3 42.8 us with 4x64x4 (4x128x2 47.3, 8x128x2 66.1), NVFP4 47.1 with 4x128x2 (4x64x4 48.1, 8x128x2 69.8);
    8 sequences, 4 tiles a program: 17.2 us both with 8 warps (17.6 with 4); 1, one tile: 12.9 and 13.4 with 4 (13.2, 13.4)."""
    if config.rows > 16:
        return narrowed(config, 32 if device.arch < 90 else 64 if form == 3 else 128)
    if head_dim > 128:
        return config
    if form == 1 and not alone:
        config = replace(narrowed(config, 64), num_stages=4)
    pair_bytes = 4 * config.keys * head_dim * 9 // 16  # keys and values of two tiles
    pairs = form == 3 and alone and config.tiles > 1 and (config.num_stages - 1) * pair_bytes <= device.shared_bytes
    warps = min(config.keys // 16, 8 if alone and config.tiles > 1 else 4)
    return replace(config, num_warps=warps, apart=True, together=2 if pairs else 1)


def narrowed(config: Config, keys: int) -> Config:
    """With tiles of at most so many keys, a power of two."""
    keys = min(config.keys, keys)
    return replace(config, keys=keys, tiles=config.tiles * config.keys // keys)


def refuse(q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, block_size: int) -> str | None:
    """Why these formats or strides cannot be read, or None."""
    for rows, axis in ((k.k, 2), (k.v, 2)) if isinstance(k, PagedKV) else ((k, 0), (v, 0)):
        data = rows.data if isinstance(rows, Stored) else rows
        if data is not None and 128 * data.stride(axis) + data.shape[-1] * data.stride(-1) >= 2**31:  # 128: keys of a tile
            return f"offsets inside its tiles are 32 bits wide, got strides {tuple(data.stride())}"
    if isinstance(q, Stored) and not format_id(k):
        return "it reads queries stored as e4m3 beside keys stored as e4m3 or nvfp4 only"
    if not format_id(k):
        return None
    run = math.gcd(block_size, k.page_size) if isinstance(k, PagedKV) else block_size
    if run & -run < 32:
        return f"it reads stored keys 32 in a row or more, got blocks of {block_size} and runs of {run & -run}"
    return triton_decode_stored.refuse(k) or (None if v is None else triton_decode_stored.refuse(v))


@dataclass(frozen=True)
class Workspace:
    """Partial results of one launch at a time. `arrived` is zero before and after each."""

    part: Tensor  # in the dtype of the queries [programs, splits, rows, head_dim]
    part_lse: Tensor  # float32 [programs, splits, rows], base 2
    arrived: Tensor  # int32 [programs]

    @classmethod
    def allocate(
        cls, programs: int, partials: int, rows: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Workspace:
        """programs: tokens x KV heads x row tiles. partials: the most programs x splits of a launch that splits, or 0."""
        part = torch.empty(partials * rows * head_dim, dtype=dtype, device=device)
        part_lse = torch.empty(partials * rows, dtype=torch.float32, device=device)
        return cls(part, part_lse, torch.zeros(programs if partials else 0, dtype=torch.int32, device=device))


@triton.jit(do_not_specialize=["queries", "num_pages", "capacity", "tiles"])
def sparse_decode_kernel(
    q,
    k,
    v,
    blocks,
    page_table,
    cu_q,
    cu_k,
    q_offset,
    seq_lens,
    out,
    lse,
    part,
    part_lse,
    arrived,
    q_factor,
    k_factor,
    v_factor,
    k_groups,
    v_groups,
    scale,
    queries,
    num_pages,
    capacity,
    tiles,
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
    stride_bt,
    stride_bh,
    stride_bs,
    stride_tb,
    stride_tp,
    stride_ot,
    stride_oh,
    stride_od,
    stride_lt,
    stride_lh,
    s_qf,
    s_kfp,
    s_kfh,
    s_vfp,
    s_vfh,
    s_kgp,
    s_kgh,
    s_kgn,
    s_kgg,
    s_vgp,
    s_vgh,
    s_vgn,
    s_vgg,
    G: tl.constexpr,
    D: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOKUP: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    NATIVE: tl.constexpr,
    BY_PAGE: tl.constexpr,
    WALKS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (sequences * queries, KV heads * row tiles, SPLITS). Lengths: `seq_lens` with `queries` tokens a sequence, the last
    of its keys; or, where it is None, cu_q, cu_k and q_offset with at most `queries` tokens a sequence. PAGE 0: flat keys."""
    i_b, i_q = tl.program_id(0) // queries, tl.program_id(0) % queries
    ROW_TILES: tl.constexpr = (G + BM - 1) // BM
    i_h, i_s = tl.program_id(1) // ROW_TILES, tl.program_id(2)
    o_r = (tl.program_id(1) % ROW_TILES) * BM + tl.arange(0, BM)  # head in the group
    m_r = o_r < G
    o_d = tl.arange(0, BD)
    if PDL:
        gdc_launch_dependents()

    i_k0 = 0
    if seq_lens is not None:
        i_t = tl.program_id(0)
        n_k = tl.load(seq_lens + i_b)
        last = n_k - queries + i_q
    else:
        i_t = tl.load(cu_q + i_b) + i_q
        end = tl.load(cu_q + i_b + 1)
        if i_t >= end:
            return
        i_k0 = tl.load(cu_k + i_b)
        n_k = tl.load(cu_k + i_b + 1) - i_k0
        last = n_k - end + i_t if q_offset is None else tl.load(q_offset + i_b) + i_q
    if PAGE:
        n_k = tl.minimum(n_k, capacity)
    n_k = tl.minimum(n_k, last + 1)  # keys that the query sees; below 1: none
    n_blocks = (n_k + BLOCK - 1) // BLOCK

    p_q = q + i_t.to(tl.int64) * stride_qt + (i_h * G + o_r) * stride_qh
    if FORMAT == 0:
        b_q = tl.load(p_q[:, None] + o_d[None, :] * stride_qd, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]
    else:
        parts, q_f = load_parts(p_q, m_r, stride_qd, D, BD, 2 if FORMAT == 1 else 4), 1.0
        if q_factor is not None:
            q_f = tl.load(q_factor + (i_h * G + o_r) * s_qf, mask=m_r, other=0.0)
        if not BY_PAGE:
            k_f, v_f = factors(k_factor, 0, i_h, True, 0, s_kfh), factors(v_factor, 0, i_h, True, 0, s_vfh)
    p_ids = blocks + i_t.to(tl.int64) * stride_bt + i_h * stride_bh
    p_table = page_table
    if PAGE:
        p_table = page_table + i_b.to(tl.int64) * stride_tb
    o_u = tl.arange(0, TILES)
    if PDL and PAGE:  # index keys have driven the page table out of the cache
        fetch_pages(p_table, stride_tp, tl.cdiv(tl.maximum(n_k, 0), PAGE))
    if PDL:  # only `blocks` comes from the kernel in front
        if FORMAT != 0:
            b_qs, b_row = query_parts(parts, WALKS)
        gdc_wait()
    b_first, b_page = o_u, o_u
    if not LOOKUP:
        b_u = i_s * TILES + o_u
        b_id = tl.load(p_ids + (b_u // (BLOCK // BN)) * stride_bs, mask=b_u < TOPK * (BLOCK // BN), other=-1)
        b_first, b_page = first_keys(b_u, b_id, p_table, stride_tp, n_k, n_blocks, num_pages, BLOCK, PAGE, BN)
    if FORMAT == 0:
        b_acc, b_m, b_z = walk(
            b_q, k + i_h.to(tl.int64) * stride_kh, v + i_h.to(tl.int64) * stride_vh, b_first, b_page, p_ids, stride_bs,
            p_table, stride_tp, i_s, tiles, i_k0, n_k, n_blocks, num_pages, scale,
            stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd,
            D, TOPK, BLOCK, PAGE, BM, BN, BD, TILES, LOOKUP, STAGES,
        )  # fmt: skip
    else:
        m_u = b_first < n_k
        b_home = tl.where(m_u, b_page, 0) if PAGE else tl.zeros([TILES], tl.int32)
        if BY_PAGE:
            i_page = b_home.to(tl.int64)
            k_f, v_f = factors(k_factor, i_page, i_h, m_u, s_kfp, s_kfh), factors(v_factor, i_page, i_h, m_u, s_vfp, s_vfh)
        if not PDL:  # while the page table is read
            b_qs, b_row = query_parts(parts, WALKS)
        b_acc, b_m, b_z = walk_stored(
            b_qs, b_row * q_f, k, v, k_f, v_f, k_groups, v_groups, b_first, b_home, i_h, tiles, i_k0, n_k, scale,
            stride_kp, stride_kh, stride_kn, stride_vp, stride_vh, stride_vn,
            s_kgp, s_kgh, s_kgn, s_kgg, s_vgp, s_vgh, s_vgn, s_vgg,
            D, PAGE, BM, BN, BD, TILES, STAGES, FORMAT, SWIZZLED, NATIVE, BY_PAGE, WALKS, TOGETHER,
        )  # fmt: skip

    out += i_t.to(tl.int64) * stride_ot + i_h * G * stride_oh
    if lse is not None:
        lse += i_t.to(tl.int64) * stride_lt + i_h * G * stride_lh
    if SPLITS == 1:
        store_rows(out, lse, b_acc, b_m, b_z, o_r, o_d, m_r, stride_oh, stride_od, stride_lh, D)
    else:
        i_p = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        o_s = (i_p * SPLITS + i_s) * BM + tl.arange(0, BM)
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        tl.store(part + o_s[:, None].to(tl.int64) * D + o_d[None, :], b_part.to(part.dtype.element_ty), mask=o_d[None, :] < D)
        tl.store(part_lse + o_s, b_m + tl.log2(b_z))
        tl.debug_barrier()  # every thread's partial is written before one thread publishes it
        if tl.atomic_add(arrived + i_p, 1, sem="acq_rel") == SPLITS - 1:
            b_acc, b_m, b_z = merge(part, part_lse, i_p, tl.num_programs(2), o_d, D, BM, BD)
            store_rows(out, lse, b_acc, b_m, b_z, o_r, o_d, m_r, stride_oh, stride_od, stride_lh, D)
            tl.store(arrived + i_p, 0)


def launch(
    config: Config,
    workspace: Workspace | None,
    q: Tensor | E4M3,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    lengths: Layout | Tensor,
    queries: int,
    block_size: int,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor | None,
    pdl: bool = False,
) -> None:
    """One launch. lengths: a `Layout`, or seq_lens int32 [batch] with exactly `queries` new tokens a sequence.
    workspace: needed where config.splits > 1. pdl: start before the kernel in front has ended and wait for it inside;
    of the inputs only `blocks` may come from kernels launched since the last one that was launched without this attribute."""
    paged = isinstance(k, PagedKV)
    table = k.page_table if paged else None
    sources = [Source.of(rows, paged) for rows in ((k.k, k.v) if paged else (k, v))]
    pools, form = [source.words for source in sources], format_id(k)
    codes = q.data.view(torch.uint8) if isinstance(q, E4M3) else q
    layout = lengths if isinstance(lengths, Layout) else None
    seq_lens = None if layout else lengths
    batch = layout.batch if layout else lengths.numel()
    num_kv_heads, group = pools[0].shape[1], q.shape[1] // pools[0].shape[1]
    head_dim = q.shape[2]
    rows, parts = row_tiles(group, head_dim)
    split = config.splits > 1
    launch_kernel(
        sparse_decode_kernel,
        (batch * queries, num_kv_heads * parts, config.splits),
        codes,
        *pools,
        blocks,
        table,
        *((layout.cu_seqlens_q, layout.cu_seqlens_k, layout.q_offset) if layout else (None, None, None)),
        seq_lens,
        out,
        lse,
        *((workspace.part, workspace.part_lse, workspace.arrived) if split else (None, None, None)),
        q.scale if isinstance(q, E4M3) else None,
        *(source.factor for source in sources),
        *(source.groups for source in sources),
        softmax_scale,
        queries,
        pools[0].shape[0],
        table.shape[1] * pools[0].shape[2] if paged else 0,
        config.tiles,
        *codes.stride(),
        *pools[0].stride(),
        *pools[1].stride(),
        blocks.stride(0),
        blocks.stride(1) if blocks.shape[1] > 1 else 0,
        blocks.stride(2),
        *(table.stride() if paged else (0, 0)),
        *out.stride(),
        *(lse.stride() if lse is not None else (0, 0)),
        q.scale_strides[1] if isinstance(q, E4M3) else 0,
        *(stride for source in sources for stride in source.factor_strides),
        *(stride for source in sources for stride in source.group_strides),
        G=group,
        D=head_dim,
        TOPK=blocks.shape[2],
        BLOCK=block_size,
        PAGE=k.page_size if paged else 0,
        BM=rows,
        BN=config.keys,
        BD=padded_dim(head_dim, form),
        TILES=config.tiles,
        SPLITS=config.splits,
        LOOKUP=config.lookup,
        STAGES=config.num_stages,
        FORMAT=form,
        SWIZZLED=swizzled(k),
        NATIVE=q.device.type == "cuda" and devices.facts(q.device).arch >= 90,
        BY_PAGE=any(source.factor_strides[0] for source in sources),
        WALKS=config.walks,
        TOGETHER=config.together,
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )


def sparse_attention(
    q: Tensor | E4M3,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `openmsa.sparse_attention.sparse_attention`. config: None: `configure`."""
    total_q, num_q_heads, head_dim = q.shape
    num_kv_heads = k.num_heads if isinstance(k, PagedKV) else k.shape[1]
    out = torch.empty((total_q, num_q_heads, head_dim), dtype=out_dtype(q), device=q.device)
    lse = torch.empty((total_q, num_q_heads), dtype=torch.float32, device=q.device) if return_lse else None
    tokens, group = seqs.batch * seqs.max_seqlen_q, num_q_heads // num_kv_heads
    if total_q and num_q_heads and tokens:
        page_size = k.page_size if isinstance(k, PagedKV) else 0
        sizes = (num_kv_heads, group, head_dim, blocks.shape[2], block_size, page_size)
        config = config or configure(tokens, *sizes, devices.facts(q.device), format_id(k))
        rows, parts = row_tiles(group, head_dim)
        programs = tokens * num_kv_heads * parts
        partials = programs * config.splits if config.splits > 1 else 0
        workspace = Workspace.allocate(programs, partials, rows, head_dim, out.dtype, q.device)
        launch(config, workspace, q, k, v, blocks, seqs, seqs.max_seqlen_q, block_size, softmax_scale, out, lse)
    return out if lse is None else (out, lse)
