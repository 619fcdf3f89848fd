# SPDX-License-Identifier: MIT
"""This module serves chunks of prompts whose queries travel: cached pages stay with their ranks, which every query visits.

A sequence's keys are two parts. Whole pages of the cache, which every new query sees to their end, are far: each rank scores
those that it holds for the queries of all ranks, and attends to what is chosen of them. The last keys, those of a page that is
not full and the new ones, are near: they come to every rank, as all keys do where keys move. So no block has keys in both
parts, and only far attention is merged. What moves grows with the chunk, not with the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_topk import SCORES_STAGE
from openmsa.block_topk.given_scores import TopkCall
from openmsa.inputs import AttentionInputs, ScoringCall, SelectionCall, exact_keys
from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.parallel.exchange import Choice, merge_candidates, merge_partials
from openmsa.parallel.pages import pages_of, places
from openmsa.parallel.ranks import Ranks, finished
from openmsa.parallel.shards import Pieces, TokenShards, in_chunks
from openmsa.parallel.sources import Paged
from openmsa.parallel.tokens import Gathering
from openmsa.sparse_attention import STAGE as ATTENTION
from openmsa.sparse_attention.call import SparseCall
from openmsa.types import Layout, out_dtype, wide_dtype

SCORE_BYTES = 1 << 28
"""So many bytes of scores, float32, are held at a time."""
MERGED = 2048
"""Results of so many queries are merged at a time."""


class Far(NamedTuple):
    """Says where the pages lie that stay; all tensors are on the device.

    pages:    whole cached pages of each sequence, on all ranks.
    of_token: int32 ``[total]``, the same for the sequence of each new token; of_mine: int32 ``[tokens of the rank]``.
    visible:  int32 ``[tokens of the rank]``, blocks of its whole sequence that each query sees.
    lens:     int32 ``[batch]``, keys of these pages that this rank holds.
    pieces:   all new tokens, with lengths by which they see all of these keys; empty where the rank holds none.
    """

    pages: tuple[int, ...]
    of_token: Tensor
    of_mine: Tensor
    visible: Tensor
    lens: Tensor
    pieces: Pieces


def far_of(
    shards: TokenShards, cached: tuple[int, ...], page_size: int, block_size: int, rank: int, device: torch.device
) -> Far:
    """Returns where the pages lie that stay, for checked arguments."""
    key = ("far", cached, page_size, block_size, rank, device)
    return shards.remember(key, lambda: _far_of(shards, cached, page_size, block_size, rank, device))


def _far_of(
    shards: TokenShards, cached: tuple[int, ...], page_size: int, block_size: int, rank: int, device: torch.device
) -> Far:
    pages = tuple(n // page_size for n in cached)
    lengths = torch.tensor(shards.lengths, dtype=torch.int64, device="cpu")
    of_token = torch.tensor(pages, dtype=torch.int32, device="cpu").repeat_interleave(lengths)
    position = torch.cat(
        [
            torch.arange(0, device="cpu"),
            *(torch.arange(old, old + n, device="cpu") for old, n in zip(cached, shards.lengths, strict=True)),
        ]
    )
    rows = shards.rows(rank)
    visible = (position[rows] // block_size + 1).int()
    here = [pages_of(n, rank, shards.ranks) * page_size for n in pages]
    lists = (here, [0, *shards.lengths], [0, *here])
    lens, starts_q, starts_k = (torch.tensor(x, dtype=torch.int32, device="cpu") for x in lists)
    cu_q, cu_k = (x.cumsum(0, dtype=torch.int32).to(device) for x in (starts_q, starts_k))
    longest, lens = max(shards.lengths, default=0), lens.to(device)
    everyone = slice(0, len(position)), Layout(cu_q, cu_k, longest, max(here, default=0), lens, longest)
    pieces = [everyone] if max(here, default=0) else []
    return Far(pages, of_token.to(device), of_token[rows].to(device), visible.to(device), lens, pieces)


def travelling(
    inputs: AttentionInputs,
    selection: SelectionCall,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    index_keys: PagedIndexKeys,
    shards: TokenShards,
    cached: tuple[int, ...],
    ranks: Ranks,
    chunk: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Computes `openmsa.parallel.context_attention` for checked arguments, and returns out and lse. inputs and selection: of
    this rank's tokens; k and v: their keys and values. chunk: queries that attention handles at a time."""
    q, index_q, index_k = inputs.q, selection.index_q, selection.index_k
    assert isinstance(q, Tensor)
    assert isinstance(index_q, Tensor)
    assert isinstance(index_k, Tensor)
    device, block_size = q.device, selection.block_size
    far = far_of(shards, cached, kv.page_size, block_size, ranks.rank, device)
    # 1. Index queries are sent, then the near keys, then the queries.
    index_queries = Gathering(index_q, shards, ranks)
    source = Paged(
        k, v, index_k, kv, index_keys, places(shards, cached, kv.page_size, ranks.rank, device, far.pages), shards, ranks
    )
    queries = Gathering(q, shards, ranks)
    # 2. Candidates among far blocks go to the ranks of their queries, and are merged with those among near ones.
    choice = Choice(selection.topk, selection.init_blocks, selection.local_blocks, kv.page_size // block_size)
    here = PagedIndexKeys(index_keys.keys, index_keys.page_table, far.lens)
    scores, ids = candidates(index_queries.finish(), here, far.pieces, block_size, choice.topk, impl)
    page, in_page = ids // choice.page_blocks, ids % choice.page_blocks
    ids = torch.where(ids < 0, -1, (page * ranks.size + ranks.rank) * choice.page_blocks + in_page)
    visited = [Delivery(x, shards, ranks) for x in (scores, ids)]
    near = shards.layouts(ranks.rank, tuple(n % kv.page_size for n in cached), device)
    scores, ids = candidates(index_q, source.index_keys(), near, block_size, choice.topk, impl)
    skipped = far.of_mine[:, None, None] * choice.page_blocks
    ids = torch.where(ids < 0, -1, ids + skipped)
    scores, ids = (torch.cat((*x.wait(), mine), -1) for x, mine in zip(visited, (scores, ids), strict=True))
    blocks = merge_candidates(scores, ids, far.visible, choice)
    # 3. Each rank attends to what is chosen of its far blocks, and to its own queries' near blocks while results return.
    chosen = Gathering(blocks, shards, ranks).finish()
    page, in_page = chosen // choice.page_blocks, chosen % choice.page_blocks
    here_too = (chosen >= 0) & (page < far.of_token[:, None, None]) & (page % ranks.size == ranks.rank)
    chosen = torch.where(here_too, page // ranks.size * choice.page_blocks + in_page, -1).to(torch.int32)
    far_inputs = inputs._replace(q=queries.finish(), k=PagedKV(kv.k, kv.v, kv.page_table, far.lens), v=None)
    parts = [Delivery(x, shards, ranks) for x in attended(far_inputs, chosen, in_chunks(far.pieces, chunk), block_size, impl)]
    keys, values = source.keys_and_values()
    blocks = torch.where(blocks >= skipped, blocks - skipped, -1)
    out, lse = attended(inputs._replace(k=keys, v=values), blocks, in_chunks(near, chunk), block_size, impl)
    merge(parts[0].wait(), parts[1].wait(), out, lse)
    return out, lse


def candidates(
    index_q: Tensor, keys: PagedIndexKeys, pieces: Pieces, block_size: int, topk: int, impl: str
) -> tuple[Tensor, Tensor]:
    """Returns the best blocks of each query among these keys, none forced: their scores, -inf for none, and int32 ids, -1 for
    none, ``[queries, heads, topk]``. Queries outside the pieces have none."""
    shape, found = (*index_q.shape[:2], topk), exact_keys(keys)
    best = torch.full(shape, -torch.inf, dtype=wide_dtype(index_q), device=index_q.device)
    ids = torch.full(shape, -1, dtype=torch.int32, device=index_q.device)
    longest = max((seqs.num_blocks(block_size) for _, seqs in pieces), default=0)
    most = max(SCORE_BYTES // max(4 * longest * index_q.shape[1], 1), 16)
    for rows, seqs in in_chunks(pieces, most):
        scores = SCORING.run(impl, ScoringCall(index_q[rows], found, seqs, block_size))
        visible = seqs.visible_blocks(rows.stop - rows.start, block_size)
        ids[rows] = SCORES_STAGE.run(impl, TopkCall(scores, topk, visible, 0, 0))
        of_ids = scores.transpose(0, 1).gather(2, ids[rows].clamp(min=0).long())
        best[rows] = of_ids.to(best.dtype).masked_fill(ids[rows] < 0, -torch.inf)
    return best, ids


def attended(inputs: AttentionInputs, blocks: Tensor, chunks: Pieces, block_size: int, impl: str) -> tuple[Tensor, Tensor]:
    """Returns out and lse of attention to these blocks, chunk by chunk; queries outside the chunks read nothing."""
    q = inputs.q
    out = torch.zeros(q.shape, dtype=out_dtype(q), device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide_dtype(q), device=q.device)
    for rows, seqs in chunks:
        call = SparseCall(q[rows], inputs.k, inputs.v, blocks[rows], seqs, block_size, inputs.softmax_scale, True)
        ATTENTION.run(impl, call._replace(out=out[rows], lse=lse[rows]))
    return out, lse


def merge(parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges what all ranks found far, ``[ranks, tokens, heads, dim]`` with natural-log lse, into what is near."""
    for start in range(0, out.shape[0], MERGED):
        rows = slice(start, start + MERGED)
        lses = torch.cat((part_lses[:, rows], lse[None, rows]))
        merged, total = merge_partials(torch.cat((parts[:, rows], out[None, rows])).to(lse.dtype), lses)
        out[rows], lse[rows] = merged.to(out.dtype), total


class Delivery:
    """Carries rows of all new tokens, ``[total, ...]``, of which every rank has made its own, to the ranks that own the
    tokens."""

    def __init__(self, x: Tensor, shards: TokenShards, ranks: Ranks) -> None:
        self._tokens, most = shards.tokens(ranks.rank), shards.most()
        self._sent = x.new_zeros(ranks.size * most, *x.shape[1:])
        self._sent.index_copy_(0, shards.gathered_rows(x.device), x)
        self._came = torch.empty_like(self._sent)
        self._work = ranks.all_to_all(self._sent, self._came)
        self._shape = (ranks.size, most, *x.shape[1:])

    def wait(self) -> Tensor:
        """Waits for the transfer, and returns what each rank made of this rank's tokens, ``[ranks, tokens, ...]``."""
        finished(self._work)
        return self._came.view(self._shape)[:, : self._tokens]
