# SPDX-License-Identifier: MIT
"""What the kernels of a plan need for its steps is made here, once: how launches are cut into programs, and buffers."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.block_topk import triton_certified
from openmsa.block_topk.triton_ids import LANES
from openmsa.block_topk.triton_topk import MAX_BLOCKS
from openmsa.decode import two_parts
from openmsa.decode.scored import MOST_BLOCKS
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Config, Words
from openmsa.decode.two_parts import Buffers, InTurn, Side, TwoParts
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.primitives.rows import Tile
from openmsa.primitives.softmax import Partials
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div, next_power_of_two, runs_hopper_kernels
from openmsa.sparse_attention import triton_decode, triton_decode_call, triton_decode_shared, triton_decode_walk

FORMATS = ("plain", "e4m3", "nvfp4")
"""The kernels read keys and values in these formats."""
BOUNDS_PAY = 64 << 20
"""Exact index keys beside `CertifiedKeys`, up to so many bytes, are read without bounds first, which is as fast on an H200."""
LAYER_BLOCKS = 256
"""One launch is faster than three where a sequence has at most so many blocks, those of 32K keys."""
STRIDED_TOKENS = 4
"""Where a sequence may have more blocks than that, one launch serves steps of at most so many tokens all the same: its scoring
programs share what sequences have, and its attention programs read as many scores as are visible. Two launches serve eight
tokens as fast or faster."""
MOST_STRIDED = 2048
"""Such a launch serves at most so many blocks. A thread of four warps could hold the scores of 4,096."""
LAYER_ROWS = 2
"""One launch is faster than three where a multiprocessor has at most so many outputs (token and head)."""
RESIDENT = 4
"""Scoring is cut so that a multiprocessor has so many programs of all kinds."""
MOST_SPLITS = 64
"""A merge program of one launch holds at most so many splits."""
MOST_SHARED = 32
"""Blocks are taken best first where at most so many programs share a row: partials of 32 fit into the tiles of the program that
merges them."""
MOST_HANDED = 2
"""Scores are handed on one by one where at most so many programs share a row; with more it gains nothing."""
DEEP_SHARED = 200 << 10
"""With so much shared memory, scoring programs beside attention of a single token and KV head send for one more tile ahead."""
LEAST_SHARE = 2
"""A scoring program has at least so many tiles: with one, programs of all kinds are too many to be resident together."""


class PlanMemory:
    """Holds how steps of 1, 2, ... `max_batch` sequences are cut into programs, and buffers for the largest.

    one_launch:      cuts of the kernel that runs a whole layer, None where it does not serve or two launches, which take blocks
                     best first, are faster; words: what its programs hand on.
    attend:          cuts of attention in a launch of its own, by the format of keys and values; partials: what it leaves.
    best:            pairs of tiles with which attention behind plain scores takes blocks best first
                     (`openmsa.decode.gluon_sm90_best`), 0 where it does not; hands_on: whether it is handed scores one by one,
                     which pays where few programs share a row; handed: these scores, all of them `ABSENT` between steps.
    shared:          how the new tokens of a sequence share the reading of blocks, and what that leaves. In plans with bounds
                     they share nothing, so that one part and two give the same bits.
    scores:          room for scores.
    certified:       room for bounds of certified keys, where they can come first; up to `most_unbounded` keys they do not.
    parts:           what serves a step in two parts, where that can pay.
    interpreted:     whether Triton's interpreter runs the kernels; pdl: whether one may start before the one in front ends.
    """

    def __init__(
        self, sizes: Sizes, max_batch: int, max_pages: int, dtype: torch.dtype, device: torch.device, certified: bool = True
    ) -> None:
        if sizes.num_blocks > MAX_BLOCKS:
            raise NotImplementedError(
                f"max_pages * page_size / block_size must be at most {MAX_BLOCKS} on {device}, got {sizes.num_blocks}"
            )
        self.sizes, facts = sizes, devices.facts(device)
        self.attend = {form: [_attend(b + 1, sizes, facts, form) for b in range(max_batch)] for form in FORMATS}
        hopper = runs_hopper_kernels(device)
        cuts = self.attend["plain"]
        self.best = [best_pairs(cut, b + 1, sizes, facts) if hopper else 0 for b, cut in enumerate(cuts)]
        self.one_launch = [None if pairs else configure(b + 1, sizes, facts) for b, pairs in enumerate(self.best)]
        self.interpreted = device.type != "cuda"
        self.pdl = devices.has_pdl(device)
        self._allocate(max_batch, max_pages * sizes.page_size, dtype, device, certified)
        if not self.interpreted:
            torch.cuda.current_stream(device).synchronize()  # The counters are written before any stream runs the plan.

    def _allocate(self, max_batch: int, capacity: int, dtype: torch.dtype, device: torch.device, certified: bool) -> None:
        sizes, tokens = self.sizes, max_batch * self.sizes.new_tokens
        self.partials = self._partials(max_batch, dtype, device)
        self.most_unbounded = BOUNDS_PAY // _exact_bytes(1, 1, sizes)
        self.certified = _certified(max_batch, capacity, sizes, device) if certified else None
        self.parts: TwoParts | None = None
        if self.certified is not None and any(self._pays(batch, capacity) for batch in range(2, max_batch + 1)):
            rest = max_batch - two_parts.first_part(max_batch)
            second = Buffers(_bounds(rest, sizes, device), self._partials(rest, dtype, device))
            self.parts = TwoParts(second, self.attend, InTurn() if self.interpreted else Side(device))
        heads = sizes.num_kv_heads, sizes.num_q_heads // sizes.num_kv_heads
        shape = (sizes.new_tokens, *heads, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
        self.shared = triton_decode_shared.Shared.allocate(max_batch, shape, dtype, device, self.certified is None)
        self.scores = torch.empty(scores_held(tokens, capacity, sizes), dtype=torch.float32, device=device)
        self.hands_on = [
            pairs > 0 and cut.splits <= MOST_HANDED for pairs, cut in zip(self.best, self.attend["plain"], strict=True)
        ]
        self.handed = _handed(max_batch, capacity, sizes, self.hands_on, device) if any(self.hands_on) else None
        self.cu_seqlens_q = torch.arange(max_batch + 1, dtype=torch.int32, device=device) * sizes.new_tokens
        small = {(i + 1) * sizes.new_tokens: c for i, c in enumerate(self.one_launch) if c}
        splits = max((n * c.attend.splits for n, c in small.items() if c.merging), default=0) * sizes.num_q_heads
        scores = max(small, default=0) * sizes.index_heads * sizes.num_blocks
        self.words = Words.allocate(scores, splits, sizes.head_dim, device) if small else None

    def _partials(self, max_batch: int, dtype: torch.dtype, device: torch.device) -> Partials:
        """Allocates what attention needs for steps of up to `max_batch` sequences."""
        sizes = self.sizes
        rows, parts = triton_decode_walk.row_tiles(sizes.num_q_heads // sizes.num_kv_heads, sizes.head_dim)
        heads = sizes.num_kv_heads * parts
        plain = self.attend["plain"][:max_batch]  # Stored rows are split as plain ones.
        splits = [(i + 1) * sizes.new_tokens * c.splits for i, c in enumerate(plain) if c.splits > 1]
        programs, most = max_batch * sizes.new_tokens * heads, max(splits, default=0) * heads
        return Partials.allocate(programs, most, rows, sizes.head_dim, dtype, device)

    def take_back(self) -> None:
        """Makes all scores that are handed on absent again, after a run that may have failed between its launches."""
        if self.handed is not None and not (self.handed.is_cuda and devices.capturing(self.handed.device)):
            from openmsa.block_scores.gluon_sm90_few import ABSENT

            self.handed.view(torch.int32).fill_(ABSENT.value)

    def _pays(self, batch: int, capacity: int) -> bool:
        """Tells whether certified keys of so many sequences, of `capacity` keys each, are served in two parts."""
        unsplit = self.attend["plain"][batch - 1].splits == 1
        return batch > 1 and unsplit and _exact_bytes(batch, capacity, self.sizes) >= two_parts.LEAST_BYTES


def scores_held(tokens: int, capacity: int, sizes: Sizes) -> int:
    """Returns how many float32 elements `select` needs for so many new tokens and `capacity` keys a sequence."""
    return tokens * sizes.index_heads * ceil_div(capacity, sizes.block_size) + tokens


def _exact_bytes(batch: int, capacity: int, sizes: Sizes) -> int:
    """Returns how many bytes the 16-bit index keys of so many sequences take, of `capacity` keys each."""
    return batch * sizes.index_key_heads * capacity * sizes.index_dim * 2


def _certified(max_batch: int, capacity: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace | None:
    """Allocates buffers of bounds for steps of up to `max_batch` sequences; None where bounds never come first."""
    rows, walks = sizes.new_tokens * sizes.index_heads // sizes.index_key_heads, max_batch * sizes.index_key_heads
    free, all_rows = sizes.topk - sizes.init_blocks - sizes.local_blocks, max_batch * sizes.new_tokens * sizes.index_heads
    can = triton_certified.certifies(rows, sizes.num_blocks, free, all_rows, walks, sizes.block_size)
    return _bounds(max_batch, sizes, device) if can and _exact_bytes(max_batch, capacity, sizes) > BOUNDS_PAY else None


def _bounds(max_batch: int, sizes: Sizes, device: torch.device) -> triton_certified.Workspace:
    """Allocates buffers of bounds for steps of up to `max_batch` sequences."""
    heads, key_heads, new = sizes.index_heads, sizes.index_key_heads, sizes.new_tokens
    walks, blocks = (new * heads // key_heads, max_batch * key_heads), (sizes.num_blocks, sizes.block_size)
    return triton_certified.Workspace.allocate(max_batch * new, heads, *walks, *blocks, device)


def _attend(batch: int, sizes: Sizes, facts: devices.Device, form: str) -> triton_decode.Config:
    """Chooses how a launch of attention alone is cut for so many sequences."""
    group = sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    return triton_decode_call.configure(batch * sizes.new_tokens, *shape, facts, FORMAT_IDS[form])


def best_pairs(cut: triton_decode.Config, batch: int, sizes: Sizes, device: devices.Device) -> int:
    """Returns how many pairs of tiles programs of `openmsa.decode.gluon_sm90_best` have for these sizes, 0 where others serve.
    It is made for pages of whole blocks of 128 keys, and is faster than programs that select first unless each would have a
    single one of those. A program has no more pairs than blocks. cut: of attention in a launch of its own, whose splits these
    programs have. It is a pure function."""
    whole, group = sizes.block_size == 128 and sizes.page_size % 128 == 0, sizes.num_q_heads // sizes.num_kv_heads
    single = cut.splits > 1 and cut.splits == sizes.topk
    if not whole or group > 16 or sizes.head_dim != 128 or single or cut.splits > MOST_SHARED:
        return 0
    return 1 if batch * sizes.new_tokens * sizes.num_kv_heads > device.num_sms else min(2, sizes.topk)


def _handed(max_batch: int, capacity: int, sizes: Sizes, hands_on: list[bool], device: torch.device) -> Tensor | None:
    """Allocates scores that are handed on; None where no step of the plan hands any on, or programs of several rows would need
    the same ones. hands_on: as in `PlanMemory`."""
    from openmsa.block_scores.gluon_sm90_few import ABSENT, LEAST_BATCH, MOST_BATCH, MOST_ROWS

    rows, largest = sizes.new_tokens * sizes.index_heads // sizes.index_key_heads, min(max_batch, MOST_BATCH)
    if not any(hands_on[LEAST_BATCH - 1 : largest]) or rows > MOST_ROWS or sizes.num_blocks > MOST_BLOCKS:
        return None
    if sizes.index_heads != sizes.num_kv_heads:
        return None
    count = largest * sizes.new_tokens * sizes.index_heads * ceil_div(capacity, sizes.block_size)
    return torch.full((count,), ABSENT.value, dtype=torch.int32, device=device).view(torch.float32)


def configure(batch: int, sizes: Sizes, device: devices.Device) -> Config | None:
    """Chooses how one launch serves `batch` sequences, or None where several launches do; it is a pure function."""
    attend, attending = attend_config(batch, sizes, device)
    tile = Tile.of(sizes.block_size)
    whole = tile.whole and sizes.page_size % tile.span == 0  # whether pages hold whole tiles
    outputs = batch * sizes.new_tokens * sizes.num_q_heads
    strided = sizes.num_blocks > LAYER_BLOCKS
    if (
        attend.lookup
        or not whole
        or (strided and (batch * sizes.new_tokens > STRIDED_TOKENS or sizes.num_blocks > MOST_STRIDED))
    ):
        return None
    if attending > 2 * device.num_sms or outputs > LAYER_ROWS * device.num_sms:
        return None
    merge_parts = 2 if attend.tiles == 1 and outputs <= device.num_sms else 1  # Splits are many where a program has one tile.
    merging = outputs * merge_parts if attend.splits > 1 else 0
    near = min(sizes.num_blocks, LAYER_BLOCKS)
    tiles, walks = tile.count(near), batch * sizes.index_key_heads
    room = max(RESIDENT * device.num_sms - attending - merging, (1 + (attending > device.num_sms)) * device.num_sms)
    share = min(max(ceil_div(tiles * walks, room), LEAST_SHARE), tiles)
    share = ceil_div(share, tile.parts) * tile.parts
    splits = ceil_div(tiles, share)
    rows = max(16, next_power_of_two(sizes.new_tokens * sizes.index_heads // sizes.index_key_heads))
    reps = max(next_power_of_two(near) // LANES.value, 1)
    if strided:
        share = ceil_div(ceil_div(tile.count(sizes.num_blocks), tile.parts), splits) * tile.parts
    alone = strided and batch * sizes.new_tokens * sizes.num_kv_heads == 1 and device.shared_bytes >= DEEP_SHARED
    stages = 1 if share == 1 else 4 if alone else 3
    return Config(attend, share, splits, stages, rows, reps, walks * splits, attending, merging, merge_parts, strided)


def attend_config(batch: int, sizes: Sizes, device: devices.Device) -> tuple[triton_decode.Config, int]:
    """Returns how attention is cut, and the number of its programs. It is cut as for a launch of its own, but into one tile of
    64 keys a program where that makes at most one program a multiprocessor, or two for one or two tokens, because a merge costs
    no counter here."""
    tokens, group = batch * sizes.new_tokens, sizes.num_q_heads // sizes.num_kv_heads
    shape = (sizes.num_kv_heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    config = triton_decode_call.configure(tokens, *shape, device)
    walks = tokens * sizes.num_kv_heads * triton_decode_walk.row_tiles(group, sizes.head_dim)[1]
    finest = ceil_div(sizes.topk * sizes.block_size, 64)
    if config.keys >= 64 and finest <= MOST_SPLITS and walks * finest <= (2 if tokens <= 2 else 1) * device.num_sms:
        config = config._replace(keys=64, tiles=1, splits=finest)
    return config._replace(num_stages=min(config.tiles, 2) + 1), walks * config.splits
