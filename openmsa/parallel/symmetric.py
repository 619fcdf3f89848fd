# SPDX-License-Identifier: MIT
"""Ranks on GPUs of one host exchange candidates and partial results by kernels that write into each other's memory."""

from __future__ import annotations

import os

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
    if (hosts := count_hosts(dist.get_process_group_ranks(ranks.group))) > 1:
        return f"all {ranks.size} ranks must be GPUs of one host, got {hosts} hosts"
    from openmsa.parallel.triton_exchange import refuse_choice

    return refuse_choice(topk, ranks.size)


def count_hosts(ranks: list[int]) -> int:
    """Returns on how many hosts `torchrun` started these global ranks; 1 where it did not start them."""
    each = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return len({rank // each for rank in ranks}) if each else 1


class Symmetric:
    """Exchanges through memory that `torch.distributed._symmetric_memory` makes known to all ranks. It is allocated when a
    layer of so many rows comes for the first time, outside of graphs and on all ranks at once, and kept: graphs write to it.

    timeout: seconds that a rank waits for the others before its kernel ends with an error.
    """

    name = "symmetric"

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float) -> None:
        from openmsa.parallel.triton_exchange import Reach

        self._ranks, self._device, self.ranks = ranks, device, ranks.size
        self._reach = Reach(ranks.rank, ranks.size, int(timeout * 1e9))
        self._rooms: dict[tuple[str, int, int], _Room] = {}

    def choose(self, scores: Tensor, ids: Tensor, visible_blocks: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        """See `openmsa.parallel.exchange.Collectives.choose`."""
        if scores.dtype != torch.float32:
            raise NotImplementedError(f"exchange must be 'collective' where scores are not float32, got {scores.dtype}")
        from openmsa.parallel import triton_exchange

        blocks, mine = torch.empty_like(ids), torch.empty_like(ids)
        rows = ids.shape[0] * ids.shape[1]
        if rows:
            words = triton_exchange.choice_words(1, choice.topk, self._ranks.size)
            room = self._room("choose", words, rows)
            triton_exchange.launch_choose(scores, ids, visible_blocks, blocks, mine, room.mail, room.rows, choice, self._reach)
        return blocks, mine

    def select(
        self,
        scores: Tensor,
        held: Tensor,
        visible_blocks: Tensor,
        choice: Choice,
        pdl: bool,
        opened: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Finds the rank's best blocks and does what `choose` does, in one launch. scores: float32, last stride 1. held: int32
        ``[total_q]``, blocks of the rank that each query sees. pdl: the launch waits for the one in front inside. opened: as in
        `select_kernel` of `openmsa.parallel.triton_exchange`."""
        from openmsa.parallel import triton_exchange

        shape = (scores.shape[1], scores.shape[0], choice.topk)
        blocks, mine = (torch.empty(shape, dtype=torch.int32, device=scores.device) for _ in range(2))
        room = self._room("choose", triton_exchange.choice_words(1, choice.topk, self._ranks.size), shape[0] * shape[1])
        places = (scores, held, visible_blocks, blocks, mine, room.mail, room.rows, choice, self._reach)
        triton_exchange.launch_select(*places, pdl=pdl, opened=opened)
        return blocks, mine

    def merge(self, part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor, pdl: bool = False) -> None:
        """See `openmsa.parallel.exchange.Collectives.merge`. pdl: as for `select`; the kernel that then serves sends half of
        the bytes."""
        if part.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"exchange must be 'collective' where q has no 16-bit results, got {part.dtype}")
        from openmsa.parallel import triton_exchange

        dim, rows = part.shape[2], part_lse.numel()
        if rows and pdl:
            room = self._room("blend", triton_exchange.blend_words(1, dim, self._ranks.size), rows)
            triton_exchange.launch_blend(part, part_lse, out, lse, room.mail, room.rows, self._reach, pdl=True)
        elif rows:
            room = self._room("merge", triton_exchange.merge_words(1, dim, self._ranks.size), rows)
            triton_exchange.launch_merge(part, part_lse, out, lse, room.mail, room.rows, self._reach)

    def _room(self, use: str, words: int, rows: int) -> _Room:
        """Returns memory for `rows` rows of so many words each."""
        room = self._rooms.get((use, words, rows))
        assert self._ranks.group is not None
        if room is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"a layer of {rows} rows must run once before a CUDA graph captures one, because memory is shared then"
                )
            room = self._rooms[use, words, rows] = _Room(self._ranks.group, self._device, words, rows, -(use == "blend"))
        return room


class _Room:
    """Holds a mailbox in symmetric memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, words: int, rows: int, start: int) -> None:
        """start: what each word is at first."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        from openmsa.parallel.triton_exchange import FIRST_LAUNCH, Mailbox

        self.rows = rows
        memory = symmetric_memory.empty(words * rows, dtype=torch.int64, device=device)
        memory.fill_(start)
        self._handle = symmetric_memory.rendezvous(memory, group)
        peers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        counter = torch.full((1,), FIRST_LAUNCH, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group)  # No rank writes before every memory is filled.
        torch.cuda.synchronize(device)
        self.mail = Mailbox(peers, memory, counter)
