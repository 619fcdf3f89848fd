# SPDX-License-Identifier: MIT
"""This module cuts sparse attention for a few new tokens a sequence into programs, and launches it, once a call.

The selected blocks of a token and KV head are split over programs, and the last program to arrive merges what all of them found
(`openmsa.sparse_attention.triton_decode_kernel`). Its time is that of reading 2 * topk * block_size * head_dim elements for
each token and KV head. Outputs and plain keys are bfloat16 or float16.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.rows import out_dtype
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.primitives.operands import Bounds, KeyRows, Output, PageTable, Selection
from openmsa.primitives.queries import query_rows
from openmsa.primitives.rows import UNSCALED, Form, Scales
from openmsa.primitives.softmax import UNSPLIT, Partials
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, launch_kernel, next_power_of_two
from openmsa.sparse_attention.triton_decode_kernel import sparse_decode_kernel
from openmsa.sparse_attention.triton_decode_walk import Shape
from openmsa.types import Layout

MIN_KEYS = 256
"""A program has at least so many keys, as fewer cost more than they save, unless half of the multiprocessors would idle."""


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


def row_tiles(group: int, head_dim: int) -> tuple[int, int]:
    """Returns the rows of a program, heads of one group padded for the matrix unit, and the programs of a group."""
    rows = min(max(16, next_power_of_two(group)), 64 if head_dim <= 128 else 32)
    return rows, ceil_div(group, rows)


def configure(
    tokens: int, num_kv_heads: int, group: int, head_dim: int, topk: int, block_size: int, page_size: int, device: Device,
    form: int = 0,
) -> Config:  # fmt: skip
    """Chooses tiles and splits; it is a pure function, and page_size 0 means packed keys. A program alone on a multiprocessor
    streams best with deep buffers and the widest tiles, two programs with two buffers each, and three with narrow tiles."""
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


def refuse(q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, block_size: int) -> str | None:
    """Says why these formats or strides cannot be read; returns None where they can."""
    pools = [rows for rows in ((k.k, k.v) if isinstance(k, PagedKV) else (k, v)) if rows is not None]
    for rows in pools:
        data = rows.data if isinstance(rows, Stored) else rows
        if 128 * data.stride(-2 if data.dim() == 4 else 0) + data.shape[-1] * data.stride(-1) >= 2**31:  # 128: keys of a tile
            return f"offsets inside its tiles are 32 bits wide, got strides {tuple(data.stride())}"
    form = format_id(pools[0])
    if not form:
        return "it reads queries stored as e4m3 beside keys stored as e4m3 or nvfp4 only" if isinstance(q, Stored) else None
    run = math.gcd(block_size, k.page_size) if isinstance(k, PagedKV) else block_size
    if run & -run < 32:
        return f"it reads stored keys 32 in a row or more, got blocks of {block_size} and runs of {run & -run}"
    for rows in pools:
        if isinstance(rows, Stored) and not _in_words(rows):
            return f"it reads {rows.format} rows of contiguous bytes at even addresses, got strides {rows.data.stride()}"
    return None


def _in_words(rows: Stored) -> bool:
    """Tells whether rows can be read as 16-bit words."""
    *outer, innermost = rows.data.stride()
    even = innermost == 1 and all(stride % 2 == 0 for stride in outer) and rows.data.storage_offset() % 2 == 0
    return even and rows.shape[-1] % 4 == 0


def format_id(rows: Tensor | Stored) -> int:
    """Returns the number by which kernels know the format of rows, the field `format` of `Form`."""
    return FORMAT_IDS[rows.format] if isinstance(rows, Stored) else 0


def padded_dim(head_dim: int, form: int) -> int:
    """Returns the padded elements of a row, the field `dim_pad` of `Shape`: a matrix instruction takes 16 words or more."""
    return max(next_power_of_two(head_dim), {0: 16, 1: 32, 3: 64}[form])


def key_rows(rows: Tensor | Stored) -> tuple[KeyRows, Scales]:
    """Shows kernels a pool [pages, heads, rows, dim], or packed rows [total, heads, dim]; codes are read as int16 words."""
    if isinstance(rows, Stored):
        data, scales = rows.data.view(torch.uint8).view(torch.int16), Scales.of(rows, words=4)
    else:
        data, scales = rows, UNSCALED
    if data.dim() == 4:
        s_page, s_head, s_row, s_dim = data.stride()
    else:
        s_page, (s_row, s_head, s_dim) = 0, data.stride()
    return KeyRows(data, s_page, s_head, s_row, s_dim, *scales.operands), scales


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
) -> None:
    """Launches the kernel once. lengths: a `Layout`, or seq_lens int32 [batch] with exactly `queries` new tokens a sequence.
    pdl: whether to start before the kernel in front has ended and to wait for it inside; of the inputs only `blocks` may come
    from kernels launched since the last one that was launched without this attribute."""
    first, second = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
    assert second is not None
    (keys, k_scales), (values, v_scales) = key_rows(first), key_rows(second)
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
        Output.of(out, lse),
        partials if config.splits > 1 else UNSPLIT,
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


def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    config: Config | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Does what `openmsa.sparse_attention.sparse_attention` says. config: how to cut the work; None: `configure` chooses."""
    keys, page_size = (k.k, k.page_size) if isinstance(k, PagedKV) else (k, 0)
    (total_q, num_q_heads, head_dim), num_kv_heads = q.shape, keys.shape[1]
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse and lse is None else lse
    tokens, group = seqs.batch * seqs.max_seqlen_q, num_q_heads // num_kv_heads
    if total_q and num_q_heads and tokens:
        sizes = (num_kv_heads, group, head_dim, blocks.shape[2], block_size, page_size)
        config = config or configure(tokens, *sizes, devices.facts(q.device), format_id(keys))
        rows, parts = row_tiles(group, head_dim)
        programs = tokens * num_kv_heads * parts
        held = programs * config.splits if config.splits > 1 else 0
        partials = Partials.allocate(programs, held, rows, head_dim, out.dtype, q.device)
        launch(config, partials, q, k, v, blocks, seqs, seqs.max_seqlen_q, block_size, softmax_scale, out, lse)
    return (out, lse) if return_lse and lse is not None else out
