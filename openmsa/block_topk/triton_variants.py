# SPDX-License-Identifier: MIT
"""Variants of the scoring kernel for compiling without a GPU, and what the selecting kernel's have in common with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton.language as tl

from openmsa.block_scores.triton_config import config
from openmsa.block_scores.triton_lanes import lane_kernel
from openmsa.block_scores.triton_score_kernel import score_kernel
from openmsa.block_topk.triton_bounds import Words, bounds_config, bounds_kernel
from openmsa.primitives import codes
from openmsa.primitives.rows import FLAT, PAGE, PAGES, Tile
from openmsa.primitives.scoring import RUNTIME_LENGTHS
from openmsa.primitives.walks import Config, Kind
from openmsa.runtime.devices import COMPILE_TARGETS, Device
from openmsa.runtime.variants import Variant

_FORMATS = {"plain": codes.PLAIN, "e4m3": codes.E4M3, "int8": codes.INT8, "nvfp4": codes.NVFP4, "mxfp4": codes.MXFP4}
_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "e4m3": tl.float8e4nv}


@dataclass(frozen=True)
class Operands:
    """query: "bf16", "fp16" or "e4m3". keys: a format, with "128x4" behind it for swizzled scales, "head" or "page" for the
    scales of e4m3, "apart" for those of int8 that do not lie beside the errors. mode: FLAT, PAGE or PAGES."""

    query: str
    keys: str
    dim: int
    tile: Tile
    mode: int
    tma: bool

    @property
    def name(self) -> str:
        """Of a variant."""
        where = ("flat", "page", "pages")[self.mode] + (" tma" if self.tma else "")
        return f"{self.query} x {self.keys} d{self.dim} b{self.tile.block} {where}"

    @property
    def format(self) -> int:
        return _FORMATS[self.keys.split()[0]]

    def product(self, device: Device) -> Any:
        """As `QuerySource.of` chooses it."""
        if self.query != "e4m3":
            return _TYPES[self.query]
        if self.format == codes.E4M3:
            return tl.float8e4nv if device.arch >= 90 else tl.float16
        return tl.bfloat16

    def kind(self, device: Device) -> Kind:
        """As `kind_of` gives it."""
        return Kind.of(self.dim, self.tile.tile, self.format, self.product(device), self.mode != FLAT, self.tma, self.lanes)

    @property
    def lanes(self) -> bool:
        """As `KeySource.of_pool` finds it."""
        return (self.format, self.dim, self.tile.tile, self.tile.sub) == (codes.NVFP4, 128, 128, 1) and self.mode != PAGES

    @property
    def absent_lengths(self) -> dict[str, Any]:
        """Packed keys as `Layout` gives lengths, pages as a decode plan does."""
        return dict.fromkeys(("seq_lens",) if self.mode == FLAT else ("cu_k", "q_offset"))

    @property
    def scales(self) -> str:
        """Type of the scales as `Scales.of` takes them."""
        if self.format < codes.NVFP4:
            return "*bf16" if "apart" in self.keys else "*i32" if self.format == codes.INT8 else "*fp32"
        return "*u8" if self.dim != 128 else "*i64" if self.keys == "nvfp4" else "*i32"

    def arguments(self, device: Device) -> tuple[dict[str, str], dict[str, Any]]:
        """Types of the run-time arguments and values of the constexprs that both kernels take."""
        e4m3 = "fp8e4nv" if device.arch >= 90 else "u8"
        element = {codes.PLAIN: "bf16" if self.query == "e4m3" else self.query, codes.E4M3: e4m3}
        stored = element.get(self.format, "i16")
        split = {codes.INT8: 2, codes.NVFP4: 4, codes.MXFP4: 4}.get(self.format, 1)
        box = f"[1, 1, {self.tile.tile}, {codes.padded(self.dim, self.format) // split}]"
        types = {"q": "*" + (e4m3 if self.query == "e4m3" else self.query)}
        types["keys"] = f"tensordesc<{stored}{box}>" if self.tma else f"*{stored}"
        types |= dict.fromkeys(("page_table", "cu_q", "cu_k", "q_offset"), "*i32")
        types |= dict.fromkeys(("s_qt", "s_qh", "s_page", "s_head", "s_token", "s_gp", "s_table"), "i32:16")
        types |= dict.fromkeys(("s_gh", "s_gt", "s_qs", "s_kf"), "i32")
        types |= {
            "q_scale": "*fp32",
            "k_factor": "*fp32",
            "scales": self.scales,
        }
        constants: dict[str, Any] = {"s_qd": 1, "s_dim": 1, "s_gg": 1, "KEY_HEADS": 1, "GROUP": 4, "DIM": self.dim}
        constants |= self.tile.constexprs() | {
            "DIM_PAD": codes.padded(self.dim, self.format),
            "MODE": self.mode,
            "TMA": self.tma,
        }
        constants |= {"FORMAT": self.format, "SCALE": codes.NO_SCALE, "SWIZZLED": "128x4" in self.keys, "SPLIT": split}
        constants["NATIVE"] = device.arch >= 90
        constants |= {"PRODUCT": self.product(device), "PAGE_SIZE": {FLAT: 1, PAGE: self.tile.span, PAGES: 16}[self.mode]}
        absent = ["page_table", "q_offset"] if self.mode == FLAT else []
        absent += [] if self.query == "e4m3" else ["q_scale"]
        absent += [] if self.format == codes.NVFP4 or "head" in self.keys else ["k_factor"]
        if self.format == codes.INT8:
            constants["SCALE"] = codes.KEY_SCALE
        elif "page" in self.keys:
            constants["SCALE"] = codes.TILE_SCALE if self.mode == PAGE else codes.KEY_SCALE
        elif self.format < codes.NVFP4:
            absent.append("scales")
        return types, constants | dict.fromkeys(absent)


def variant(name: str, fn: Any, types: dict[str, str], constants: dict[str, Any], chosen: Any, slack: int) -> Variant:
    """chosen: a configuration of either kernel."""
    constants |= {"ROWS": chosen.rows, "SWAP": chosen.swap, "HOLD": chosen.hold, "STAGES": chosen.num_stages}
    constants["GROUPED"] = chosen.grouped
    registers = getattr(chosen, "max_registers", None)
    types = {name: kind for name, kind in types.items() if name not in constants}
    return Variant(
        name, fn, types, constants, chosen.num_warps, chosen.num_stages, wgmma=True, may_spill=slack, maxnreg=registers
    )


def compile_variants(arch: int) -> Iterator[Variant]:
    """Every format, flat and paged, many rows and few, odd dims and blocks; then bounds."""
    device = COMPILE_TARGETS[arch]
    for query, keys, rows, dim, block_size, mode, tma, fill in (
        ("bf16", "plain", 65536, 128, 128, FLAT, True, True),
        ("bf16", "plain", 65536, 128, 128, PAGE, True, False),
        ("fp16", "plain", 65536, 128, 128, FLAT, False, False),
        ("bf16", "plain", 65536, 128, 128, PAGES, False, False),
        ("bf16", "plain", 65536, 64, 64, PAGE, True, False),
        ("fp16", "plain", 65536, 256, 256, FLAT, True, False),
        ("bf16", "plain", 65536, 80, 48, FLAT, True, True),
        ("bf16", "plain", 4, 128, 128, PAGE, True, False),
        ("fp16", "plain", 4, 128, 128, PAGE, False, False),
        ("bf16", "plain", 64, 128, 128, FLAT, True, True),
        ("bf16", "plain", 8, 64, 32, PAGES, False, False),
        ("e4m3", "e4m3", 65536, 128, 128, FLAT, True, True),
        ("e4m3", "e4m3 head", 65536, 128, 128, PAGE, True, False),
        ("e4m3", "e4m3 page", 65536, 128, 128, PAGES, False, False),
        ("e4m3", "e4m3", 4, 128, 128, PAGE, True, False),
        ("e4m3", "e4m3", 65536, 16, 16, PAGE, True, False),
        ("e4m3", "plain", 4, 128, 128, PAGE, True, False),
        *(
            ("bf16", keys, rows, 128, 128, PAGE, True, False)
            for keys in ("e4m3", "e4m3 page", "int8", "nvfp4", "nvfp4 128x4", "mxfp4")
            for rows in (4, 1024)
        ),
        ("e4m3", "nvfp4", 4, 128, 128, PAGE, True, False),
        ("fp16", "nvfp4", 4, 128, 256, FLAT, False, True),
        ("bf16", "nvfp4", 8, 128, 128, PAGE, True, False),
        ("bf16", "nvfp4", 4, 64, 64, PAGE, True, False),
        ("fp16", "mxfp4", 4, 128, 128, FLAT, True, False),
        ("fp16", "int8", 1024, 64, 64, FLAT, False, True),
        ("bf16", "nvfp4", 1024, 80, 48, PAGES, False, False),
    ):
        operands = Operands(query, keys, dim, Tile.of(block_size), mode, tma and device.has_tma)
        yield _variant(device, operands, rows, fill)
    for query, rows, dim, block_size, mode, tma in (
        ("bf16", 4, 128, 128, PAGE, True),
        ("fp16", 8, 128, 128, FLAT, True),
        ("bf16", 16, 128, 128, PAGE, True),
        ("bf16", 16, 64, 32, PAGES, False),
        ("bf16", 4, 80, 256, PAGE, True),
        ("bf16", 4, 256, 48, PAGES, False),
    ):
        keys = "int8" if dim == 128 else "int8 apart"
        yield _bounds(device, Operands(query, keys, dim, Tile.of(block_size), mode, tma and device.has_tma), rows)


def _variant(device: Device, operands: Operands, rows: int, fill: bool) -> Variant:
    types, constants = operands.arguments(device)
    chosen = config(device, rows, operands.kind(device))
    types |= dict.fromkeys(("s_sh", "s_st", *RUNTIME_LENGTHS), "i32")
    types |= {"scores": "*fp32", "visible": "*i32", "seq_lens": "*i32"}
    if chosen.lanes:
        return _lane_variant(device, operands, types, constants, chosen, fill)
    constants |= {"s_sb": 1, "FILL": fill, "PDL": rows <= 64 and device.has_tma, "seq_lens": None}
    constants["COLLECT"] = not chosen.swap and operands.tile.sub == operands.tile.parts == 1
    constants |= {"visible": None} if fill else {}
    slack = {80: 8, 90: 40, 100: 16, 120: 16}[device.arch]  # registers are capped or full; on sm_90 none inside the long walk
    return variant(f"{'few' if rows <= 64 else 'many'} {operands.name}", score_kernel, types, constants, chosen, slack)


def _bounds(device: Device, operands: Operands, rows: int) -> Variant:
    types, constants = operands.arguments(device)
    chosen = bounds_config(device, rows, operands.dim, operands.tile, operands.mode != FLAT, operands.tma)
    types["keys"] = f"tensordesc<i8[1, 1, {operands.tile.tile}, {constants['DIM_PAD']}]>" if operands.tma else "*i8"
    types["candidates"] = Words.of(rows, operands.tile).type
    types |= {"bounds": "*fp32", "errors": "*bf16"} | dict.fromkeys(("visible", "seq_lens"), "*i32")
    types |= dict.fromkeys(("s_side", "s_sh", "s_st", *RUNTIME_LENGTHS), "i32")
    types |= {"s_ep": types["s_gp"], "s_eh": types["s_gh"], "s_et": types["s_gt"]}
    constants |= {"ROWS": chosen.rows, "STAGES": chosen.num_stages, "PDL": device.has_tma}
    constants |= {} if "apart" in operands.keys else {"errors": None, "s_gt": 1, "s_ep": 0, "s_eh": 0, "s_et": 0}
    constants |= operands.absent_lengths
    names = bounds_kernel.arg_names
    types = {name: kind for name, kind in types.items() if name in names and name not in constants}
    constants = {name: value for name, value in constants.items() if name in names}
    name = f"bounds {operands.name} x {rows}"
    return Variant(name, bounds_kernel, types, constants, chosen.num_warps, chosen.num_stages, dot=True)


def _lane_variant(
    device: Device, operands: Operands, types: dict[str, str], constants: dict[str, Any], chosen: Config, fill: bool
) -> Variant:
    constants |= {"s_sb": 1, "FILL": fill, "PDL": device.has_tma, "seq_lens": None, "ROWS": chosen.rows}
    constants |= {"CHUNK": chosen.lanes, "STAGES": chosen.num_stages}
    constants |= {"visible": None} if fill else {}
    constants = {k: v for k, v in constants.items() if k in lane_kernel.arg_names}
    types |= {"keys": "*i16", "scales": "*i32"}
    types = {name: kind for name, kind in types.items() if name in lane_kernel.arg_names and name not in constants}
    name, registers = f"lanes {operands.name} r{chosen.rows}", chosen.max_registers
    return Variant(name, lane_kernel, types, constants, chosen.num_warps, 1, dot=True, maxnreg=registers)
