# SPDX-License-Identifier: MIT
"""The queries of a rank find the keys of all ranks here, gathered as packed tensors or as pages of caches."""

from __future__ import annotations

from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.parallel.pages import Gathered, Places, check_caches
from openmsa.parallel.ranks import Ranks
from openmsa.parallel.shards import TokenShards
from openmsa.parallel.tokens import Gathering
from openmsa.runtime import checks


class Packed:
    """Gathers the new keys of all ranks as packed tensors."""

    def __init__(self, k: Tensor, v: Tensor, index_k: Tensor, shards: TokenShards, ranks: Ranks) -> None:
        self._index = Gathering(index_k, shards, ranks)
        self._k, self._v = (Gathering(x, shards, ranks) for x in (k, v))

    def index_keys(self) -> Tensor:
        return self._index.finish()

    def keys_and_values(self) -> tuple[Tensor | PagedKV, Tensor | None]:
        return self._k.wait(), self._v.wait()


class Paged:
    """Gathers the cached pages of all ranks and appends the new keys of all ranks, and to the rank's own cache its share."""

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        index_k: Tensor,
        kv: PagedKV,
        index_keys: PagedIndexKeys,
        where: Places,
        shards: TokenShards,
        ranks: Ranks,
    ) -> None:
        self._where, self._own = where, (kv, index_keys)
        self._index = Gathered(index_keys, where, ranks), Gathering(index_k, shards, ranks)
        self._main = Gathered(kv, where, ranks), Gathering(k, shards, ranks), Gathering(v, shards, ranks)

    def index_keys(self) -> PagedIndexKeys:
        pages, new = self._index[0].wait(), self._index[1].finish()
        assert isinstance(pages, PagedIndexKeys)
        pages.append(new, self._where.starts)
        self._own[1].append(new[self._where.own], self._where.own_starts)
        return pages

    def keys_and_values(self) -> tuple[Tensor | PagedKV, Tensor | None]:
        pages, k, v = self._main[0].wait(), self._main[1].finish(), self._main[2].finish()
        assert isinstance(pages, PagedKV)
        pages.append(k, v, self._where.starts)
        own = self._where.own
        self._own[0].append(k[own], v[own], self._where.own_starts)
        return pages, None


def check_new_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_k: Tensor,
    kv: PagedKV,
    index_keys: PagedIndexKeys,
    shards: TokenShards,
    cached: tuple[int, ...],
    rank: int,
) -> None:
    """Checks that this rank's caches take the new keys."""
    if checks.needs_grad(q, k, v, index_k):
        raise NotImplementedError("no gradients flow through caches; call it under torch.no_grad()")
    check_caches(kv, index_keys, shards, cached, rank)
    for name, new, cache_name, cache in (("k", k, "kv", kv), ("index_k", index_k, "index_keys", index_keys)):
        checks.size(name, new, 1, cache.num_heads, f"heads of {cache_name}")
        checks.size(name, new, 2, cache.head_dim, f"dim of {cache_name}")
