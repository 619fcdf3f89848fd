# SPDX-License-Identifier: MIT
"""Launches of the scoring kernel, and its variants."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from openmsa.index_branch.triton_scores import RUNTIME_LENGTHS, Config, config, score_kernel, splits
from openmsa.index_branch.triton_tiles import FLAT, PAGE, PAGES, KeySource, Tile, pointer_type
from openmsa.kv_cache import PagedIndexKeys
from openmsa.runtime.devices import COMPILE_TARGETS, Device, facts
from openmsa.runtime.variants import Variant
from openmsa.types import Layout


def score_rows(num_blocks: int) -> int:
    """Length of a row of stored scores: an odd number of 32-byte sectors. Rows a power of two apart would share few places of
    the cache, and each 4-byte write would go to memory on its own."""
    return triton.cdiv(num_blocks, 8) * 8 | 8


def launch_scores(
    index_q: Tensor,
    index_k: Tensor | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor,
    visible: Tensor | None,
    chosen: Config | None = None,
) -> None:
    """Writes block scores ``[index_heads, total_q, num_blocks]``, any strides. visible: int32 ``[total_q]`` receives how many
    blocks each query sees, and then the scores of blocks that it does not see are undefined; without it they are -inf."""
    device = facts(index_q.device)
    tile = Tile.of(block_size)
    source = KeySource.of(index_k, tile, device)
    lengths = (seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)
    launch(index_q, source, tile, lengths, seqs.batch, (seqs.max_seqlen_q, seqs.max_seqlen_k), scores, visible, device, chosen)


def launch(
    index_q: Tensor,
    source: KeySource,
    tile: Tile,
    lengths: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
    batch: int,
    longest: tuple[int, int],
    scores: Tensor,
    visible: Tensor | None,
    device: Device,
    chosen: Config | None = None,
    pdl: bool = False,
) -> None:
    """lengths: cu_seqlens_q, then cu_seqlens_k or seq_lens, then the positions of first queries or None: the last of the keys.
    longest: bounds of the query and key lengths. pdl: the next launch waits for this one inside its kernel."""
    _, heads, dim = index_q.shape
    group = heads // source.heads
    chosen = chosen or config(device, longest[0] * group, dim, tile.tile, source.mode != FLAT, source.tma)
    row_tiles = triton.cdiv(longest[0] * group, chosen.rows)
    num_blocks = scores.shape[2]
    programs = row_tiles * batch * source.heads
    blocks = -(-num_blocks // tile.sub)
    num_splits = splits(programs, blocks, chosen.resident * device.num_sms, 1 if chosen.swap else 8)
    score_kernel[(num_splits, row_tiles, batch * source.heads)](
        index_q,
        source.keys,
        source.page_table,
        *lengths,
        scores,
        visible,
        *index_q.stride(),
        *source.strides,
        source.table_stride,
        *scores.stride(),
        num_blocks,
        source.num_pages,
        source.capacity,
        longest[1],
        -(-blocks // num_splits) * tile.parts,
        KEY_HEADS=source.heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        **tile.constexprs(),
        ROWS=chosen.rows,
        SWAP=chosen.swap,
        HOLD=chosen.hold,
        MODE=source.mode,
        TMA=source.tma,
        PAGE_SIZE=source.page_size,
        FILL=visible is None,
        STAGES=chosen.num_stages,
        PDL=pdl,
        num_warps=chosen.num_warps,
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """bf16 and fp16, flat and paged, many rows and few, odd dims and blocks."""
    device = COMPILE_TARGETS[arch]
    for dtype, rows, dim, block_size, mode, tma, fill in (
        (torch.bfloat16, 65536, 128, 128, FLAT, True, True),
        (torch.bfloat16, 65536, 128, 128, PAGE, True, False),
        (torch.float16, 65536, 128, 128, FLAT, False, False),
        (torch.bfloat16, 65536, 128, 128, PAGES, False, False),
        (torch.bfloat16, 65536, 64, 64, PAGE, True, False),
        (torch.float16, 65536, 256, 256, FLAT, True, False),
        (torch.bfloat16, 65536, 80, 48, FLAT, True, True),
        (torch.bfloat16, 4, 128, 128, PAGE, True, False),
        (torch.float16, 4, 128, 128, PAGE, False, False),
        (torch.bfloat16, 64, 128, 128, FLAT, True, True),
        (torch.bfloat16, 8, 64, 32, PAGES, False, False),
    ):
        yield _variant(device, dtype, rows, dim, block_size, mode, tma and device.has_tma, fill)


def _variant(
    device: Device, dtype: torch.dtype, rows: int, dim: int, block_size: int, mode: int, tma: bool, fill: bool
) -> Variant:
    tile = Tile.of(block_size)
    pad = triton.next_power_of_2(dim)
    chosen = config(device, rows, dim, tile.tile, mode != FLAT, tma)
    pointer = pointer_type(dtype)
    arguments = {"q": pointer, "keys": f"tensordesc<{pointer[1:]}[1, 1, {tile.tile}, {pad}]>" if tma else pointer}
    arguments |= dict.fromkeys(("page_table", "cu_q", "cu_k", "seq_lens", "q_offset", "visible"), "*i32")
    arguments |= dict.fromkeys(("s_qt", "s_qh", "s_page", "s_head", "s_token", "s_table"), "i32:16")
    arguments |= dict.fromkeys(("s_sh", "s_st", *RUNTIME_LENGTHS), "i32") | {"scores": "*fp32"}
    constexprs = {"s_qd": 1, "s_dim": 1, "s_sb": 1, "KEY_HEADS": 1, "GROUP": 4, "DIM": dim, "DIM_PAD": pad, **tile.constexprs()}
    constexprs |= {
        "ROWS": chosen.rows,
        "SWAP": chosen.swap,
        "HOLD": chosen.hold,
        "MODE": mode,
        "TMA": tma,
        "FILL": fill,
        "STAGES": chosen.num_stages,
    }
    constexprs |= {
        "PAGE_SIZE": {FLAT: 1, PAGE: tile.span, PAGES: 16}[mode],
        "seq_lens": None,
        "PDL": chosen.swap and device.has_tma,
    }
    constexprs |= ({"page_table": None} if mode == FLAT else {}) | ({"visible": None} if fill else {})
    arguments = {name: kind for name, kind in arguments.items() if name not in constexprs}
    keys = ("flat", "page", "pages")[mode] + (" tma" if tma else "")
    name = f"{'few' if chosen.swap else 'many'} {pointer[1:]} d{dim} b{block_size} {keys}"
    slack = 16 if device.arch == 120 else 0
    return Variant(name, score_kernel, arguments, constexprs, chosen.num_warps, chosen.num_stages, wgmma=True, may_spill=slack)
