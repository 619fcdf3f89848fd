# SPDX-License-Identifier: MIT
"""On GPUs a layer of spread decode can be a chain of four launches: scores; selection with its exchange; attention; the
exchange of partial results. Each of the last three starts while the one in front ends, and waits for it inside.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_scores.triton_route import Lengths
from openmsa.block_scores.triton_route import launch as launch_scores
from openmsa.block_topk import triton_certified
from openmsa.block_topk.triton_topk import MAX_BLOCKS
from openmsa.decode.memory import BOUNDS_PAY
from openmsa.inputs import ScoringCall
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, PagedKV, Stored
from openmsa.parallel.exchange import Choice
from openmsa.parallel.symmetric import Symmetric
from openmsa.primitives.rows import KeyTiles, Tile
from openmsa.primitives.softmax import Partials
from openmsa.runtime import devices
from openmsa.runtime.launch import ceil_div
from openmsa.sparse_attention import triton_decode, triton_decode_call, triton_decode_walk
from openmsa.sparse_attention.triton_decode_walk import refuse

CHAINED: bool | None = None
"""Which steps run as a chain. None: those of `Chain.measured`; True: all that can; False: none."""
MEASURED, RANKS = ((32, range(2049, 4097)), (128, range(257, 513))), 2
"""The chain was right and faster on Hopper with at most so many rows of scores (tokens times index heads) of so many blocks a
rank, for which one compiled kernel serves, and so many ranks (`docs/log/parallel.md`)."""


class Chain:
    """Launches the layers of one plan. lens: int32 ``[total_q]``, how many keys of the rank each query sees."""

    def __init__(self, exchange: Symmetric, lens: Tensor, block_size: int) -> None:
        self._exchange, self._lens, self._block_size = exchange, lens, block_size
        self._pdl, self._selected = devices.has_pdl(lens.device), False
        self._workspaces: dict[tuple[int, int], triton_certified.Workspace] = {}
        self._cuts: dict[tuple[Any, ...], tuple[triton_decode.Config, Partials]] = {}

    def selects(self, keys: PagedIndexKeys, call: ScoringCall) -> bool:
        """Tells whether a checked call on these index keys is scored and selected here."""
        chained = self.measured(keys, call) if CHAINED is None else CHAINED
        can = chained and SCORING.choice("auto", call).name == "triton"
        can = can and 0 < call.seqs.num_blocks(call.block_size) <= MAX_BLOCKS and call.index_q.shape[0] > 0
        self._selected = can
        return can

    def measured(self, keys: PagedIndexKeys, call: ScoringCall) -> bool:
        """Tells whether chains of such steps were right and faster on GPUs: one new token a sequence, bfloat16 queries, plain
        keys, and sizes of `MEASURED` and `RANKS`."""
        plain = isinstance(call.index_q, Tensor) and keys.format == "plain"
        rows, blocks = call.index_q.shape[0] * call.index_q.shape[1], call.seqs.num_blocks(call.block_size)
        sizes = any(rows <= most and blocks in known for most, known in MEASURED)
        sizes = sizes and call.seqs.max_seqlen_q == 1 and self._exchange.ranks == RANKS
        return plain and sizes and call.index_q.dtype == torch.bfloat16 and devices.facts(self._lens.device).arch == 90

    def select(self, call: ScoringCall, held: Tensor, visible: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Returns the selection and this rank's part of it, as `Symmetric.choose` does. held, visible: int32 ``[total_q]``,
        blocks of the rank and of the whole sequence that each query sees."""
        (total_q, heads, _), num_blocks = call.index_q.shape, call.seqs.num_blocks(call.block_size)
        device, tile = devices.facts(held.device), Tile.of(call.block_size)
        scores = torch.empty(total_q, heads, num_blocks, dtype=torch.float32, device=held.device).transpose(0, 1)
        keys, lengths = KeyTiles.of(call.index_k, tile, device), Lengths.of(call.seqs)
        launch_scores(call.index_q, keys, tile, lengths, scores, torch.empty_like(held), device, self._pdl)
        return self._exchange.select(scores, held, visible, choice, self._pdl)

    def bounds(self, keys: PagedIndexKeys, call: ScoringCall, choice: Choice) -> triton_certified.Selection | None:
        """Returns the selection that reads int8 halves of certified keys first, then exact keys of the blocks that they leave
        open; None where it cannot serve or does not pay."""
        index_q, seqs, size = call.index_q, call.seqs, call.block_size
        (total_q, heads, dim), num_blocks = index_q.shape, seqs.num_blocks(size)
        if not isinstance(keys.keys, CertifiedKeys) or not isinstance(index_q, Tensor) or seqs.max_seqlen_q > 1:
            return None
        rows, walks = heads // keys.num_heads, seqs.batch * keys.num_heads
        if 2 * walks * keys.capacity * dim <= BOUNDS_PAY:
            return None
        if not triton_certified.certifies(rows, num_blocks, choice.topk, total_q * heads, walks, size):
            return None
        if triton_certified.refuse(index_q, keys, seqs, size, choice.topk, 0, 0) is not None:
            return None
        if (rows, walks) not in self._workspaces:
            made = triton_certified.Workspace.allocate(total_q, heads, rows, walks, num_blocks, size, index_q.device)
            self._workspaces[rows, walks] = made
        workspace = self._workspaces[rows, walks]
        return triton_certified.Selection(index_q, keys.keys, keys.page_table, Lengths.of(seqs), size, workspace)

    def select_certified(self, bounds: triton_certified.Selection, visible: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """Does what `select` does, by way of bounds: four launches in place of two, for about half of the bytes."""
        total_q, heads, _ = bounds.index_q.shape
        bounds.bound()
        bounds.score_open(choice.topk, 0, 0)
        held = bounds.workspace
        rows = (total_q, heads, ceil_div(bounds.lengths.max_seqlen_k, bounds.block_size))
        count = total_q * heads * rows[2]
        scores, opened = (x[:count].view(rows).transpose(0, 1) for x in (held.scores, held.open_blocks))
        return self._exchange.select(scores, held.rescored, visible, choice, self._pdl, opened)

    def attends(self, q: Tensor | Stored, kv: PagedKV) -> bool:
        """Tells whether a checked layer is attended to here."""
        if CHAINED is None:
            plain = isinstance(q, Tensor) and q.dtype == torch.bfloat16 and kv.format == "plain"
            return self._selected and plain and refuse(q, kv, None, self._block_size) is None
        return CHAINED and q.shape[0] > 0 and refuse(q, kv, None, self._block_size) is None

    def attend(self, q: Tensor | Stored, kv: PagedKV, mine: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Attends to this rank's blocks, and writes the results of all ranks."""
        part, part_lse = torch.empty_like(out), torch.empty_like(lse)
        config, partials = self._cut(q, kv, mine.shape[2], out.dtype)
        queries = (q, kv, None, mine, self._lens, 1, self._block_size, scale)
        triton_decode.launch(config, partials, *queries, part, part_lse, self._pdl)
        self._exchange.merge(part, part_lse, out, lse, self._pdl)

    def _cut(self, q: Tensor | Stored, kv: PagedKV, topk: int, dtype: torch.dtype) -> tuple[triton_decode.Config, Partials]:
        """Returns how attention to layers of these sizes is cut, and memory for it, which graphs keep using."""
        (tokens, num_q_heads, dim), form = q.shape, triton_decode.format_id(kv.k)
        key = (num_q_heads, kv.num_heads, dim, topk, kv.page_size, form, dtype)
        if key not in self._cuts:
            group, device = num_q_heads // kv.num_heads, self._lens.device
            sizes = (kv.num_heads, group, dim, topk, self._block_size, kv.page_size)
            config = triton_decode_call.configure(tokens, *sizes, devices.facts(device), form)
            rows, parts = triton_decode_walk.row_tiles(group, dim)
            programs = tokens * kv.num_heads * parts
            held = programs * config.splits if config.splits > 1 else 0
            self._cuts[key] = config, Partials.allocate(programs, held, rows, dim, dtype, device)
        return self._cuts[key]
