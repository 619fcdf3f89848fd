# SPDX-License-Identifier: MIT
"""These say who owns what: `TokenShards` spreads the new tokens of a step over ranks, `PageStripes` the pages of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from openmsa.runtime import checks, named_devices, value_checks
from openmsa.types import INT32_MAX, Layout, Sequences

ORDERS = ("zigzag", "contiguous")
FEW_ROWS = 64
"""Kernels of scores choose their form by the queries of the longest sequence, up to so many of them."""
Made = TypeVar("Made")
Pieces: TypeAlias = "list[tuple[slice, Layout]]"
"""Pieces of a step are rows of queries, each with its lengths."""


@dataclass(frozen=True)
class TokenShards:
    """`TokenShards` says which of a step's tokens each rank owns: its share of every sequence.

    lengths:  new tokens of each sequence, which are the last ones of their sequence.
    ranks:    processes of the group.
    order:    "contiguous" cuts every sequence into `ranks` pieces, of which rank r owns piece r. "zigzag" cuts it into twice as
              many, of which rank r owns pieces r and ``2 * ranks - 1 - r``: early queries see few keys and late ones many, so
              that every rank has the same work. The pieces of a sequence differ by one token at most; they may be empty.

    A rank holds its tokens packed: its first piece of every sequence, then its second piece of every sequence. ``shard`` takes
    them from a packed tensor of all tokens. One object serves all layers of a step, and keeps the indices that they need.

    Raises ValueError or TypeError, naming the argument, the rule and the value.
    """

    lengths: tuple[int, ...]
    ranks: int
    order: str = "zigzag"
    _made: dict[Any, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        value_checks.lengths("lengths", self.lengths, INT32_MAX)
        object.__setattr__(self, "lengths", tuple(self.lengths))
        checks.integer("ranks", self.ranks, 1)
        if self.order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(map(repr, ORDERS))}, got {self.order!r}")

    def spans(self, rank: int) -> list[list[tuple[int, int]]]:
        """Returns, for each piece of the rank, its first token and its end in each sequence, counted from the first new one."""
        checks.integer("rank", rank, 0, self.ranks - 1)
        pieces = self.ranks * (1 + (self.order == "zigzag"))
        mine = [rank, pieces - 1 - rank] if self.order == "zigzag" else [rank]
        return [[(i * n // pieces, (i + 1) * n // pieces) for n in self.lengths] for i in mine]

    def tokens(self, rank: int) -> int:
        """Returns how many tokens the rank owns."""
        return sum(stop - start for piece in self.spans(rank) for start, stop in piece)

    def most(self) -> int:
        """Returns how many tokens the rank with the most of them owns."""
        return max(map(self.tokens, range(self.ranks)))

    def rows(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Returns where the rank's tokens stand in the packed tensor of all tokens, int64 ``[tokens]``."""
        device = named_devices.usable("device", device)
        first = list(accumulate(self.lengths, initial=0))
        spans = [torch.arange(0, device="cpu")]
        for piece in self.spans(rank):
            spans += [torch.arange(first[b] + start, first[b] + stop, device="cpu") for b, (start, stop) in enumerate(piece)]
        return torch.cat(spans).to(device)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """Takes the rank's tokens from ``x [total, ...]``, which holds the new tokens of all sequences, packed."""
        checks.size("x", x, 0, sum(self.lengths), "the tokens of all sequences")
        return x.index_select(0, self.rows(rank, x.device))

    def gathered_rows(self, device: torch.device) -> Tensor:
        """Returns, for each token of the packed tensor of all tokens, its row among the shards of all ranks, one after the
        other and each padded to `most` rows: int64 ``[total]``."""
        return self.remember(("gathered", device), lambda: self._gathered_rows().to(device))

    def _gathered_rows(self) -> Tensor:
        index, most = torch.empty(sum(self.lengths), dtype=torch.int64, device="cpu"), self.most()
        for rank in range(self.ranks):
            rows = self.rows(rank)
            index[rows] = torch.arange(rank * most, rank * most + rows.numel(), device="cpu")
        return index

    def pieces(
        self, rank: int, cached: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> list[tuple[slice, Sequences]]:
        """Returns, for each piece of the rank, which of its rows hold the piece, and the lengths with which any stage computes
        these queries over the keys of all ranks. cached: keys that each sequence had before this step; None: 0."""
        return [
            (rows, Sequences(x.cu_seqlens_q, x.cu_seqlens_k, x.max_seqlen_q, x.max_seqlen_k, x.q_offset))
            for rows, x in self.layouts(rank, self.known(cached), named_devices.usable("device", device))
        ]

    def known(self, cached: Sequence[int] | None) -> tuple[int, ...]:
        """Checks how many keys each sequence had before this step."""
        cached = [0] * len(self.lengths) if cached is None else cached
        value_checks.lengths("cached", cached, INT32_MAX - sum(self.lengths))
        if len(cached) != len(self.lengths):
            raise ValueError(f"cached must have one entry a sequence ({len(self.lengths)}), got {len(cached)}")
        return tuple(cached)

    def layouts(self, rank: int, cached: tuple[int, ...], device: torch.device) -> list[tuple[slice, Layout]]:
        """Does what `pieces` does, for checked arguments. Bounds on queries say as much of whole sequences as implementations
        choose by, so that every rank chooses as one rank would."""
        return self.remember((rank, cached, device), lambda: self._layouts(rank, cached, device))

    def _layouts(self, rank: int, cached: tuple[int, ...], device: torch.device) -> list[tuple[slice, Layout]]:
        k_lens = [old + new for old, new in zip(cached, self.lengths, strict=True)]
        cu_k, longest = _starts(k_lens, device), max(self.lengths, default=0)
        made, first = [], 0
        for piece in self.spans(rank):
            q_lens = [stop - start for start, stop in piece]
            offsets = [old + start for old, (start, _) in zip(cached, piece, strict=True)]
            offset = torch.tensor(offsets, dtype=torch.int32, device="cpu")
            bound = min(longest, max([*q_lens, FEW_ROWS + 1]))
            seqs = Layout(_starts(q_lens, device), cu_k, bound, max(k_lens, default=0), offset.to(device), longest)
            made.append((slice(first, first + sum(q_lens)), seqs))
            first += sum(q_lens)
        return made

    def remember(self, key: Any, make: Callable[[], Made]) -> Made:
        """Returns what `make` returned when it was called for this key."""
        if key not in self._made:
            self._made[key] = make()
        made: Made = self._made[key]
        return made


def in_chunks(pieces: Pieces, most: int) -> Pieces:
    """Cuts pieces into chunks of at most so many queries."""
    cut = []
    for rows, seqs in pieces:
        total = rows.stop - rows.start
        for start in range(0, total, most):
            stop = min(start + most, total)
            of_chunk = seqs if stop - start == total else seqs.query_chunk(start, stop)
            cut.append((slice(rows.start + start, rows.start + stop), of_chunk))
    return cut


def check_shards(shards: Any) -> None:
    """Raises TypeError unless the argument `shards` is a `TokenShards`."""
    if not isinstance(shards, TokenShards):
        raise TypeError(f"shards must be an openmsa.parallel.TokenShards, got {type(shards).__name__}")


def _starts(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32, device="cpu").to(device)


@dataclass(frozen=True)
class PageStripes:
    """`PageStripes` says which keys of a paged cache each rank holds: page p of every sequence lies on rank ``p % ranks``, as
    its page ``p // ranks``. So every rank holds its share of any sequence, however long it grows. Blocks lie whole in pages.

    ranks:      processes of the group.
    page_size:  keys of a page.
    """

    ranks: int
    page_size: int

    def __post_init__(self) -> None:
        checks.integer("ranks", self.ranks, 1)
        checks.integer("page_size", self.page_size, 1)

    @overload
    def held(self, lens: int, rank: int) -> int: ...

    @overload
    def held(self, lens: Tensor, rank: int) -> Tensor: ...

    def held(self, lens: int | Tensor, rank: int) -> int | Tensor:
        """Returns how many of the first `lens` keys of a sequence the rank holds; for a tensor of lengths, a tensor."""
        checks.integer("rank", rank, 0, self.ranks - 1)
        stripe = self.ranks * self.page_size
        rest = lens % stripe - rank * self.page_size
        rest = rest.clamp(0, self.page_size) if isinstance(rest, Tensor) else min(max(rest, 0), self.page_size)
        return lens // stripe * self.page_size + rest

    def positions(self, start: int, stop: int, rank: int) -> Tensor:
        """Returns which of the positions from `start` to `stop` the rank holds, int64, ascending."""
        checks.integer("rank", rank, 0, self.ranks - 1)
        position = torch.arange(start, stop, device="cpu")
        return position[position // self.page_size % self.ranks == rank]
