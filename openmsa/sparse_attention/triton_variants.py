# SPDX-License-Identifier: MIT
"""The prefill kernels as the host code launches them, for the compile check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.runtime.integers import next_power_of_two
from openmsa.runtime.variants import Variant
from openmsa.sparse_attention.triton_config import MAX_HEADS, padded_dim, prefill_config
from openmsa.sparse_attention.triton_expand import ROWS as EXPAND_ROWS
from openmsa.sparse_attention.triton_expand import expand_rows
from openmsa.sparse_attention.triton_few import attend_few, few_units
from openmsa.sparse_attention.triton_keys import TYPES, formats
from openmsa.sparse_attention.triton_lists import FEW, KV_OUTER, bucket_offsets, fill_lists, tile_lists
from openmsa.sparse_attention.triton_outer import attend_outer, combine_outer
from openmsa.sparse_attention.triton_union import attend_union

_POINTERS = dict.fromkeys(("lse", "lse_part"), "*fp32") | {"slots": "*i64"}
_POINTERS |= dict.fromkeys(("blocks", "cu_q", "cu_k", "q_offset", "page_table", "tiles", "union_sizes", "union_ids"), "*i32")
_POINTERS |= dict.fromkeys(("union_rows", "union_bits", "counts", "partly", "ranks", "entry_offsets", "item_offsets"), "*i32")
_POINTERS |= dict.fromkeys(("num_items", "entries", "items", "units", "unit_entries", "num_units", "wanted"), "*i32")
_UNIT_STRIDES = {"stride_q_d", "stride_k_dim", "stride_v_dim", "stride_blocks_k", "stride_table_p"}


@dataclass(frozen=True)
class _Stored:
    """Triton's types of queries, keys and outputs, how factors go, and the constexprs that follow."""

    q: str
    k: str
    out: str
    modes: Mapping[str, Any]
    torch_types: tuple[torch.dtype, torch.dtype]

    @classmethod
    def of(cls, q: str, keys: str, arch: int) -> _Stored:
        """q: "bf16", "fp16" or "e4m3". keys: "" (as q), "e4m3", "e4m3 page", "nvfp4" or "nvfp4 128x4"."""
        codes = ("fp8e4nv", torch.float8_e4m3fn) if arch >= 90 else ("u8", torch.uint8)
        plain = {"bf16": torch.bfloat16, "fp16": torch.float16}
        q_type, q_torch = codes if q == "e4m3" else (q, plain[q])
        form, _, detail = keys.partition(" ")
        k_type, k_torch = {"": (q_type, q_torch), "e4m3": codes, "nvfp4": ("u8", torch.uint8)}[form]
        scale = 0 if not form else 2 if detail == "page" else 1
        modes = {"FORMAT": FORMAT_IDS[form or "plain"], "K_SCALE": scale, "V_SCALE": scale, "SWIZZLED": detail == "128x4"}
        return cls(q_type, k_type, "bf16" if q == "e4m3" else q, modes, (q_torch, k_torch))

    def expanded(self, dtype: str) -> _Stored:
        """Of copies of the keys as numbers."""
        modes = {**self.modes, "FORMAT": 0, "SWIZZLED": False}
        return _Stored(self.q, dtype, self.out, modes, (self.torch_types[0], self.torch_types[0]))

    def constexprs(self, union: bool) -> dict[str, Any]:
        """Types and factors; None for what is not there."""
        known: dict[str, Any] = formats(*self.torch_types, dict(self.modes), union)
        if self.torch_types[0] in (torch.bfloat16, torch.float16):
            known |= {"q_factor": None, "stride_qf_h": 0}
        for x in "kv":
            if self.modes["FORMAT"] != FORMAT_IDS["nvfp4"]:
                known |= dict.fromkeys((f"{x}_groups", *(f"stride_{x}g_{d}" for d in ("page", "h", "row", "dim"))))
            if not self.modes["K_SCALE"]:
                known |= dict.fromkeys((f"{x}_factor", f"stride_{x}f_page", f"stride_{x}f_h"))
        return known


