# SPDX-License-Identifier: MIT
"""Pure functions choose the tiles and splits of the dense kernel here."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from openmsa.kv_cache.triton_numbers import LEAST_SUM
from openmsa.primitives.operands import NVFP4
from openmsa.runtime.devices import Device
from openmsa.runtime.launch import next_power_of_two

MAX_SPLITS = 64
MIN_SHARE = 4  # A program has at least so many spans of keys.
LONGEST_WALK = 1 << 16  # Splits keep a program's walk to so many keys where a batch holds sequences of very different lengths.


@dataclass(frozen=True)
class Config:
    """Says how a call is cut. rows: (token, head) pairs a program; keys: keys a tile; splits: programs that share the keys of a
    tile of rows. qk8: whether E4M3 queries and keys are multiplied as they are; otherwise stored numbers become float16 first.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int
    qk8: bool = False

    def stages_rows(self, stored: bool, half: bool, arch: int) -> bool:
        """Tells whether queries pass through memory once they are converted, as the matrix unit reads loaded rows from shared
        memory, and computed rows fill registers. stored: whether queries or keys have a format; half: whether queries are
        float16."""
        return arch == 90 and self.rows >= 64 and stored and not half and not self.qk8


@functools.lru_cache(256)
def configure(
    batch: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    device: Device,
    key_format: str = "plain",
    query_format: str = "plain",
    max_score: bool = False,
) -> Config:
    """Chooses tiles and splits; it is a pure function. max_score: whether products are a result, made in float16 then, because
    Hopper's matrix unit makes products of E4M3 numbers that are off by up to 3e-4 of the largest."""
    pairs, roomy, stored = max_seqlen_q * group, device.shared_bytes > 128 * 1024, key_format != "plain"
    if pairs <= 32:  # Bytes bound the call: a multiprocessor has one program with deep buffers.
        keys = 64 if head_dim <= 128 else 32
        config, resident = Config(16 if pairs <= 16 else 32, keys, 1, 4, 4 if roomy else 3), 1
        if stored and roomy:  # Conversions bound it too: one of two programs loads while the other converts.
            config, resident = replace(config, keys=2 * keys, num_stages=3), 2
    elif head_dim <= 128 and device.arch == 90 and pairs >= 512:
        config, resident = Config(128, 64, 1, 4, 3 if stored else 2), 2
    elif head_dim <= 128:
        config, resident = Config(64, 64, 1, 8 if stored and device.arch != 90 else 4, 3 if roomy else 2), 2
    else:
        config, resident = Config(64, 32, 1, 8, 2), 2
    programs = max(batch * num_kv_heads * -(-pairs // config.rows), 1)
    splits = max(resident * device.num_sms // programs, max_seqlen_k // LONGEST_WALK if pairs <= 32 else 1)
    useful = -(-max_seqlen_k // (MIN_SHARE * config.keys))
    qk8 = key_format == query_format == "e4m3" and device.arch >= 90 and head_dim > 16 and not max_score
    return replace(config, splits=max(1, min(splits, useful, MAX_SPLITS)), qk8=qk8)


def padded_dim(head_dim: int, key_format: int) -> int:
    """Returns the elements of a row of a tile: a power of two, at least what a product sums. key_format: see `Form`."""
    return max(next_power_of_two(head_dim), LEAST_SUM if key_format == NVFP4 else 16)


class Cut(NamedTuple):
    """Says how rows and keys are cut into tiles; the kernel is compiled for it.

    group:      query heads that share a KV head; neighbouring rows of a tile are heads of one group.
    rows, keys: rows and keys of a tile.
    span:       keys that make one tile or, where they are more than `keys`, all tiles of one block.
    blocks:     blocks in a tile that holds several.
    page_size:  keys in a page; 0 where keys are packed.
    dim:        elements of a row, which are padded to `dim_pad`.
    qk8:        whether E4M3 queries and keys are multiplied as they are.
    """

    group: int
    rows: int
    keys: int
    span: int
    blocks: int
    page_size: int
    dim: int
    dim_pad: int
    qk8: bool

    @classmethod
    @functools.lru_cache(256)
    def of(cls, config: Config, group: int, dim: int, page_size: int, key_format: int, block_size: int | None) -> Cut:
        """Computes the cut of a call. key_format: see `Form`. block_size: None without max scores."""
        span, blocks = spans(config.keys, block_size)
        return cls(group, config.rows, config.keys, span, blocks, page_size, dim, padded_dim(dim, key_format), config.qk8)


def spans(keys: int, block_size: int | None) -> tuple[int, int]:
    """Returns keys a span and blocks a tile: without max scores (block_size None) a span is a tile; with them tiles keep to
    blocks, several blocks a tile where they divide it, else one block a span of one or more tiles."""
    if block_size is None:
        return keys, 1
    return (keys, keys // block_size) if keys % block_size == 0 else (block_size, 1)
