# SPDX-License-Identifier: MIT
"""An evaluation compares these kinds of attention: dense, by an index, and two baselines that look at nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openmsa.block_topk import select_blocks, select_blocks_from_scores
from openmsa.integrations.transformers import group_mean_index
from openmsa.kv_cache import Stored
from openmsa.training.branches import dense, sparse
from openmsa.training.layers import LayerInputs
from openmsa.types import Sequences

Index = Callable[[LayerInputs], tuple[Tensor, Tensor | Stored]]
"""Returns the index queries and keys of a layer, packed."""
MOST_BLOCKS = 64  # A query reads so many at most.
MOST_SCORES = 1 << 24  # Baselines without an index hold so many scores at a time, 64 MiB.


@dataclass(frozen=True)
class Variant:
    """Describes one row of a table. kind: "dense", "window" (the first block and the last ones), "random" (the query's own
    block and random visible ones), or the name of an index; percent: share of the blocks of a window that the last query reads;
    block_size and topk: what that is."""

    kind: str
    percent: float = 100.0
    block_size: int = 0
    topk: int = 0

    @property
    def title(self) -> str:
        """Returns the variant's name in a table."""
        return self.kind if self.kind == "dense" else f"{self.kind}, {self.percent:g} % of {self.block_size}"


def budgets(length: int, block_size: int, percents: Sequence[float]) -> dict[float, int]:
    """Returns the whole numbers of blocks nearest to so many per cent of those of a window, ascending, at least 1 and at most
    `MOST_BLOCKS`, by the per cent that they are."""
    blocks = -(-length // block_size)
    counts = sorted({max(1, min(MOST_BLOCKS, blocks, round(blocks * p / 100))) for p in percents})
    return {float(f"{100 * topk / blocks:.4g}"): topk for topk in counts}


def group_mean(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Returns the index of a model without index branches: the mean of each group's queries, and the group's keys."""
    return group_mean_index(torch.nn.Identity(), inputs.q, inputs.k)


def blocks_by_index(index: Index, inputs: LayerInputs, variant: Variant, init_blocks: int = 0, local_blocks: int = 1) -> Tensor:
    """Returns the blocks that an index selects, int32 ``[total_q, heads, topk]``. init_blocks, local_blocks: as in
    `openmsa.select_blocks`, but at most topk together: the last ones come first."""
    index_q, index_k = index(inputs)
    last = min(local_blocks, variant.topk)
    first = min(init_blocks, variant.topk - last)
    return select_blocks(
        index_q,
        index_k,
        variant.topk,
        inputs.seqs,
        block_size=variant.block_size,
        init_blocks=first,
        local_blocks=last,
    )


def blocks_without_index(inputs: LayerInputs, variant: Variant, seed: int, most: int = MOST_SCORES) -> Tensor:
    """Returns the blocks of the kinds "window" and "random", int32 ``[total_q, heads, topk]``; the latter are drawn evenly, by
    the seed and the layer's number. most: how many scores exist at a time (a query's at least); it changes no block."""
    length, device, topk = int(inputs.seqs.max_seqlen_q or 0), inputs.q.device, variant.topk
    size, window = variant.block_size, variant.kind == "window"
    heads, blocks = 1 if window else inputs.k.shape[1], -(-length // size)
    first = min(1, topk - 1) if window else 0
    last = topk - first if window else 1
    generator, parts = torch.Generator().manual_seed(seed * 1_000_003 + inputs.number), []
    for start, stop in chunks(inputs.q.shape[0] // max(1, length), length, max(1, most // (heads * blocks))):
        shape = stop - start, heads, blocks  # Queries come first, so that chunks take up the generator's numbers in order.
        scores = torch.zeros(shape, device=device) if window else torch.rand(shape, generator=generator, device="cpu")
        seqs = Sequences.from_lengths([stop - start], [stop], device)  # The queries are the last of the keys up to them.
        scores = scores.transpose(0, 1)[..., : -(-stop // size)].contiguous().to(device)
        found = select_blocks_from_scores(scores, topk, seqs, block_size=size, init_blocks=first, local_blocks=last)
        parts.append(found)
    return torch.cat(parts)


def chunks(sequences: int, length: int, most: int) -> list[tuple[int, int]]:
    """Returns, of each sequence in turn, ranges of at most `most` neighbouring positions that cover it."""
    return [(start, min(length, start + most)) for _ in range(sequences) for start in range(0, length, most)]


@dataclass
class VariantAttention:
    """Is the attention of a model's layers as a variant says. index: what selects, for the kinds that need one; a layer in
    `dense_layers` attends to all keys whatever the variant; forced: first and last blocks that an index always selects, see
    `blocks_by_index`; `tick` is called after each layer."""

    variant: Variant
    index: Index = group_mean
    seed: int = 0
    dense_layers: frozenset[int] = frozenset()
    forced: tuple[int, int] = (0, 1)
    tick: Callable[[], None] = lambda: None
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def blocks(self, inputs: LayerInputs) -> Tensor:
        """Returns what the layer's queries read."""
        if self.variant.kind not in ("window", "random"):
            return blocks_by_index(self.index, inputs, self.variant, *self.forced)
        at = (inputs.number if self.variant.kind == "random" else 0, inputs.q.shape[0])
        if at not in self.kept:
            self.kept[at] = blocks_without_index(inputs, self.variant, self.seed)
        return self.kept[at]

    def __call__(self, inputs: LayerInputs) -> Tensor:
        if self.variant.kind == "dense" or inputs.number in self.dense_layers:
            out = dense(inputs)[0]
        else:
            out = sparse(inputs, self.blocks(inputs), self.variant.block_size)[0]
        self.tick()
        return out
