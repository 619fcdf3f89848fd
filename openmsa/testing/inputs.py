# SPDX-License-Identifier: MIT
"""Nasty inputs have ragged lengths, strided views amid NaN, shuffled and shared pages, and unordered block ids with gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openmsa import PagedIndexKeys, PagedKV, Sequences

WILD_IDS = (-1, 2**31 - 1, -(2**31), 1_000_003)  # what a page table may hold where no key lives


@dataclass(frozen=True)
class Problem:
    """A problem holds the inputs of every stage, with their lengths on the host."""

    q: Tensor  # [total_q, num_q_heads, head_dim]
    k: Tensor  # [total_k, num_kv_heads, head_dim]
    v: Tensor  # [total_k, num_kv_heads, head_dim]
    index_q: Tensor  # [total_q, index_heads, index_dim]
    index_k: Tensor  # [total_k, index_key_heads, index_dim]
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    offsets: tuple[int, ...]  # position of each sequence's first query
    shared_prefix: int  # this many first keys are the same in all sequences that have them

    @property
    def device(self) -> torch.device:
        """Says where the tensors are."""
        return self.q.device

    @property
    def seqs(self) -> Sequences:
        """Returns the lengths, with `q_offset` only where it is not the default."""
        seqs = Sequences.from_lengths(list(self.q_lens), list(self.k_lens), self.device)
        if self.offsets == tuple(k - q for q, k in zip(self.q_lens, self.k_lens, strict=True)):
            return seqs
        return replace(seqs, q_offset=torch.tensor(self.offsets, dtype=torch.int32, device=self.device))

    def map(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Returns the same problem with ``change(tensor)`` in place of each tensor."""
        index_q, index_k = change(self.index_q), change(self.index_k)
        return replace(self, q=change(self.q), k=change(self.k), v=change(self.v), index_q=index_q, index_k=index_k)

    def to(self, device: torch.device | str) -> Problem:
        """Returns the same problem on another device."""
        return self.map(lambda x: x.to(device))

    def permuted(self, order: Sequence[int]) -> Problem:
        """Returns the same sequences in another order in the batch."""
        rows, keys = packed_order(self.q_lens, order), packed_order(self.k_lens, order)
        q_lens, k_lens, offsets = (tuple(x[b] for b in order) for x in (self.q_lens, self.k_lens, self.offsets))
        moved = replace(self, q_lens=q_lens, k_lens=k_lens, offsets=offsets, q=self.q[rows], index_q=self.index_q[rows])
        return replace(moved, k=self.k[keys], v=self.v[keys], index_k=self.index_k[keys])


def packed_order(lens: Sequence[int], order: Sequence[int]) -> Tensor:
    """Returns packed rows of sequences of `lens` tokens, in the order in which the permuted batch holds them: int64 [total]."""
    pieces = torch.arange(sum(lens), device="cpu").split(list(lens))
    return torch.cat([pieces[b] for b in order] or [torch.arange(0, device="cpu")])


def problem(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    index_heads: int | None = None,
    index_key_heads: int = 1,
    head_dim: int = 64,
    index_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    offsets: Sequence[int] | None = None,
    integer_index: bool = False,
    shared_prefix: int = 0,
    seed: int = 0,
) -> Problem:
    """Makes random inputs of normal values on the CPU; the same arguments give the same values, rounded to `dtype`.

    index_heads: None means kv_heads. offsets: None means that the queries are the last positions of their keys. integer_index:
    index queries and keys are from -2 to 2, so that their dot products are exact in every dtype and often tie.
    """
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(q_lens), sum(k_lens)
    index_heads, index_dim = index_heads or kv_heads, index_dim or head_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)

    def index(*shape: int) -> Tensor:
        if not integer_index:
            return normal(*shape)
        return torch.randint(-2, 3, shape, generator=generator, device="cpu").to(dtype)

    k, v = normal(total_k, kv_heads, head_dim), normal(total_k, kv_heads, head_dim)
    index_k = index(total_k, index_key_heads, index_dim)
    for x in (k, v, index_k):
        pieces = x.split(list(k_lens))
        longest = max(pieces, key=len, default=x)
        for piece in pieces:
            piece[:shared_prefix] = longest[: min(shared_prefix, len(piece))].clone()
    if offsets is None:
        offsets = [k_len - q_len for q_len, k_len in zip(q_lens, k_lens, strict=True)]
    return Problem(
        normal(total_q, kv_heads * group, head_dim),
        k,
        v,
        index(total_q, index_heads, index_dim),
        index_k,
        tuple(q_lens),
        tuple(k_lens),
        tuple(offsets),
        shared_prefix,
    )


