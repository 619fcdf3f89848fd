# SPDX-License-Identifier: MIT
"""The prefill kernels as the host code launches them, for the compile check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from openmsa.runtime.variants import Variant
from openmsa.sparse_attention.triton_config import MAX_HEADS, power_of_two, prefill_config
from openmsa.sparse_attention.triton_lists import bucket_offsets, fill_lists, tile_lists
from openmsa.sparse_attention.triton_outer import attend_outer, combine_outer
from openmsa.sparse_attention.triton_union import attend_union

_POINTERS = dict.fromkeys(("lse", "lse_part"), "*fp32") | {"slots": "*i64"}
_POINTERS |= dict.fromkeys(("blocks", "cu_q", "cu_k", "q_offset", "page_table", "tiles", "union_sizes", "union_ids"), "*i32")
_POINTERS |= dict.fromkeys(("union_rows", "union_bits", "counts", "partly", "ranks", "entry_offsets", "item_offsets"), "*i32")
_POINTERS |= dict.fromkeys(("num_items", "entries", "items"), "*i32")
_UNIT_STRIDES = {"stride_q_d", "stride_k_dim", "stride_v_dim", "stride_blocks_k", "stride_table_p"}


def _variant(name: str, fn: Any, dtype: str, page_size: int, constexprs: Mapping[str, Any], **options: Any) -> Variant:
    known, arguments = dict(constexprs), {}
    for argument in fn.arg_names:
        if argument in known:
            continue
        if argument in _UNIT_STRIDES:
            known[argument] = 1
        elif argument in ("k_tma", "v_tma") and known["TMA"]:
            arguments[argument] = f"tensordesc<{dtype}[1, 1, {known['KEYS']}, {known['DIM_PADDED']}]>"
        elif argument in ("k_tma", "v_tma") or (argument == "page_table" and not page_size):
            known[argument] = None
        elif argument in ("q", "k", "v", "out", "o_part"):
            arguments[argument] = f"*{dtype}"
        elif argument in _POINTERS:
            arguments[argument] = _POINTERS[argument]
        elif argument == "scale":
            arguments[argument] = "fp32"
        else:
            arguments[argument] = "i32:16" if argument.startswith("stride_") else "i32"
    return Variant(name, fn, arguments, {n: known[n] for n in fn.arg_names if n in known}, **options)


def prefill_variants(arch: int) -> Iterator[Variant]:
    """Every kernel at the layouts and head dims that are tuned or likely; see `openmsa.runtime.variants`."""
    cases = [("bf16", 128, 16, 128, 0), ("bf16", 128, 16, 128, 128), ("fp16", 128, 16, 128, 0), ("bf16", 128, 16, 128, 16)]
    cases += [("bf16", dim, 16, 128, 0) for dim in (64, 96, 192, 256)]
    cases += [("bf16", 128, group, 128, 0) for group in (1, 3, 4, 8)] + [
        ("bf16", 64, 3, block, 0) for block in (16, 48, 64, 256)
    ]
    for dtype, dim, group, block, page in cases:
        yield from _of_case(arch, dtype, dim, group, block, page)


def _of_case(arch: int, dtype: str, dim: int, group: int, block: int, page: int, topk: int = 16) -> Iterator[Variant]:
    config = prefill_config(dim, group, block, arch // 10)
    name = f"{dtype} d{dim} g{group} b{block} p{page}"
    by_row = page % block == 0
    heads = {"GROUP": group, "HEADS": config.heads, "PARTS": -(-group // MAX_HEADS)}
    dims = {"DIM": dim, "DIM_PADDED": power_of_two(dim)}
    rows = {"TOPK": topk, "SLOTS": power_of_two(topk), "TOKENS": config.union_tokens, "BLOCK": block}
    flags = {"PAGE_SIZE": page, "NEGATIVE": False}

    if dim == 128 and dtype == "bf16":
        lists = rows | {"PAGE_SIZE": page if by_row else 0, "HAS_OUTER": True}
        warps = min(8, max(1, rows["TOKENS"] * rows["SLOTS"] // 256))
        yield _variant(f"tile_lists {name}", tile_lists, dtype, page, lists, num_warps=warps)
        yield _variant(f"fill_lists {name}", fill_lists, dtype, page, rows | {"ITEM": config.outer_item}, num_warps=warps)
    if (dtype, dim, group, block, page) == ("bf16", 128, 16, 128, 0):
        yield _variant("bucket_offsets", bucket_offsets, dtype, page, {"ITEM": config.outer_item, "STEP": 2048}, num_warps=8)

    union = heads | dims | flags | {"TOKENS": config.union_tokens, "BLOCK": block, "KEYS": config.union_keys}
    union |= {"BY_ROW": by_row and block % config.union_keys == 0}
    union |= {"TMA": config.union_tma and union["BY_ROW"], "STAGES": config.union_stages}
    options = {"num_warps": config.union_warps, "num_stages": config.union_stages}
    wgmma = config.union_tokens * config.heads >= 64
    spill = 8 if arch == 100 else 0  # dim 64: one register, stored before the loops and read behind them
    yield _variant(f"union {name}", attend_union, dtype, page, union, wgmma=wgmma, dot=True, may_spill=spill, **options)

    outer = heads | dims | flags | {"TOKENS": config.outer_tokens, "TOPK": topk, "BLOCK": block, "KEYS": config.outer_keys}
    outer |= {"ITEM": config.outer_item}
    wgmma = config.outer_tokens * config.heads >= 64
    yield _variant(f"outer {name}", attend_outer, dtype, page, outer, wgmma=wgmma, dot=True, num_warps=config.outer_warps)

    merge = heads | dims | {"TILE_TOKENS": config.union_tokens, "TOKENS": config.combine_tokens, "TOPK": topk}
    merge |= {"CUTS": -(-block // config.outer_keys)}
    if page == 0:
        yield _variant(f"combine {name}", combine_outer, dtype, page, merge, num_warps=config.combine_warps)
