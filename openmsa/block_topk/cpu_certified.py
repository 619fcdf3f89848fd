# SPDX-License-Identifier: MIT
"""`select_blocks(certified=True)` on a CPU takes bounds from int8 keys, and exact scores only of blocks that they leave open.

A key is ``data * scale`` plus an error of norm at most ``error``, so by Cauchy-Schwarz its product with q lies within
``|q| * error`` of that of ``data * scale``. Rounding is inside the bounds too: a dot product of `dim` terms, summed in any
order, is off by less than ``dim * eps / 2 * |q| * |k|``. With k places to give, a block whose upper bound misses the k-th best
lower bound cannot be chosen, and one whose lower bound is above the k+1-st best upper bound must be. Where the exact scores of
the last chosen and the first rejected of the others are no further apart than rounding, the row is scored as the uncertified
selection scores it, so that both agree bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.block_scores import STAGE as SCORING
from openmsa.block_topk.cpu import select_from_scores
from openmsa.inputs import ScoringCall, exact_keys
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys
from openmsa.kv_cache.rows import dequantized
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.kv_cache.stored import Stored
from openmsa.types import Layout, wide_dtype

TOKENS, KEYS = 32, 8192  # queries of one sequence and keys whose bounds are held at a time


def select_blocks(
    index_q: Tensor | Stored,
    index_k: CertifiedKeys | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    blocks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `openmsa.block_topk.select_blocks`. Returns the blocks, and int32 ``[total_q, heads]``: how many were rescored."""
    total_q, heads, _ = index_q.shape
    blocks = torch.empty((total_q, heads, topk), dtype=torch.int32, device="cpu") if blocks is None else blocks
    blocks.fill_(-1)
    rescored = torch.zeros(total_q, heads, dtype=torch.int32, device="cpu")
    pool = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    assert isinstance(pool, CertifiedKeys)
    wide, key_heads = wide_dtype(index_q), pool.shape[1]
    numbers = dequantized(index_q.detach(), wide)
    visible = seqs.visible_blocks(total_q, block_size)
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        pages = index_k.page_table[b] if isinstance(index_k, PagedIndexKeys) else None
        keys = Keys(*(Rows(x, k0, pages, wide) for x in (pool.coarse, pool.coarse.error[..., None], pool.exact)))
        for t0 in range(q0, q1, TOKENS):
            rows = slice(t0, min(t0 + TOKENS, q1))
            position = torch.arange(rows.start - q0, rows.stop - q0, device="cpu") + offset
            for head in range(key_heads):
                group = slice(head * heads // key_heads, (head + 1) * heads // key_heads)
                if position[-1] < 0 or k_len == 0:
                    continue
                tile = Tile(numbers[rows, group].transpose(0, 1), position, visible[rows], k_len, head, block_size)
                chosen, count, certain = tile.select(keys, topk, init_blocks, local_blocks)
                blocks[rows, group], rescored[rows, group] = chosen, count
                for t in (~certain).nonzero().flatten().tolist():
                    token = slice(rows.start + t, rows.start + t + 1)
                    scores = _scored_whole(index_q, index_k, seqs, token, block_size)[group]
                    blocks[token, group] = select_from_scores(scores, topk, visible[token], init_blocks, local_blocks)
                    rescored[token, group] = visible[token]
    return blocks, rescored


def _scored_whole(
    index_q: Tensor | Stored, index_k: CertifiedKeys | PagedIndexKeys, seqs: Layout, token: slice, block_size: int
) -> Tensor:
    seqs_of_token = seqs.query_chunk(token.start, token.stop)
    scores: Tensor = SCORING.run("cpu", ScoringCall(index_q[token], exact_keys(index_k), seqs_of_token, block_size))
    return scores


@dataclass(frozen=True)
class Keys:
    """Keys of one sequence are int8 numbers, the norms of their errors (one column), and exact keys."""

    coarse: Rows
    error: Rows
    exact: Rows


@dataclass(frozen=True)
class Tile:
    """A tile is neighbouring queries of one sequence, and the heads that share a key head.

    q: numbers ``[group, tokens, dim]``. position: int64 ``[tokens]``. visible: blocks that each token sees, int32 ``[tokens]``.
    """

    q: Tensor
    position: Tensor
    visible: Tensor
    k_len: int
    head: int
    block_size: int

    @property
    def stop(self) -> int:
        """Returns the number of keys that the last query sees."""
        return min(int(self.position[-1]) + 1, self.k_len)

    @property
    def unit(self) -> float:
        """Returns what two computed values of a dot product differ by at most, over the product of the norms: each is off by
        less than dim * eps / 2; a little more, for the roundings around them."""
        return (self.q.shape[2] + 8) * torch.finfo(self.q.dtype).eps

    def select(self, keys: Keys, topk: int, init_blocks: int, local_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns blocks int32 ``[tokens, group, topk]``, counts ``[tokens, group]`` of rescored blocks, and which tokens are
        certain."""
        lower, upper, doubt = self._bounds(keys)  # [group, tokens, blocks] each
        block, seen = torch.arange(lower.shape[2], device="cpu"), self.visible[:, None]
        forced = (block < seen) & ((block < init_blocks) | (block >= seen - local_blocks))  # [tokens, blocks]
        places = topk - forced.sum(-1)  # [tokens]
        lower, upper = (x.masked_fill_(forced, -torch.inf) for x in (lower, upper))
        possible = (upper >= _nth_best(lower, places)) & (upper > -torch.inf)
        sure = lower > _nth_best(upper, places + 1)
        open_ = possible & ~sure
        scores = self._rescore(keys.exact, open_)
        rivals, doubt = scores.masked_fill(~open_, -torch.inf), doubt.masked_fill(~open_, 0)
        certain = _certain(rivals, doubt, places - sure.sum(-1)).all(0)
        scores = rivals.masked_fill_(sure, torch.inf)
        chosen = select_from_scores(scores, topk, self.visible, init_blocks, local_blocks)
        return chosen, open_.sum(-1, dtype=torch.int32).t(), certain

    def _bounds(self, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
        """Returns lower and upper bounds of each block's score, and what two computed values of it may differ by."""
        group, tokens, _ = self.q.shape
        shape = group, tokens, -(-self.stop // self.block_size)
        lower, upper, doubt = (torch.full(shape, -torch.inf, dtype=self.q.dtype, device="cpu") for _ in range(3))
        norm = _norm(self.q)[..., None] * (1 + self.unit)  # [group, tokens, 1]
        step = max(1, KEYS // self.block_size) * self.block_size
        for first in range(0, self.stop, step):
            stop = min(first + step, self.stop)
            k = keys.coarse.span(self.head, first, stop)  # [keys, dim]
            error = keys.error.span(self.head, first, stop)[:, 0].to(k.dtype)  # [keys]
            is_nan = k.isnan().any(-1)
            length = (_norm(k) + error) * (1 + self.unit)
            products = self.q @ k.t()  # [group, tokens, keys]
            rounding = norm * (self.unit * length) + self.q.shape[2] * torch.finfo(k.dtype).tiny
            radius = norm * error + rounding
            low, high = products - radius, products + radius
            unknown = ~(low.isfinite() & high.isfinite())
            dropped = is_nan | (torch.arange(first, stop, device="cpu") > self.position[:, None])
            low = low.masked_fill(unknown | dropped, -torch.inf)
            high = high.masked_fill(unknown, torch.inf).masked_fill(dropped, -torch.inf)
            of = slice(first // self.block_size, -(-stop // self.block_size))
            rounding = rounding.masked_fill(is_nan, 0)
            lower[..., of], upper[..., of], doubt[..., of] = (_block_max(x, self.block_size) for x in (low, high, rounding))
        return lower, upper, doubt

    def _rescore(self, exact: Rows, open_: Tensor) -> Tensor:
        """Returns scores ``[group, tokens, blocks]`` of the blocks that are open to any row of the tile; -inf for the
        others."""
        scores = torch.full(open_.shape, -torch.inf, dtype=self.q.dtype, device="cpu")
        blocks = open_.any(0).any(0).nonzero().flatten()
        within = torch.arange(self.block_size, device="cpu")
        place = (blocks[:, None] * self.block_size + within).flatten()  # [blocks * block_size]
        k = exact.take(place.clamp(max=self.stop - 1), torch.tensor(self.head, device="cpu")).to(self.q.dtype)
        products = (self.q @ k.t()).nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        hidden = (place > self.position[:, None]) | (place >= self.stop)
        scores[..., blocks] = _block_max(products.masked_fill(hidden, -torch.inf), self.block_size)
        return scores


def _norm(x: Tensor) -> Tensor:
    """Returns the norms of rows ``[..., dim]``, or a little more, as squares below the smallest normal number may be lost."""
    return torch.linalg.vector_norm(x, dim=-1) + (x.shape[-1] * torch.finfo(x.dtype).tiny) ** 0.5


def _block_max(products: Tensor, block_size: int) -> Tensor:
    short = -products.shape[-1] % block_size
    return torch.nn.functional.pad(products, (0, short), value=-torch.inf).unflatten(-1, (-1, block_size)).amax(-1)


def _nth_best(values: Tensor, n: Tensor) -> Tensor:
    """Returns the n-th largest (int64 ``[tokens]``, from 0) of each row ``[group, tokens, count]``, ``[group, tokens, 1]``:
    +inf for 0, -inf past the count."""
    ordered = values.sort(dim=-1, descending=True).values
    first, last = (torch.full_like(values[..., :1], x) for x in (torch.inf, -torch.inf))
    n = n.clamp(max=values.shape[-1] + 1).expand(values.shape[:-1])[..., None]
    return torch.cat((first, ordered, last), -1).gather(-1, n)


def _certain(scores: Tensor, doubt: Tensor, places: Tensor) -> Tensor:
    """Says whether the best `places` (``[group, tokens]``) of each row are the same however the scores were rounded: two ways
    to compute a score differ by at most `doubt`, without a limit where infinities may meet."""
    ordered, order = scores.sort(dim=-1, descending=True)
    doubt = doubt.gather(-1, order)
    kept = torch.arange(ordered.shape[-1], device="cpu") < places[..., None]
    least = (ordered - doubt).masked_fill(~kept, torch.inf).amin(-1)
    best = (ordered + doubt).masked_fill(kept, -torch.inf).amax(-1)
    return ((least > best) | (best == -torch.inf)) & doubt.isfinite().all(-1)
