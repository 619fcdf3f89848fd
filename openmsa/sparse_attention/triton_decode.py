# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs, disable-error-code="assignment"

"""Sparse attention for a few new tokens a sequence is one launch. What cuts it into programs is `triton_decode_call`.

A program walks tiles of selected keys, plain (`triton_decode_walk`) or stored (`triton_decode_stored`). It serves one query
token, one KV head (the query heads of its group are the rows of the tile, padded to 16) and one share of the token's selected
blocks. Each program leaves a normalised partial, rounded as the outputs are, and its float32 lse; the last program of a token
and head, which a counter finds, merges them and resets the counter. A launch takes the time of reading 2 * topk * block_size *
head_dim elements for each token and KV head. Outputs and plain keys are bfloat16 or float16.

The constexprs SHAPE, CUT and FORM of the kernel are a `Shape`, a `Config` and a `Form` of `openmsa.primitives.rows`. BM and BN
are the rows and the keys of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.primitives.operands import Bounds, KeyRows, PageTable, Selection
from openmsa.primitives.results import finish
from openmsa.primitives.rows import Form, key_rows, output_rows, query_rows
from openmsa.primitives.scales import UNSCALED, Scales
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime import devices
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention.triton_decode_stored import factors, load_parts, query_parts, walk_stored
from openmsa.sparse_attention.triton_decode_walk import Shape, fetch_pages, first_keys, padded_dim, row_tiles, walk
from openmsa.types import Layout


class Config(NamedTuple):
    """Says how the work is cut; it is the constexpr CUT of the kernel.

    rows:      query heads of a program, padded.
    keys:      keys of a tile.
    tiles:     tiles of a program.
    splits:    programs that share the selected blocks of a token and KV head.
    lookup:    whether every key looks up its own block and page.
    apart:     whether every warp walks keys of its own, at least 16 of a tile.
    together:  tiles of a step of the walk, for stored rows alone.
    """

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
        """Returns how many walks over keys a program makes at a time."""
        return self.num_warps if self.apart else 1


class Served(NamedTuple):
    """These say which tokens a launch in front has served: int32 flags, one for each `tokens` tokens of a sequence and each KV
    head; flags is None where there is no such launch."""

    flags: Tensor | None
    tokens: int


UNSERVED = Served(None, 1)


@triton.jit(do_not_specialize=["queries", "num_pages", "capacity", "tiles"])
def sparse_decode_kernel(
    q, k, v, blocks, table, bounds, out, partials, served, scale,
    queries, num_pages, capacity, tiles,
    SHAPE: tl.constexpr, CUT: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attends, and merges partials, in a grid of (sequences * queries, KV heads * row tiles, splits) programs.

    q is `QueryRows`, k and v are `KeyRows`, blocks is `Selection`, table is `PageTable`, bounds is `Bounds`, out is `Output`,
    partials is `Partials`, and served is `Served`, whose tokens are left alone. Lengths come from bounds.seq_lens, with
    `queries` tokens a sequence that are the last of its keys; or, where that is None, from cu_q, cu_k and q_offset, with at
    most `queries` tokens a sequence. num_pages and capacity count the pool's pages and the keys that a row of the page table
    has room for. PDL: the kernel may start before the one in front has ended, and waits for it."""
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
    if served.flags is not None:
        i_part = i_b * tl.cdiv(queries, served.tokens) + i_q // served.tokens
        if tl.load(served.flags + i_part * (tl.num_programs(1) // ROW_TILES) + i_h) != 0:
            return

    # 3. The walk goes over the tiles of this split.
    b_first, b_page = o_u, o_u
    if not CUT.lookup:
        b_u = i_s * TILES + o_u
        PER: tl.constexpr = SHAPE.block // CUT.keys
        b_id = tl.load(p_ids + (b_u // PER) * blocks.s_slot, mask=b_u < SHAPE.topk * PER, other=-1)
        b_first, b_page = first_keys(b_u, b_id, p_table, table.s_page, n_k, n_blocks, num_pages, SHAPE, CUT)
        if TILES > 1 and FORMAT == 0:  # After the last tile with keys nothing is read.
            tiles = tl.minimum(tiles, tl.max(tl.where(b_first < n_k, o_u + 1, 0), 0))
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
    i_p = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    token, head, n_s = i_t.to(tl.int64), i_h * G + o_r, tl.num_programs(2)
    finish(out, partials, token, head, b_acc, b_m, b_z, i_p, i_s, n_s, CUT.splits, m_r, D, CUT.splits > 1)


def format_id(rows: Tensor | Stored) -> int:
    """Returns the number by which kernels know the format of rows, the field `format` of `Form`."""
    return FORMAT_IDS[rows.format] if isinstance(rows, Stored) else 0


def _operands(rows: Tensor | Stored) -> tuple[KeyRows, Scales]:
    """Shows the kernel a pool, or packed rows; codes are read as int16 words."""
    if not isinstance(rows, Stored):
        return key_rows(rows), UNSCALED
    scales = Scales.of(rows, words=4)
    return key_rows(rows.data.view(torch.uint8).view(torch.int16), scales.operands), scales


def launch(
    config: Config,
    partials: Partials,
    q: Tensor | Stored,
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
    served: Served = UNSERVED,
) -> None:
    """Launches the kernel once. lengths: a `Layout`, or seq_lens int32 [batch] with exactly `queries` new tokens a sequence.
    pdl: whether to start before the kernel in front has ended and to wait for it inside; of the inputs only `blocks` may come
    from kernels launched since the last one that was launched without this attribute."""
    first, second = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
    assert second is not None
    (keys, k_scales), (values, v_scales) = _operands(first), _operands(second)
    if isinstance(k, PagedKV):
        num_pages, num_kv_heads, page_size, _ = keys.data.shape
        pages, capacity = PageTable(k.page_table, *k.page_table.stride()), k.page_table.shape[1] * page_size
    else:
        pages, num_pages, num_kv_heads, page_size, capacity = PageTable(None), 1, keys.data.shape[1], 0, 0
    if isinstance(lengths, Layout):
        batch, bounds = lengths.batch, Bounds(lengths.cu_seqlens_q, lengths.cu_seqlens_k, None, lengths.q_offset)
    else:
        batch, bounds = lengths.numel(), Bounds(None, None, lengths, None)
    head_dim, group, (s_token, s_head, s_slot) = q.shape[2], q.shape[1] // num_kv_heads, blocks.stride()
    factor, form = max(k_scales.factor_form, v_scales.factor_form), format_id(first)
    native = q.device.type == "cuda" and devices.facts(q.device).arch >= 90
    launch_kernel(
        sparse_decode_kernel,
        (batch * queries, num_kv_heads * row_tiles(group, head_dim)[1], config.splits),
        query_rows(q, native=False),
        keys,
        values,
        Selection(blocks, s_token, s_head if blocks.shape[1] > 1 else 0, s_slot),
        pages,
        bounds,
        output_rows(out, lse),
        partials if config.splits > 1 else UNSPLIT,
        served,
        softmax_scale,
        *(queries, num_pages, capacity, config.tiles),
        SHAPE=Shape(group, head_dim, padded_dim(head_dim, form), blocks.shape[2], block_size, page_size),
        CUT=config,
        FORM=Form(form, factor, k_scales.swizzled, {0: 1, 1: 2, 3: 4}[form], native),
        PDL=pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
