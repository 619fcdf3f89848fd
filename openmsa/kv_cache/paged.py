# SPDX-License-Identifier: MIT
"""`PagedKV` and `PagedIndexKeys`: pools of pages behind a page table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.kv_cache import plain
from openmsa.kv_cache.sharing import check_private
from openmsa.runtime import checks
from openmsa.types import Layout, Sequences, layout, starts

POOL = "[num_pages, heads, page_size, dim]"


class _Paged:
    """What both caches share: a page table, lengths, and where a token lives."""

    page_table: Tensor  # int32 [batch, max_pages]
    seq_lens: Tensor  # int32 [batch]

    def pools(self) -> dict[str, Tensor]:
        """Each pool by its argument name."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        pools = self.pools()
        first_name, first = next(iter(pools.items()))
        for name, pool in pools.items():
            checks.tensor(name, pool, POOL, plain.DTYPES)
            checks.alike(name, pool, first_name, first)
            if pool.shape != first.shape:
                raise ValueError(f"{name} must have the shape of {first_name} {tuple(first.shape)}, got {tuple(pool.shape)}")
        checks.head_dim(f"{first_name}.shape[3]", first.shape[3])
        checks.integer(f"{first_name}.shape[2] (page_size)", first.shape[2], 1)
        checks.tensor("page_table", self.page_table, "[batch, max_pages]", (torch.int32,))
        checks.tensor("seq_lens", self.seq_lens, "[batch]", (torch.int32,))
        checks.size("seq_lens", self.seq_lens, 0, self.page_table.shape[0], "the batch of page_table")
        for name, value in (("page_table", self.page_table), ("seq_lens", self.seq_lens)):
            checks.alike(name, value, first_name, first, dtype=False)

    @property
    def _pool(self) -> Tensor:
        return next(iter(self.pools().values()))

    @property
    def batch(self) -> int:
        return self.page_table.shape[0]

    @property
    def num_pages(self) -> int:
        return self._pool.shape[0]

    @property
    def num_heads(self) -> int:
        return self._pool.shape[1]

    @property
    def page_size(self) -> int:
        return self._pool.shape[2]

    @property
    def head_dim(self) -> int:
        return self._pool.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def requires_grad(self) -> bool:
        return any(pool.requires_grad for pool in self.pools().values())

    @property
    def capacity(self) -> int:
        """Keys that the page table can name for one sequence."""
        return self.page_table.shape[1] * self.page_size

    def layout(self, seqs: Sequences | None, total_q: int, device: torch.device, check: bool = False) -> Layout:
        """Checked lengths of a call that reads this cache. On a CPU the page ids in use are always checked, on a GPU only
        when `check` is True (kernels never follow an id outside the pool)."""
        if self.device != device:
            raise ValueError(f"the paged cache must be on the device of the queries ({device}), got {self.device}")
        if check or device.type == "cpu":
            checks.in_range("seq_lens", self.seq_lens, 0, self.capacity + 1)
        resolved = layout(seqs, total_q, None, device, self.seq_lens, self.capacity, check)
        if check or device.type == "cpu":
            self._check_pages(resolved.k_lens())
        return resolved

    def _check_pages(self, lens: Tensor) -> None:
        """Every page that holds one of the first `lens` keys must exist."""
        logical = torch.arange(self.page_table.shape[1], device=self.device)
        used = logical * self.page_size < lens[:, None]  # [batch, max_pages]
        bad = used & ((self.page_table < 0) | (self.page_table >= self.num_pages))
        if bool(bad.any()):
            b, page = bad.nonzero()[0].tolist()
            raise ValueError(
                f"page_table must name pages from 0 to {self.num_pages - 1} where a sequence has keys, "
                f"got {int(self.page_table[b, page])} at sequence {b}, logical page {page}"
            )

    def slots(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Row of the token at `position` of `sequence` in a pool seen as ``[num_pages * page_size]`` rows, int64."""
        page = self.page_table[sequence, position // self.page_size].long()
        return page * self.page_size + position % self.page_size

    def _gather(self, lens: Tensor | None) -> tuple[list[Tensor], Tensor]:
        lens = self.seq_lens if lens is None else lens
        self._check_pages(lens)
        cu = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        sequence = torch.repeat_interleave(torch.arange(lens.numel(), device=lens.device), lens, output_size=int(cu[-1]))
        position = torch.arange(sequence.numel(), device=lens.device) - cu[sequence]
        slot = self.slots(sequence, position)
        rows = [p[slot // self.page_size, :, slot % self.page_size] for p in self.pools().values()]  # [total, heads, dim]
        return [plain.dequantize(r) for r in rows], cu

    def _append(self, new: dict[str, Tensor], cu_seqlens: Tensor | None, check: bool) -> None:
        first_name, first = next(iter(new.items()))
        for name, rows in new.items():
            checks.tensor(name, rows, "[total_new, heads, dim]")
            checks.size(name, rows, 1, self.num_heads, "the heads of the cache")
            checks.size(name, rows, 2, self.head_dim, "the dim of the cache")
            checks.size(name, rows, 0, first.shape[0], f"the tokens of {first_name}")
            if rows.device != self.device:
                raise ValueError(f"{name} must be on the device of the cache ({self.device}), got {rows.device}")
            if check:
                checks.finite(name, rows)
        total = first.shape[0]
        if cu_seqlens is None:
            if self.batch == 0 or total % self.batch:
                raise ValueError(
                    f"{first_name}.shape[0] must be a multiple of the batch ({self.batch}) when cu_seqlens is None, got {total}"
                )
            cu_seqlens = torch.arange(self.batch + 1, device=self.device, dtype=torch.int32) * (total // self.batch)
        added = starts("cu_seqlens", cu_seqlens, self.device, total, "the number of new tokens")
        if added.numel() - 1 != self.batch:
            raise ValueError(f"cu_seqlens must have batch + 1 entries ({self.batch + 1}), got {added.numel()}")
        lens = self.seq_lens + added.diff()
        token = torch.arange(total, device=self.device)
        sequence = torch.searchsorted(added[1:], token.int(), right=True)
        position = token - added[sequence] + self.seq_lens[sequence]
        full = (lens > self.capacity).nonzero().flatten()
        if full.numel():
            b = int(full[0])
            raise ValueError(
                f"cu_seqlens must not append past the page table's capacity ({self.capacity} keys a sequence), "
                f"got {int(lens[b])} for sequence {b}"
            )
        self._check_pages(lens)
        check_private(self.page_table, self.seq_lens, sequence, position, self.page_size)
        slot = self.slots(sequence, position)
        for name, rows in new.items():
            pool = self.pools()[name]
            pool[slot // self.page_size, :, slot % self.page_size] = plain.quantize(rows, pool.dtype)
        self.seq_lens.copy_(lens)


@dataclass
class PagedKV(_Paged):
    """Keys and values in pages.

    k, v:        ``[num_pages, num_kv_heads, page_size, head_dim]``, float32, float16 or bfloat16, any strides.
    page_table:  int32 ``[batch, max_pages]``; physical page of each logical page; -1 where none is assigned.
    seq_lens:    int32 ``[batch]``; keys held for each sequence; `append` advances it in place.

    A cache owns its `seq_lens`; the page table may be shared with the layer's `PagedIndexKeys`.
    """

    k: Tensor
    v: Tensor
    page_table: Tensor
    seq_lens: Tensor

    @classmethod
    def allocate(
        cls,
        page_table: Tensor,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> PagedKV:
        """Empty pools (zeros) on the device of `page_table`."""
        shape = (num_pages, num_kv_heads, page_size, head_dim)
        k, v = (torch.zeros(shape, dtype=dtype, device=page_table.device) for _ in range(2))
        return cls(k, v, page_table, torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device))

    def pools(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v}

    def append(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """Writes new tokens behind each sequence's keys and advances `seq_lens`.

        k, v: ``[total_new, num_kv_heads, head_dim]``, converted to the cache's dtype. cu_seqlens: int32 ``[batch + 1]``, the
        packed tokens of each sequence; None: the same number for each. The pages must be in the table already. On an error
        the cache is unchanged. check: also refuse NaN. On a GPU the checks sync with the host.
        """
        self._append({"k": k, "v": v}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The first `lens` (int32 ``[batch]``; None: all) keys of each sequence: packed k, v ``[total_k, num_kv_heads,
        head_dim]`` and cu_seqlens int32 ``[batch + 1]``. On a GPU this syncs with the host."""
        (k, v), cu = self._gather(lens)
        return k, v, cu


@dataclass
class PagedIndexKeys(_Paged):
    """Index keys in pages: as `PagedKV`, with one pool ``[num_pages, index_key_heads, page_size, index_dim]``."""

    keys: Tensor
    page_table: Tensor
    seq_lens: Tensor

    @classmethod
    def allocate(
        cls,
        page_table: Tensor,
        num_pages: int,
        num_heads: int,
        page_size: int,
        index_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> PagedIndexKeys:
        """An empty pool (zeros) on the device of `page_table`."""
        keys = torch.zeros(num_pages, num_heads, page_size, index_dim, dtype=dtype, device=page_table.device)
        return cls(keys, page_table, torch.zeros(page_table.shape[0], dtype=torch.int32, device=page_table.device))

    def pools(self) -> dict[str, Tensor]:
        return {"keys": self.keys}

    def append(self, keys: Tensor, cu_seqlens: Tensor | None = None, *, check: bool = False) -> None:
        """As `PagedKV.append`, for index keys ``[total_new, index_key_heads, index_dim]``."""
        self._append({"keys": keys}, cu_seqlens, check)

    def gather(self, lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `PagedKV.gather`: packed index keys ``[total_k, index_key_heads, index_dim]`` and cu_seqlens."""
        (keys,), cu = self._gather(lens)
        return keys, cu
