# SPDX-License-Identifier: MIT
"""What the decode kernel is compiled for without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from openmsa.decode.triton_launch import Config, Sizes, configure, constants
from openmsa.decode.triton_layer import EVERY, layer_kernel
from openmsa.primitives.rows import Tile
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.runtime.integers import next_power_of_two
from openmsa.runtime.variants import Variant


def compile_variants(arch: int) -> Iterator[Variant]:
    """M3 heads with 32K and 128K keys, several tokens, several sequences, other dims."""
    m3 = Sizes(1, 64, 4, 128, 4, 1, 128, 128, 256, 16, 0, 1, 128)
    cases = (
        ("B1 32K", "bf16", 1, m3),
        ("B4 8K", "fp16", 4, replace(m3, num_blocks=64)),
        ("B1 2 tokens", "bf16", 1, replace(m3, new_tokens=2, init_blocks=1)),
        ("d64 b256", "fp16", 1, Sizes(1, 12, 2, 64, 1, 1, 64, 256, 100, 8, 0, 1, 256)),
    )
    for name, dtype, batch, sizes in cases:
        config = configure(batch, sizes, COMPILE_TARGETS[arch])
        if config is not None:
            yield variant(f"{name} {dtype}", config, sizes, dtype, pdl=arch >= 90)


def variant(name: str, config: Config, sizes: Sizes, dtype: str, pdl: bool) -> Variant:
    """As a plan launches it."""
    rows = ("index_q", "index_keys", "key_pool", "q", "k", "v", "out")
    arguments = {name: f"*{dtype}" for name in rows} | {"lse": "*fp32", "scale": "fp32"}
    arguments |= dict.fromkeys(("index_table", "index_lens", "table", "seq_lens", "blocks"), "*i32")
    arguments |= dict.fromkeys(("words", "part", "part_lse", "counter"), "*i64")
    numbers = ("queries", "num_blocks", "index_pages", "index_capacity", "num_pages", "capacity", "score_splits", "score_tiles")
    arguments |= dict.fromkeys((*numbers, "tiles", "scoring", "attending", "programs"), "i32")
    wide = ("iqt", "iqh", "ip", "ih", "in", "itb", "qt", "qh", "kp", "kh", "kn", "vp", "vh", "vn", "tb", "ot", "oh", "lt")
    arguments |= dict.fromkeys((f"stride_{x}" for x in wide), "i32:16")
    fixed: dict[str, int | bool] = dict.fromkeys((f"stride_{x}" for x in ("iqd", "id", "qd", "kd", "vd", "tp", "od", "lh")), 1)
    tile, tma = Tile.of(sizes.block_size).tile, pdl  # both from Hopper on
    fixed |= constants(config, sizes) | {"TMA": tma, "KIND": EVERY.value, "PDL": pdl, "FETCH": pdl}
    if tma:
        arguments["index_keys"] = f"tensordesc<{dtype}[1, 1, {tile}, {next_power_of_two(sizes.index_dim)}]>"
    attend = config.attend
    return Variant(name, layer_kernel, arguments, fixed, attend.num_warps, attend.num_stages, dot=True)
