# SPDX-License-Identifier: MIT
"""This table says what `compile_check` expects of kernels with matrix products: where wgmma is due, and how much stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from openmsa.primitives.operands import KeyRows
from openmsa.runtime.recording import Launch

WGMMA_ROWS = 64  # A wgmma instruction multiplies at least so many rows.


class Known(NamedTuple):
    """Says what is expected of a kernel. wgmma: whether sm_90 must use it in a launch. may_spill: bytes of stack that a launch
    may have. matrix: whether a launch multiplies on the matrix unit."""

    wgmma: Callable[[Launch], bool] = lambda launch: False
    may_spill: Callable[[Launch], int] = lambda launch: 0
    matrix: Callable[[Launch], bool] = lambda launch: True


def constant(launch: Launch, *names: str) -> Any:
    """Returns the value of a constexpr, by the first of these names that the kernel has, alone or as the field of a NamedTuple.
    A run-time parameter that is always None or 1 counts too."""
    for (place, *_), value in launch.constexprs.items():
        held = {launch.kernel.arg_names[place]: value, **getattr(value, "_asdict", dict)()}
        for name in names:
            for key, found in held.items():
                if key.lower() == name.lower():
                    return getattr(found, "value", found)
    raise KeyError(f"{launch.name} has no constexpr named {' or '.join(names)}")


def always(launch: Launch) -> bool:
    """Expects wgmma in every launch, as products always have enough rows."""
    return True


def sixteen_bits(launch: Launch) -> bool:
    """Expects matrix instructions where gradients are of 16-bit numbers; float32 is multiplied without them."""
    return bool(constant(launch, "precision") != "ieee")


def gradients(launch: Launch) -> bool:
    """Expects wgmma of gradients where a tile has enough keys or rows."""
    return sixteen_bits(launch) and max(constant(launch, "keys"), constant(launch, "rows")) >= WGMMA_ROWS


def tiles(launch: Launch) -> bool:
    """Expects wgmma where a tile of tokens times heads has enough rows."""
    return constant(launch, "TOKENS") * constant(launch, "HEADS") >= WGMMA_ROWS


def by_arch(plain: Mapping[int, int], stored: Mapping[int, int] | None = None) -> Callable[[Launch], int]:
    """Allows so many bytes by architecture; stored: those where keys are in a format."""
    return lambda launch: (stored if stored and constant(launch, "FORMAT") else plain).get(launch.arch, 0)


def scoring(launch: Launch) -> int:
    """Allows a few bytes, as registers are capped or full, and many where rows of plain keys are no multiple of 16 elements
    apart: such keys are read through an address a row."""
    place = launch.kernel.arg_names.index("keys")
    s_row = (place, KeyRows._fields.index("s_row"))
    odd = constant(launch, "FORMAT") == 0 and not launch.attributes.get(s_row) and s_row not in launch.constexprs
    return 720 if odd else {80: 32, 90: 40, 100: 16, 120: 16}[launch.arch]


def losses(launch: Launch) -> int:
    """Allows a few bytes for 16-bit numbers, as registers are full, and more for float32."""
    return {80: 16, 90: 48, 100: 16, 120: 24}[launch.arch] if sixteen_bits(launch) else 208


def merges(launch: Launch) -> bool:
    """Expects wgmma where a merge attends to home blocks."""
    return constant(launch, "start") > 0


STORED = {80: 96, 90: 104, 100: 216}  # Integer arithmetic converts on sm_80; blocks of two pages have two factors.

KNOWN = {
    "score_kernel": Known(always, scoring),
    "fused_kernel": Known(always, by_arch({80: 48, 90: 64, 100: 8, 120: 32})),  # It spills in its last steps only.
    "rescore_kernel": Known(always),
    "bounds_kernel": Known(may_spill=by_arch({100: 8})),  # With dim 80 two registers are stored before the loops.
    "lane_kernel": Known(),
    # This one spills in the last tiles of a walk.
    "sm90_score_kernel": Known(always, lambda launch: 160 if constant(launch, "MODE") else 0),
    "sm90_lane_kernel": Known(),
    "sm90_few_kernel": Known(),
    "sm90_best_kernel": Known(always),
    # In prefill with dim 64 one register is stored before the loops and read behind them.
    "attend_union": Known(tiles, by_arch({100: 8}, STORED)),
    "attend_outer": Known(tiles, by_arch({}, STORED)),
    "attend_few": Known(tiles, by_arch({80: 8, 90: 8, 100: 16, 120: 72})),
    # Hopper's union kernels spill before their loops; for groups other than 16 heads, also between tiles.
    "sm90_attend_kernel": Known(always, lambda launch: 0 if constant(launch, "group") == 16 else 16),
    "sm90_union_kernel": Known(always, lambda launch: 16 if constant(launch, "GROUP") == 16 else 88),
    # The loading warp stores numbers of the item, the others some where values behind the keys are cleared.
    "sm90_outer_kernel": Known(always, by_arch({90: 56})),
    # For float16, numbers are stored once a tile.
    "sm90_merge_kernel": Known(merges, lambda launch: 112 if "*fp16" in launch.signature["partials"] else 0, merges),
    # Where largest scores of blocks are stored, one register does not fit.
    "sm90_dense_kernel": Known(always, by_arch({90: 8})),
    "sparse_decode_kernel": Known(may_spill=by_arch({120: 8})),  # One register is stored before the loops.
    # Where a row may see more blocks than a warp holds, one register is stored and read back, twice.
    "layer_kernel": Known(may_spill=lambda launch: 16 if launch.arch == 120 and constant(launch, "far") else 0),
    "select_and_attend_kernel": Known(may_spill=by_arch({120: 8})),  # One register is stored and read back once.
    # Gradients fill the registers with four sums and two products; addresses of gathered rows are stored and read back.
    "block_gradients": Known(gradients, by_arch({80: 104, 90: 184, 100: 24}), sixteen_bits),
    # Two sums, two products and two factors fill the registers; numbers of the item are stored and read back.
    "sm90_gradients_kernel": Known(always, by_arch({90: 64})),
    "key_gradients": Known(gradients, by_arch({80: 80, 90: 48}), sixteen_bits),
    "row_gradients": Known(gradients, by_arch({80: 8, 100: 8}), sixteen_bits),
    # The index loss stores addresses of gathered rows; of float32 numbers it holds the factors of four products.
    "lse_parts": Known(gradients, matrix=sixteen_bits),
    "loss_items": Known(gradients, losses, sixteen_bits),
    "add_index_items": Known(may_spill=by_arch({80: 16}), matrix=lambda launch: False),
    # Two registers are stored in front of a turn over many blocks, which waits for memory anyway.
    "look_up_kernel": Known(may_spill=by_arch({120: 16}), matrix=lambda launch: False),
    "select_kernel": Known(may_spill=by_arch({80: 8, 90: 8}), matrix=lambda launch: False),  # With the candidates of 8 ranks.
    # In dense attention 128 rows on 4 warps spill, mostly in the masked tail, and are faster than fewer rows.
    "dense_kernel": Known(
        lambda launch: constant(launch, "rows") >= WGMMA_ROWS, lambda launch: 640 if constant(launch, "rows") == 128 else 128
    ),
}
