# SPDX-License-Identifier: MIT
"""When and how the Gluon scoring kernel of NVFP4 keys for Hopper is launched, and its variants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl
from torch import Tensor

from openmsa.index_branch.gluon_sm90_lanes import BLOCK, sm90_lane_kernel
from openmsa.index_branch.triton_config import splits
from openmsa.index_branch.triton_sources import KeySource, QuerySource
from openmsa.index_branch.triton_tiles import PAGE, Lengths, Tile
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import ceil_div
from openmsa.runtime.launch import launch_kernel
from openmsa.runtime.variants import Variant

RING = BLOCK.value * (64 + 8)  # bytes of a program's ring: codes and scales


@dataclass(frozen=True)
class Config:
    """slot: keys that are copied at a time; max_registers: of a thread; resident: programs that a multiprocessor holds; share:
    tiles of a program at most."""

    slot: int
    max_registers: int
    resident: int
    share: int


CONFIG = Config(slot=32, max_registers=128, resident=16, share=8)
"""Registers are counted by quarters of a multiprocessor, which holds four warps of 128. Measured: twice as many programs as are
resident, which do not start at once, are faster than one round of longer ones, and than five warps of 96."""


def serves(device: Device, source: KeySource, queries: QuerySource, tile: Tile, rows: int) -> bool:
    """Whether the kernel serves so many rows a sequence and key head: what `triton_lanes` reads, in pages of whole blocks of
    128, keys and scales contiguous in a page, at addresses that 16 bytes are copied from."""
    if device.arch != 90 or not source.lanes or rows > 4 or source.mode != PAGE or tile.block != BLOCK.value:
        return False
    page, head, key, item = source.strides
    words, (page_words, head_words, key_words) = source.scales.words()
    close = (key, item, key_words) == (32, 1, 1 if source.scales.swizzled else 2) and queries.rows.stride(2) == 1
    even = all(stride % 16 == 0 for stride in (page, head, page_words, head_words))
    return close and even and source.pool.data_ptr() % 16 == 0 and words.data_ptr() % 16 == 0


def cut(programs: int, tiles: int, num_sms: int) -> int:
    """Tiles of a program, where so many walk so many tiles each if they are not cut."""
    parts = splits(programs, tiles, CONFIG.resident * num_sms, 1)
    return min(ceil_div(tiles, parts), CONFIG.share)


def launch(
    queries: QuerySource,
    source: KeySource,
    lengths: Lengths,
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    pdl: bool = False,
) -> None:
    """As `triton_launch.launch`."""
    num_blocks = scores.shape[2]
    programs = lengths.batch * source.heads
    share = cut(programs, num_blocks, device.num_sms)
    words, (page_words, head_words, _) = source.scales.words()
    row = 2 if source.scales.swizzled else 1  # words are counted in rows there
    launch_kernel(
        sm90_lane_kernel,
        (ceil_div(num_blocks, share), programs),
        queries.rows,
        queries.scale,
        source.pool,
        words,
        source.scales.factor,
        source.page_table,
        *lengths.tensors,
        scores,
        visible,
        *queries.rows.stride()[:2],
        queries.scale_stride,
        *source.strides[:2],
        page_words * row,
        head_words * row,
        source.scales.factor_stride,
        source.table_stride,
        *scores.stride(),
        num_blocks,
        source.num_pages,
        source.capacity,
        lengths.max_seqlen_k,
        share,
        KEY_HEADS=source.heads,
        GROUP=queries.rows.shape[1] // source.heads,
        PAGE_SIZE=source.page_size,
        SWIZZLED=source.scales.swizzled,
        PRODUCT_TYPE=queries.product,
        FILL=visible is None,
        PDL=pdl,
        SLOT=CONFIG.slot,
        num_warps=1,
        maxnreg=CONFIG.max_registers,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Plain and stored queries, both layouts of scales, pages of one block and of two."""
    if arch != 90:
        return
    for name, swizzled, page_size, fill in (
        ("bf16", False, 128, False),
        ("bf16", True, 128, False),
        ("fp16", False, 256, True),
        ("fp8e4nv", False, 128, False),
    ):
        types = {"q": f"*{name}", "keys": "*i16", "scales": "*i32", "k_factor": "*fp32", "scores": "*fp32"}
        types |= dict.fromkeys(("page_table", "cu_q", "seq_lens"), "*i32")
        types |= dict.fromkeys(("s_qt", "s_qh", "s_page", "s_head", "s_gp", "s_gh", "s_table"), "i32:16")
        types |= dict.fromkeys(("s_qs", "s_kf", "s_sh", "s_st"), "i32")
        types |= dict.fromkeys(("num_blocks", "num_pages", "capacity", "max_keys", "tiles_per_split"), "i32")
        product = tl.float16 if name == "fp16" else tl.bfloat16
        constants: dict[str, Any] = {"KEY_HEADS": 1, "GROUP": 4, "PAGE_SIZE": page_size, "SWIZZLED": swizzled}
        constants |= {"PRODUCT_TYPE": product, "FILL": fill, "PDL": not fill, "SLOT": CONFIG.slot, "s_sb": 1}
        constants |= {"cu_k": None, "q_offset": None}
        stored = {"q_scale": "*fp32"} if name == "fp8e4nv" else {}
        types |= stored | ({} if fill else {"visible": "*i32"})
        constants |= {x: None for x in ("q_scale", "visible") if x not in types}
        label = f"{name} x nvfp4{' 128x4' if swizzled else ''} pages of {page_size}"
        yield Variant(label, sm90_lane_kernel, types, constants, 1, dot=True, maxnreg=CONFIG.max_registers)