def strided(x: Tensor, step: int = 1) -> Tensor:
    """Returns a view of the same values, heads outermost, elements `step` apart, rows unaligned, NaN in between and around."""
    rows, heads, dim = x.shape
    base = x.new_full((heads + 1, rows + 2, dim * step + 1), torch.nan)
    view = base[1:, 1:-1, : dim * step : step].transpose(0, 1)  # [rows, heads, dim]
    return view.copy_(x)


def paged(p: Problem, page_size: int, *, seed: int = 0, interleaved: bool = False) -> tuple[PagedKV, PagedIndexKeys]:
    """Puts the problem's keys in two caches of one page table: pages in random order, those inside the shared prefix stored
    once, NaN in every unused slot and page, wild ids where a sequence has no page.

    interleaved: pools are views, tokens outside pages, pages outside heads, rows half of a wider row of odd length.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-k_len // page_size) for k_len in p.k_lens]
    num_pages, width = sum(counts) + 2, max(counts, default=0) + 1
    free = torch.randperm(num_pages, generator=generator, device="cpu").tolist()
    table = [[WILD_IDS[(b + i) % len(WILD_IDS)] for i in range(width)] for b in range(len(counts))]
    pools = [_pool(x, num_pages, page_size, interleaved) for x in (p.k, p.v, p.index_k)]
    once: dict[int, int] = {}  # logical page inside the shared prefix -> physical page
    start = 0
    for b, (k_len, count) in enumerate(zip(p.k_lens, counts, strict=True)):
        for logical in range(count):
            first, last = logical * page_size, min((logical + 1) * page_size, k_len)
            if first + page_size <= min(p.shared_prefix, k_len):
                page = once.setdefault(logical, free[-1])
                if page == free[-1]:
                    free.pop()
            else:
                page = free.pop()
            table[b][logical] = page
            for pool, x in zip(pools, (p.k, p.v, p.index_k), strict=True):
                pool[page, :, : last - first] = x[start + first : start + last].transpose(0, 1)
        start += k_len
    page_table = torch.tensor(table, dtype=torch.int32, device=p.device).view(len(counts), width)
    lens = torch.tensor(p.k_lens, dtype=torch.int32, device=p.device)
    return PagedKV(pools[0], pools[1], page_table, lens), PagedIndexKeys(pools[2], page_table, lens.clone())


def _pool(x: Tensor, num_pages: int, page_size: int, interleaved: bool) -> Tensor:
    _, heads, dim = x.shape
    if not interleaved:
        return x.new_full((num_pages, heads, page_size, dim), torch.nan)
    base = x.new_full((page_size, num_pages, heads, 2 * dim + 1), torch.nan)
    return base[..., dim : 2 * dim].permute(1, 2, 0, 3)


def random_blocks(p: Problem, topk: int, block_size: int, heads: int, seed: int = 0) -> Tensor:
    """Returns int32 ``[total_q, heads, topk]``: distinct ids of the query's sequence in random order, among them blocks that
    the query does not see yet, with -1 in any place; some rows hold nothing but -1."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for q_len, k_len in zip(p.q_lens, p.k_lens, strict=True):
        num_blocks = -(-k_len // block_size)
        for row in range(q_len * heads):
            ids = torch.randperm(num_blocks, generator=generator, device="cpu")[: topk if row % 7 else 0]
            gaps = torch.full((topk,), -1, device="cpu")
            slots = torch.randperm(topk, generator=generator, device="cpu")[: len(ids)]
            gaps[slots] = ids
            if topk > 1 and row % 3 == 0:
                gaps[row % topk] = -1
            rows.append(gaps)
    stacked = torch.stack(rows) if rows else torch.empty(0, topk, device="cpu")
    return stacked.to(torch.int32).view(-1, heads, topk).to(p.device)
