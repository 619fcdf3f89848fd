# SPDX-License-Identifier: MIT
"""A layer of many sequences takes two launches: the first scores blocks, the second selects by the scores and attends. This is
what lies between the two: where scores are, who makes them, and what a kernel takes that reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa.block_scores.triton_route import Lengths
from openmsa.block_scores.triton_route import launch as launch_scores
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.kv_cache import E4M3, PagedIndexKeys
from openmsa.primitives.operands import Bounds, PageTable
from openmsa.primitives.rows import KeyTiles, Tile, key_rows, output_rows, query_rows
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div, runs_hopper_kernels
from openmsa.sparse_attention import triton_decode

MOST_BLOCKS = 2048
"""So many blocks a sequence, those of 256K keys, were measured. A thread of four warps could hold the scores of 4,096."""


class Rows(NamedTuple):
    """Holds what a selection is made from and where it goes: scores float32 ``[tokens, index heads, num_blocks]``, blocks int32
    ``[tokens, index heads, topk]``, both contiguous, and the lengths of the index keys int32 ``[batch]``."""

    scores: Tensor
    blocks: Tensor
    seq_lens: Tensor


def takes_two(config: triton_decode.Config, sizes: Sizes, step: Step) -> bool:
    """Tells whether two launches run this step: its queries, keys and values are plain, tiles lie in one block and page, and a
    program holds a row of scores."""
    plain = all(isinstance(x, Tensor) for x in (step.q, step.kv.k, step.kv.v))
    return plain and not config.lookup and sizes.num_blocks <= MOST_BLOCKS and step.index_keys.capacity > 0


def scores_of(index_q: Tensor | E4M3, index_keys: PagedIndexKeys, sizes: Sizes, held: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of `held`: scores ``[total_q, index_heads, blocks]``, and int32 ``[total_q]``, the blocks that each token
    sees."""
    (total_q, heads, _), num_blocks = index_q.shape, ceil_div(index_keys.capacity, sizes.block_size)
    count = total_q * heads * num_blocks
    return held[:count].view(total_q, heads, num_blocks), held[count : count + total_q].view(torch.int32)


def score(
    index_q: Tensor | E4M3, index_keys: PagedIndexKeys, starts: Tensor, sizes: Sizes, scores: Tensor, visible: Tensor,
    behind: bool = False, absent: Tensor | None = None,
) -> tuple[Tensor, bool]:  # fmt: skip
    """Launches the scoring of a step; scores and visible are those of `scores_of`. behind: as in `launch_scores`. absent: where
    scores can be handed on (`PlanMemory.handed`). It returns the scores that are written, and whether they are handed on."""
    device, tile, pdl = devices.facts(index_q.device), Tile.of(sizes.block_size), devices.has_pdl(index_q.device)
    keys = KeyTiles.of_pool(index_keys.keys, index_keys.page_table, tile, device)
    bounds, longest = Bounds(starts, None, index_keys.seq_lens, None), (sizes.new_tokens, index_keys.capacity)
    if runs_hopper_kernels(index_q.device):
        from openmsa.block_scores.gluon_sm90_few import launch

        handed, to, local = False, scores, 0
        if absent is not None and absent.numel() >= scores.numel():
            handed, to, local = True, absent[: scores.numel()].view(scores.shape), sizes.local_blocks
        given, early = (index_q, keys, tile, bounds, longest, to.transpose(0, 1), visible, device), pdl + (pdl and behind)
        if launch(*given, early, handed, local):
            return to, handed
    lengths = Lengths(*bounds, *longest)
    launch_scores(index_q, keys, tile, lengths, scores.transpose(0, 1), visible, device, pdl=pdl, behind=behind)
    return scores, False


def operands(sizes: Sizes, scores: Tensor, step: Step) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns what a kernel that selects and attends takes of a step with plain queries, keys and values: its parameters from q
    to out, and its numbers from `queries` to `capacity`."""
    q, kv, _, index_keys, _, blocks, out, lse = step
    k, v, table = kv.k, kv.v, kv.page_table
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    rows, pages = Rows(scores, blocks, index_keys.seq_lens), PageTable(table, *table.stride())
    return (
        (query_rows(q, True), key_rows(k), key_rows(v), rows, pages, kv.seq_lens, output_rows(out, lse)),
        (sizes.new_tokens, row_blocks(index_keys, sizes), index_keys.capacity, k.shape[0], table.shape[1] * k.shape[2]),
    )


def row_blocks(index_keys: PagedIndexKeys, sizes: Sizes) -> int:
    """Returns how many blocks have a score in a row."""
    return ceil_div(index_keys.capacity, sizes.block_size)
