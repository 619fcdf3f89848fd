# SPDX-License-Identifier: MIT
"""Ranks on GPUs of one host exchange candidates and partial results by kernels that write into each other's memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from openmsa.parallel.exchange import Choice
from openmsa.parallel.ranks import Ranks
from openmsa.runtime.dispatch import has_triton


def refuse(ranks: Ranks, device: torch.device, topk: int) -> str | None:
    """Says why the kernels cannot exchange between these ranks, or None. Every rank of one host finds the same."""
    if device.type != "cuda":
        return f"it needs CUDA devices, got {device}"
    if not has_triton():
        return "the triton package is not installed"
    if ranks.group is None:
        return "torch.distributed is not initialised"
    if "nccl" not in dist.get_backend(ranks.group):
        return f"it needs a group of the backend nccl, got {dist.get_backend(ranks.group)}"
    if ranks.size > torch.cuda.device_count():
        return f"all {ranks.size} ranks must be GPUs of this host, which has {torch.cuda.device_count()}"
    from openmsa.parallel.triton_exchange import refuse_choice

    return refuse_choice(topk, ranks.size)


class Symmetric:
    """Exchanges through memory that `torch.distributed._symmetric_memory` makes known to all ranks, which is allocated when
    more rows come than ever before: outside of graphs, and on all ranks at once.

    timeout: seconds that a rank waits for the others before its kernel ends with an error.
    """

    name = "symmetric"

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        from openmsa.parallel.triton_exchange import Reach

        self._ranks, self._device = ranks, device
        self._reach = Reach(ranks.rank, ranks.size, int(timeout * 1e9))
        self._rooms: dict[tuple[str, int], _Room] = {}

    def choose(self, scores: Tensor, ids: Tensor, visible_blocks: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """See `openmsa.parallel.exchange.Collectives.choose`."""
        from openmsa.parallel import triton_exchange

        blocks, mine = torch.empty_like(ids), torch.empty_like(ids)
        rows = ids.shape[0] * ids.shape[1]
        if rows:
            words = triton_exchange.choice_words(1, choice.topk, self._ranks.size)
            room = self._room("choose", words, rows)
            triton_exchange.launch_choose(scores, ids, visible_blocks, blocks, mine, room.mail, room.rows, choice, self._reach)
        return blocks, mine

    def merge(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        """See `openmsa.parallel.exchange.Collectives.merge`."""
        from openmsa.parallel import triton_exchange

        if part_lse.numel():
            words = triton_exchange.merge_words(1, part.shape[2], self._ranks.size)
            room = self._room("merge", words, part_lse.numel())
            triton_exchange.launch_merge(part, part_lse, out, lse, room.mail, room.rows, self._reach)

    def _room(self, use: str, words: int, rows: int) -> _Room:
        """Returns memory for `rows` rows of so many words each."""
        room = self._rooms.get((use, words))
        assert self._ranks.group is not None
        if room is None or room.rows < rows:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"a layer of {rows} rows must run once before a CUDA graph captures one, because memory is shared then"
                )
            room = self._rooms[use, words] = _Room(self._ranks.group, self._device, words, rows)
        return room


class _Room:
    """Holds a mailbox in symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, words: int, rows: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        from openmsa.parallel.triton_exchange import FIRST_LAUNCH, Mailbox

        self.rows = rows
        memory = symmetric_memory.empty(words * rows, dtype=torch.int64, device=device)
        memory.zero_()
        self._handle = symmetric_memory.rendezvous(memory, group)
        peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        counter = torch.full((1,), FIRST_LAUNCH, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # No rank writes before every memory is zero.
        torch.cuda.synchronize(device)
        self.mail = Mailbox(peers, memory, counter)
