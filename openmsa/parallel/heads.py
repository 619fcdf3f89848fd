# SPDX-License-Identifier: MIT
"""In tensor parallelism heads are spread over ranks, and index keys are on all of them."""

from __future__ import annotations

from dataclasses import dataclass

from openmsa.runtime import checks


@dataclass(frozen=True)
class HeadShare:
    """`HeadShare` says which heads a rank computes, as slices of the dimension of heads.

    q, kv:             query heads, and key/value heads with their queries.
    index_q, index_k:  heads of index queries and of index keys.

    Every stage and plan takes a rank's share as it is, ``q[:, share.q]``, ``k[:, share.kv]``, with the head counts of the
    share; no rank needs another one's heads before the output projection.
    """

    q: slice
    kv: slice
    index_q: slice
    index_k: slice

    @property
    def num_q_heads(self) -> int:
        return self.q.stop - self.q.start

    @property
    def num_kv_heads(self) -> int:
        return self.kv.stop - self.kv.start

    @property
    def index_heads(self) -> int:
        return self.index_q.stop - self.index_q.start

    @property
    def index_key_heads(self) -> int:
        return self.index_k.stop - self.index_k.start


def shard_heads(
    num_q_heads: int,
    num_kv_heads: int,
    rank: int,
    ranks: int,
    *,
    index_heads: int | None = None,
    index_key_heads: int = 1,
) -> HeadShare:
    """Spreads heads over ranks.

    num_q_heads, num_kv_heads:  heads of the model. The number of ranks divides num_kv_heads; or it is a multiple of it, and
                                then
                     several ranks hold the same key/value head, each with its part of that head's queries.
    rank, ranks:     this process's place in the group, and the size of the group.
    index_heads:     num_kv_heads (None), or 1: one selection for all heads, which every rank computes.
    index_key_heads: divides index_heads. Each rank gets the index key heads that its index heads read; with 1 that is the same
                     head on all ranks.

    Raises ValueError where heads do not divide, and TypeError, naming the argument, the rule and the value.
    """
    checks.integer("num_q_heads", num_q_heads, 1)
    checks.integer("num_kv_heads", num_kv_heads, 1)
    checks.divides("num_kv_heads", num_kv_heads, "num_q_heads", num_q_heads)
    checks.integer("ranks", ranks, 1)
    checks.integer("rank", rank, 0, ranks - 1)
    index_heads = num_kv_heads if index_heads is None else checks.integer("index_heads", index_heads, 1)
    if index_heads not in (1, num_kv_heads):
        raise ValueError(f"index_heads must be num_kv_heads ({num_kv_heads}) or 1, got {index_heads}")
    checks.integer("index_key_heads", index_key_heads, 1)
    checks.divides("index_key_heads", index_key_heads, "index_heads", index_heads)
    if num_q_heads % ranks:
        raise ValueError(f"ranks must divide num_q_heads ({num_q_heads}), got {ranks}")
    if num_kv_heads % ranks and ranks % num_kv_heads:
        raise ValueError(f"ranks must divide num_kv_heads ({num_kv_heads}) or be a multiple of it, got {ranks}")
    kv = _share(num_kv_heads, rank, ranks)
    index_q = slice(0, 1) if index_heads == 1 else kv
    readers = index_heads // index_key_heads
    first, stop = index_q.start // readers, -(-index_q.stop // readers)
    if stop - first > 1 and (index_q.start % readers or index_q.stop % readers):
        raise ValueError(
            f"ranks must give each rank whole index key heads ({index_key_heads} for {index_heads} index heads) or a part of "
            f"one, got {ranks}"
        )
    return HeadShare(_share(num_q_heads, rank, ranks), kv, index_q, slice(first, stop))


def _share(heads: int, rank: int, ranks: int) -> slice:
    """Returns the heads of a rank: an equal part of them, or, where there are more ranks, one."""
    return slice(rank * heads // ranks, max((rank + 1) * heads // ranks, rank * heads // ranks + 1))
