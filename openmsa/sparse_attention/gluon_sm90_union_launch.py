# SPDX-License-Identifier: MIT
"""When and how the Gluon union kernel for Hopper is launched, and its variants."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openmsa.runtime.devices import Device
from openmsa.runtime.integers import ceil_div
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention.gluon_sm90_union import BLOCK, DIM, ROWS, sm90_union_kernel
from openmsa.sparse_attention.triton_config import PrefillConfig
from openmsa.sparse_attention.triton_keys import PAGES, Keys, Queries
from openmsa.types import Layout

OPTIONS = {"STAGES": 3, "ATTEND_REGISTERS": 208, "CONVERT_REGISTERS": 96, "num_warps": 4}
"""Registers of a thread that attends to second tiles, and of one that converts; those of first tiles get what is left of 504.
Eight less for those that attend cost 8 % where values no longer fit."""
LONGEST_ROW = 1 << 24
"""Elements from a key to the next: offsets within a block are of 32 bits."""


def serves(device: Device, queries: Queries, keys: Keys, config: PrefillConfig, block_size: int) -> bool:
    """Whether the kernel serves these: 16-bit queries of dim 128 in tiles of 64 rows; blocks of 128 keys, packed or whole in
    pages; E4M3 keys and values, laid out alike, a key's codes together, without factors or with those of tensors or heads. With
    dim 64, where the exponentials of a tile weigh twice as much, copies were 3 % faster."""
    k, v, dim = keys.k, keys.v, queries.data.shape[2]
    rows = config.union_tokens * config.heads
    if device.arch != 90 or block_size != BLOCK or rows != ROWS or dim != DIM or not keys.by_row:
        return False
    if queries.data.dtype not in (torch.bfloat16, torch.float16) or k.dtype != torch.float8_e4m3fn:
        return False
    modes = keys.scale_modes()
    if PAGES in (modes["K_SCALE"], modes["V_SCALE"]) or queries.data.stride(2) != 1:
        return False
    strides = _strides(keys, k)
    whole = all(n % 16 == 0 for n in (k.data_ptr(), v.data_ptr(), *strides))
    return whole and strides == _strides(keys, v) and k.stride(-1) == v.stride(-1) == 1 and strides[2] < LONGEST_ROW


def _strides(keys: Keys, x: Tensor) -> tuple[int, ...]:
    """Of page, head and row; 16 where there is one, whose stride is never used."""
    sizes = x.shape[:3] if keys.page_size else (1, x.shape[1], x.shape[0])
    return tuple(16 if size == 1 else stride for size, stride in zip(sizes, keys.strides(x)[:3], strict=True))


def launch(
    queries: Queries,
    keys: Keys,
    seqs: Layout,
    lists: Mapping[str, Tensor],
    out: Tensor,
    lse: Tensor,
    scale: float,
    negative: bool,
    device: Device,
    config: PrefillConfig,
    group: int,
    num_tiles: int,
    capacity: int,
) -> None:
    """Attention of the tiles that stay together. lists: of `tile_lists`, `has_union` among them. negative: the scale's sign."""
    parts = ceil_div(group, config.heads)
    (k_factor, _, k_stride), (v_factor, _, v_stride) = (keys.scales_of(which)[:3] for which in (0, 1))
    launch_kernel(
        sm90_union_kernel,
        (min(ceil_div(num_tiles, 2) * keys.heads * parts, device.num_sms),),
        queries.data,
        keys.k,
        keys.v,
        out,
        lse,
        seqs.cu_seqlens_k,
        *(lists[name] for name in ("tiles", "union_sizes", "union_ids", "union_rows", "union_bits", "has_union")),
        scale,
        num_tiles,
        keys.heads,
        capacity,
        *queries.data.stride()[:2],
        *_strides(keys, keys.k),
        k_factor,
        k_stride,
        v_factor,
        v_stride,
        GROUP=group,
        HEADS=config.heads,
        PARTS=parts,
        PAGE_SIZE=keys.page_size,
        NEGATIVE=negative,
        **OPTIONS,
    )
