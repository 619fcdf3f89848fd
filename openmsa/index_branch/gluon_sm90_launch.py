# SPDX-License-Identifier: MIT
"""When and how the Gluon scoring kernel for Hopper is launched, and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmsa.index_branch.gluon_sm90_scores import sm90_score_kernel
from openmsa.index_branch.triton_config import Kind, splits
from openmsa.index_branch.triton_sources import KeySource, QuerySource
from openmsa.index_branch.triton_tiles import FLAT, PAGE, Lengths, Tile
from openmsa.runtime.devices import COMPILE_TARGETS, Device
from openmsa.runtime.integers import ceil_div
from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.variants import Variant

SECTOR = 8
"""Scores that are written at a time; splits are multiples of it."""


@dataclass(frozen=True)
class Config:
    """resident: programs that one multiprocessor holds at a time."""

    num_warps: int
    resident: int

    @property
    def rows(self) -> int:
        """Of a program: two tiles of 16 a warp."""
        return 32 * self.num_warps


def serves(device: Device, kind: Kind, tile: Tile, rows: int, group: int) -> bool:
    """Whether the kernel serves so many rows a sequence and key head: e4m3 times e4m3, blocks of 128 keys, and groups of heads
    that divide the rows of a product."""
    factors = kind.narrow and not kind.converted and kind.dim in (64, 128)
    return device.arch == 90 and kind.tma and factors and tile.block == 128 and rows > 64 and 64 % group == 0


CONFIG = Config(num_warps=4, resident=2)
"""Two programs of 128 rows a multiprocessor: what one cannot overlap with its own products, the other's fill."""


def launch(
    queries: QuerySource,
    source: KeySource,
    lengths: Lengths,
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
) -> None:
    """As `triton_launch.launch`. scores: rows that can be written in sectors."""
    _, heads, dim = queries.rows.shape
    group = heads // source.heads
    row_tiles = ceil_div(lengths.max_seqlen_q * group, CONFIG.rows)
    num_blocks = scores.shape[2]
    parts = splits(row_tiles * lengths.batch * source.heads, num_blocks, CONFIG.resident * device.num_sms, SECTOR, SECTOR)
    blocks_per_split = ceil_div(num_blocks, parts * SECTOR) * SECTOR
    pool = source.keys
    layout = gl.NVMMASharedLayout.get_default_for(pool.block_shape, gl.float8e4nv)
    launch_kernel(
        sm90_score_kernel,
        (ceil_div(num_blocks, blocks_per_split), row_tiles, lengths.batch * source.heads),
        queries.rows,
        queries.scale,
        TensorDescriptor(pool.base, pool.shape, pool.strides, pool.block_shape, layout),
        source.scales.factor,
        source.page_table,
        *lengths.tensors,
        scores,
        visible,
        *queries.rows.stride()[:2],
        queries.scale_stride,
        source.scales.factor_stride,
        source.table_stride,
        *scores.stride()[:2],
        num_blocks,
        source.capacity,
        lengths.max_seqlen_k,
        blocks_per_split,
        KEY_HEADS=source.heads,
        GROUP=group,
        DIM=dim,
        MODE=source.mode,
        PAGE_SIZE=source.page_size,
        FILL=visible is None,
        num_warps=CONFIG.num_warps,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Packed keys and pages, with and without scales."""
    if arch != 90:
        return
    for name, dim, mode, fill in (
        ("flat", 128, FLAT, True),
        ("flat", 64, FLAT, False),
        ("page", 128, PAGE, False),
        ("page", 64, PAGE, True),
    ):
        kind = Kind.of(dim, 128, 1, gl.float8e4nv, mode != FLAT, True)
        assert serves(COMPILE_TARGETS[arch], kind, Tile.of(128), 65536, 4)
        yield _variant(f"e4m3 x e4m3 d{dim} {name}", dim, mode, fill)


def _variant(name: str, dim: int, mode: int, fill: bool) -> Variant:
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 128, dim], gl.float8e4nv)
    types = {
        "q": "*fp8e4nv",
        "q_scale": "*fp32",
        "keys": f"tensordesc<fp8e4nv[1, 1, 128, {dim}],{layout!r}>",
        "scores": "*fp32",
    }
    types |= dict.fromkeys(("page_table", "cu_q", "cu_k", "q_offset", "visible"), "*i32") | {"k_factor": "*fp32"}
    types |= dict.fromkeys(("s_qt", "s_qh", "s_table"), "i32:16")
    types |= dict.fromkeys(("s_qs", "s_kf", "s_sh", "s_st", "num_blocks", "capacity", "max_keys", "blocks_per_split"), "i32")
    constants: dict[str, Any] = {"KEY_HEADS": 1, "GROUP": 4, "DIM": dim, "MODE": mode, "PAGE_SIZE": 128 if mode else 1}
    constants |= {"FILL": fill, "seq_lens": None}
    constants |= ({"visible": None} if fill else {}) | ({"page_table": None, "k_factor": None} if mode == FLAT else {})
    types = {argument: kind for argument, kind in types.items() if argument not in constants}
    may_spill = 0 if mode == FLAT else 160  # where rows see tiles in part: the last few of a walk
    return Variant(name, sm90_score_kernel, types, constants, CONFIG.num_warps, wgmma=True, may_spill=may_spill)
