# SPDX-License-Identifier: MIT
"""Decode attention serves a row of its stage's table here: `configure` cuts the work, and the kernel is launched once. Decode
plans cut their launches by it and allocate memory for them beforehand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.primitives.softmax import Partials
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import ceil_div, next_power_of_two
from openmsa.sparse_attention.triton_decode import Config, format_id, launch
from openmsa.sparse_attention.triton_decode_stored import for_stored
from openmsa.sparse_attention.triton_decode_walk import row_tiles
from openmsa.types import Layout, out_dtype

MIN_KEYS = 256
"""A program has at least so many keys, as fewer cost more than they save, unless half of the multiprocessors would idle."""


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