def _variant(name: str, fn: Any, stored: _Stored, page_size: int, constexprs: Mapping[str, Any], **options: Any) -> Variant:
    known, arguments = dict(constexprs), {}
    types = {"q": stored.q} | dict.fromkeys(("k", "v"), stored.k) | dict.fromkeys(("k_groups", "v_groups"), "u8")
    types |= dict.fromkeys(("k_factor", "v_factor", "q_factor"), "fp32")
    types |= dict.fromkeys(("out", "o_part", "k_out", "v_out"), stored.out)
    for argument in fn.arg_names:
        if argument in known:
            continue
        if argument in _UNIT_STRIDES:
            known[argument] = 1
        elif argument in ("k_tma", "v_tma") and known["TMA"]:
            arguments[argument] = f"tensordesc<{stored.k}[1, 1, {known['KEYS']}, {known['DIM_PADDED']}]>"
        elif argument in ("k_tma", "v_tma") or (argument in ("page_table", "q_offset") and not page_size):
            known[argument] = None
        elif argument in types:
            arguments[argument] = f"*{types[argument]}"
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
    plain = ((128, 16, 128, 0), (128, 16, 128, 128))
    for stored, q, layouts in (
        ("e4m3", "bf16", (*plain, (64, 3, 64, 16), (256, 16, 128, 0))),
        ("e4m3", "fp16", plain[:1]),
        ("e4m3", "e4m3", (*plain, (64, 4, 64, 0), (16, 4, 64, 64))),
        ("e4m3 page", "bf16", (plain[1], (64, 4, 64, 16))),
        ("nvfp4", "bf16", (*plain[:1], (16, 1, 16, 0))),
        ("nvfp4 128x4", "e4m3", plain[1:]),
    ):
        for dim, group, block, page in layouts:
            yield from _of_case(arch, q, dim, group, block, page, keys=stored)
    for stored, q, page in (("e4m3", "bf16", 128), ("e4m3", "fp16", 0), ("nvfp4", "bf16", 128), ("nvfp4 128x4", "bf16", 0)):
        yield _expand(arch, q, stored, page)
    yield from _of_case(arch, "bf16", 128, 16, 128, 0, keys="e4m3", expanded=True)


def _expand(arch: int, q: str, keys: str, page: int) -> Variant:
    stored = _Stored.of(q, keys, arch)
    known = {name: stored.modes[name] for name in ("FORMAT", "SWIZZLED")} | dict.fromkeys(("stride_kg_dim", "stride_vg_dim"), 1)
    if stored.modes["FORMAT"] != FORMAT_IDS["nvfp4"]:
        for x in "kv":
            known |= dict.fromkeys((f"{x}_groups", *(f"stride_{x}g_{d}" for d in ("page", "h", "row", "dim"))))
    known |= {"ROWS": EXPAND_ROWS, "DIM": 128, "DIM_PADDED": 128, "PAGE_SIZE": page, "TYPE": TYPES[stored.torch_types[0]]}
    return _variant(f"expand {q} {keys} p{page}", expand_rows, stored, page, known, num_warps=4)


