# SPDX-License-Identifier: MIT
"""When a decode layer is one launch, how it is cut into programs, and the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from openmsa.decode.triton_layer import EVERY, layer_kernel
from openmsa.decode.triton_select import LANES
from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.primitives.rows import Tile
from openmsa.runtime import devices
from openmsa.runtime.devices import Device
from openmsa.runtime.integers import ceil_div, next_power_of_two
from openmsa.runtime.launch import launch_kernel
from openmsa.sparse_attention import triton_decode

MAX_BLOCKS = 256  # up to which one launch was measured to be faster: of 32K keys, and
MAX_ROWS = 2  # outputs (token and head) a multiprocessor: four sequences of 64 heads, not eight
RESIDENT = 4  # programs of all kinds a multiprocessor, for which scoring is cut
MOST_SPLITS = 64  # that a merge program holds
LEAST_SHARE = 2  # tiles a scoring program: with one, programs of all kinds are too many to be resident together
FETCH_BYTES = 12 << 20  # of index keys fetched ahead of the kernel in front: faster for one sequence of 8K or 32K, not for two


@dataclass(frozen=True)
class Sizes:
    """What a layer of a plan looks like."""

    new_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_key_heads: int
    index_dim: int
    page_size: int
    num_blocks: int
    topk: int
    init_blocks: int
    local_blocks: int
    block_size: int


@dataclass(frozen=True)
class Config:
    """attend: of the attention programs. score_tiles: key tiles a scoring program. rows: its (token, head) rows, padded.
    reps: scores of a row that a thread holds. merging: programs that merge splits, `merge_parts` an output."""

    attend: triton_decode.Config
    score_tiles: int
    score_splits: int
    score_stages: int
    rows: int
    reps: int
    scoring: int
    attending: int
    merging: int
    merge_parts: int

    @property
    def programs(self) -> int:
        return self.scoring + self.attending + self.merging


def configure(batch: int, sizes: Sizes, device: Device) -> Config | None:
    """How one launch serves `batch` sequences; None where three launches do. A pure function."""
    attend, attending = attend_config(batch, sizes, device)
    tile = Tile.of(sizes.block_size)
    whole = tile.whole and sizes.page_size % tile.span == 0  # pages hold whole tiles
    outputs = batch * sizes.new_tokens * sizes.num_q_heads
    if attend.lookup or not whole or sizes.num_blocks > MAX_BLOCKS:
        return None
    if attending > 2 * device.num_sms or outputs > MAX_ROWS * device.num_sms:
        return None
    merge_parts = 2 if attend.tiles == 1 and outputs <= device.num_sms else 1  # where splits are many
    merging = outputs * merge_parts if attend.splits > 1 else 0
    tiles, walks = tile.count(sizes.num_blocks), batch * sizes.index_key_heads
    room = max(RESIDENT * device.num_sms - attending - merging, (1 + (attending > device.num_sms)) * device.num_sms)
    share = min(max(ceil_div(tiles * walks, room), LEAST_SHARE), tiles)
    share = ceil_div(share, tile.parts) * tile.parts
    splits = ceil_div(tiles, share)
    rows = max(16, next_power_of_two(sizes.new_tokens * sizes.index_heads // sizes.index_key_heads))
    reps = max(next_power_of_two(sizes.num_blocks) // LANES.value, 1)
    stages = 1 if share == 1 else 3
    return Config(attend, share, splits, stages, rows, reps, walks * splits, attending, merging, merge_parts)


def attend_config(batch: int, sizes: Sizes, device: Device) -> tuple[triton_decode.Config, int]:
    """Of the attention programs, and their number: as for a launch of their own, but a tile of 64 keys each where that makes at
    most one program a multiprocessor, or two for one or two tokens, because a merge costs no counter here."""
    tokens, group = batch * sizes.new_tokens, sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    config = triton_decode.configure(tokens, *shape, device)
    walks = tokens * sizes.num_kv_heads * triton_decode.row_tiles(group, sizes.head_dim)[1]
    finest = ceil_div(sizes.topk * sizes.block_size, 64)
    if config.keys >= 64 and finest <= MOST_SPLITS and walks * finest <= (2 if tokens <= 2 else 1) * device.num_sms:
        config = replace(config, keys=64, tiles=1, splits=finest)
    return replace(config, num_stages=min(config.tiles, 2) + 1), walks * config.splits


@dataclass(frozen=True)
class Workspace:
    """Words of one launch at a time; `counter` numbers the launches, of which 0 is none."""

    words: Tensor  # int64 [tokens, index heads, num_blocks]
    part: Tensor  # int64 [tokens, q heads, splits, head_dim]
    part_lse: Tensor  # int64 [tokens, q heads, splits]
    counter: Tensor  # int64 [1]

    @classmethod
    def allocate(cls, tokens: int, splits: int, sizes: Sizes, device: torch.device) -> Workspace:
        """tokens, splits: of the largest launch, and the most tokens x splits of one (0: none splits)."""
        counts = (tokens * sizes.index_heads * sizes.num_blocks, splits * sizes.num_q_heads * sizes.head_dim)
        words, part, part_lse = (
            torch.zeros(n, dtype=torch.int64, device=device) for n in (*counts, splits * sizes.num_q_heads)
        )
        return cls(words, part, part_lse, torch.full((1,), 1 << 20, dtype=torch.int64, device=device))


def launch(
    config: Config,
    sizes: Sizes,
    workspace: Workspace,
    q: Tensor,
    kv: PagedKV,
    index_q: Tensor,
    index_keys: PagedIndexKeys,
    softmax_scale: float,
    blocks: Tensor,
    out: Tensor,
    lse: Tensor,
    pdl: bool = False,
    kind: int = EVERY.value,
) -> None:
    """One layer. pdl: may be launched before the kernel in front has ended, and waits for its end inside.
    kind: EVERY, or programs of one kind alone, for an interpreter that runs one program after the other."""
    attend, tile, pool = config.attend, Tile.of(sizes.block_size), index_keys.keys
    programs = (config.programs, config.scoring, config.attending, config.merging)[kind]
    if programs == 0:
        return
    tma = devices.facts(pool.device).has_tma and describable(pool)
    read = kv.batch * sizes.index_key_heads * sizes.num_blocks * sizes.block_size * sizes.index_dim * pool.element_size()
    launch_kernel(
        layer_kernel,
        (programs,),
        index_q,
        describe(pool, tile.tile) if tma else pool,
        pool,
        index_keys.page_table,
        index_keys.seq_lens,
        q,
        kv.k,
        kv.v,
        kv.page_table,
        kv.seq_lens,
        workspace.words,
        workspace.part,
        workspace.part_lse,
        workspace.counter,
        blocks,
        out,
        lse,
        softmax_scale,
        sizes.new_tokens,
        sizes.num_blocks,
        index_keys.num_pages,
        index_keys.capacity,
        kv.num_pages,
        kv.capacity,
        config.score_splits,
        config.score_tiles,
        attend.tiles,
        config.scoring,
        config.attending,
        config.programs,
        *index_q.stride(),
        *pool.stride(),
        index_keys.page_table.stride(0),
        *q.stride(),
        *kv.k.stride(),
        *kv.v.stride(),
        *kv.page_table.stride(),
        *out.stride(),
        *lse.stride(),
        **constants(config, sizes),
        TMA=tma,
        KIND=kind,
        PDL=pdl,
        FETCH=pdl and tma and read <= FETCH_BYTES,
        num_warps=attend.num_warps,
        **({"launch_pdl": True} if pdl else {}),
    )


def describable(pool: Tensor) -> bool:
    """Whether the copy engine can read it: rows contiguous, every stride a multiple of 16 bytes."""
    outer = [stride * pool.element_size() for stride in pool.stride()[:-1]]
    aligned = pool.data_ptr() % 16 == 0 and all(0 < stride < 2**40 and stride % 16 == 0 for stride in outer)
    return pool.numel() > 0 and pool.stride(3) == 1 and aligned


def describe(pool: Tensor, rows: int) -> TensorDescriptor:
    """For the copy engine: `rows` keys of one page and head at a time."""
    return TensorDescriptor(pool, list(pool.shape), list(pool.stride()), [1, 1, rows, next_power_of_two(pool.shape[3])])


def constants(config: Config, sizes: Sizes) -> dict[str, int | bool]:
    """What the kernel is compiled for, beside the way of reading keys and of launching."""
    attend, splits = config.attend, config.attend.splits
    return Tile.of(sizes.block_size).constexprs() | {
        "INDEX_HEADS": sizes.index_heads,
        "INDEX_KEY_HEADS": sizes.index_key_heads,
        "DIM": sizes.index_dim,
        "DIM_PAD": next_power_of_two(sizes.index_dim),
        "INDEX_PAGE": sizes.page_size,
        "ROWS": config.rows,
        "SHARE": next_power_of_two(config.score_tiles),
        "SCORE_STAGES": config.score_stages,
        "HEADS": sizes.num_kv_heads,
        "G": sizes.num_q_heads // sizes.num_kv_heads,
        "D": sizes.head_dim,
        "TOPK": sizes.topk,
        "TOPK_PAD": next_power_of_two(sizes.topk),
        "INIT": sizes.init_blocks,
        "LOCAL": sizes.local_blocks,
        "PAGE": sizes.page_size,
        "PAGES_PAD": next_power_of_two(ceil_div(sizes.num_blocks * sizes.block_size, sizes.page_size)),
        "BM": attend.rows,
        "BN": attend.keys,
        "BD": next_power_of_two(sizes.head_dim),
        "TILES": attend.tiles,
        "SPLITS": splits,
        "SPLITS_PAD": next_power_of_two(splits),
        "REPS": config.reps,
        "MERGE_PARTS": config.merge_parts,
        "STAGES": attend.num_stages,
    }