def _of_case(
    arch: int,
    dtype: str,
    dim: int,
    group: int,
    block: int,
    page: int,
    topk: int = 16,
    keys: str = "",
    expanded: bool = False,
) -> Iterator[Variant]:
    is_stored = bool(keys) and not expanded
    config = prefill_config(dim, group, block, arch // 10, stored=is_stored, four_bits=is_stored and "nvfp4" in keys)
    stored = _Stored.of(dtype, keys, arch)
    if expanded:
        stored = stored.expanded(dtype)
    name = " ".join(filter(None, (dtype, keys, "expanded" * expanded, f"d{dim} g{group} b{block} p{page}")))
    by_row = page % block == 0
    heads = {"GROUP": group, "HEADS": config.heads, "PARTS": -(-group // MAX_HEADS)}
    dims = {"DIM": dim, "DIM_PADDED": padded_dim(dim, stored.torch_types[1])}
    rows = {"TOPK": topk, "SLOTS": next_power_of_two(topk), "TOKENS": config.union_tokens, "BLOCK": block}
    flags = {"PAGE_SIZE": page, "NEGATIVE": False}

    if dim == 128 and dtype == "bf16" and not keys and group in (3, 16):  # lists know tokens, blocks and pages alone
        lists = rows | {"PAGE_SIZE": page if by_row else 0, "has_union": None}
        warps = min(8, max(1, rows["TOKENS"] * rows["SLOTS"] // 256))
        outer, few = dict.fromkeys(("entries", "slots")) | {"REST": KV_OUTER.value}, {"ranks": None, "REST": FEW.value}
        yield _variant(f"tile_lists {name}", tile_lists, stored, page, lists | outer, num_warps=warps)
        yield _variant(f"tile_lists few {name}", tile_lists, stored, page, lists | few, num_warps=warps)
        yield _variant(f"fill_lists {name}", fill_lists, stored, page, rows | {"ITEM": config.outer_item}, num_warps=warps)
        few = {"TOKENS": config.union_tokens, "BLOCK": block, "PAGE_SIZE": lists["PAGE_SIZE"], "STEP": 2048}
        few |= {"BUCKETS": config.few_buckets, "AT_ONCE": 16}
        yield _variant(f"few_units {name}", few_units, stored, page, few, num_warps=4)
    if (dtype, dim, group, block, page, keys) == ("bf16", 128, 16, 128, 0, ""):
        yield _variant("bucket_offsets", bucket_offsets, stored, page, {"ITEM": config.outer_item, "STEP": 2048}, num_warps=8)

    union = heads | dims | flags | {"TOKENS": config.union_tokens, "BLOCK": block, "KEYS": config.union_keys}
    union |= {"BY_ROW": by_row and block % config.union_keys == 0}
    union |= {"TMA": config.union_tma and union["BY_ROW"] and "nvfp4" not in keys, "STAGES": config.union_stages}
    few = union | {"TOPK": topk, "HOLD": config.few_hold}
    union |= stored.constexprs(True)
    options = {"num_warps": config.union_warps, "num_stages": config.union_stages}
    wgmma = config.union_tokens * config.heads >= 64
    spill = 8 if arch == 100 else 0  # dim 64: one register, stored before the loops and read behind them
    if keys and not expanded:  # conversions by integer arithmetic on sm_80, factors of two pages a block
        spill = {80: 96, 90: 104, 100: 216, 120: 0}[arch]
    yield _variant(f"union {name}", attend_union, stored, page, union, wgmma=wgmma, dot=True, may_spill=spill, **options)

    if not keys and dim <= 128:
        spill = {80: 8, 90: 8, 100: 16, 120: 72}[arch]
        yield _variant(f"few {name}", attend_few, stored, page, few, wgmma=wgmma, dot=True, may_spill=spill, **options)

    outer = heads | dims | flags | {"TOKENS": config.outer_tokens, "TOPK": topk, "BLOCK": block, "KEYS": config.outer_keys}
    outer |= {"ITEM": config.outer_item} | stored.constexprs(False)
    wgmma = config.outer_tokens * config.heads >= 64
    yield _variant(
        f"outer {name}",
        attend_outer,
        stored,
        page,
        outer,
        wgmma=wgmma,
        dot=True,
        may_spill=spill if keys else 0,
        num_warps=config.outer_warps,
    )

    merge = heads | dims | {"TILE_TOKENS": config.union_tokens, "TOKENS": config.combine_tokens, "TOPK": topk}
    merge |= {"CUTS": -(-block // config.outer_keys)}
    if page == 0 and not keys and (block == 128 or dim == 64):
        yield _variant(f"combine {name}", combine_outer, stored, page, merge, num_warps=config.combine_warps)
    if page == 0 and not keys and dim <= 128 and (block == 128 or dim == 64):
        merge |= {"CUTS": 1}
        yield _variant(f"merge {name}", combine_outer, stored, page, merge, num_warps=2 * config.combine_warps)
