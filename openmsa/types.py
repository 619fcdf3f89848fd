# SPDX-License-Identifier: MIT
"""Packed sequences say which queries belong to which keys, and the dtype of queries says that of results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks, named_devices, value_checks
from openmsa.runtime.kinds import computes, rounded
from openmsa.runtime.lengths import chunk_of, starts_of

INT32_MAX = 2**31 - 1  # positions and starts are int32


@dataclass(frozen=True, eq=False)
class Sequences:
    """`Sequences` gives the lengths of packed sequences. Query i of sequence b stands at position ``q_offset[b] + i`` of its
    sequence and sees the keys at or before that position.

    cu_seqlens_q:  int32 [batch + 1], where each sequence's queries start in the packed tensor; None: one sequence.
    cu_seqlens_k:  int32 [batch + 1], where each sequence's keys start; None: one sequence or, with a paged cache, its
                   ``seq_lens``. With a paged cache the differences say how many of the cached keys exist for this call.
    max_seqlen_q:  the longest query length or a bound on it; None: read from the tensor (on a GPU that is a host sync,
                   so pass it).
    max_seqlen_k:  the longest key length or a bound on it; None: as for queries, but the capacity of the page table with a
                   paged cache on a GPU.
    q_offset:      int32 [batch], position of each sequence's first query; None: ``k_len - q_len``, so that the queries
                   are the last positions of their keys (bottom-right causal). A query before position 0 sees nothing.

    Tensors live on the device of the queries; int64 is accepted and converted. ``==`` compares values, on a GPU with a sync.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    q_offset: Tensor | None = None

    @classmethod
    def from_lengths(cls, q_lens: Sequence[int], k_lens: Sequence[int], device: torch.device | str = "cpu") -> Sequences:
        """Makes sequences from their query lengths and key lengths, which are known on the host."""
        device = named_devices.usable("device", device)
        for name, lens in (("q_lens", q_lens), ("k_lens", k_lens)):
            value_checks.lengths(name, lens, INT32_MAX)
        if len(q_lens) != len(k_lens):
            raise ValueError(f"k_lens must have one entry a sequence ({len(q_lens)}), got {len(k_lens)}")
        cu_q, cu_k = (starts_of(torch.tensor(lens, dtype=torch.int32, device="cpu")) for lens in (q_lens, k_lens))
        return cls(cu_q.to(device), cu_k.to(device), max(q_lens, default=0), max(k_lens, default=0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequences) and all(map(_same, vars(self).values(), vars(other).values()))


def _same(mine: Tensor | int | None, other: Tensor | int | None) -> bool:
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        return mine is other or (mine.device == other.device and mine.dtype == other.dtype and torch.equal(mine, other))
    return not isinstance(mine, Tensor) and not isinstance(other, Tensor) and mine == other


@dataclass(frozen=True, eq=False)
class Layout:
    """`Layout` is what the implementations of a stage receive of checked `Sequences`. All tensors are contiguous. q_offset is
    None where the queries are the last of their keys: kernels find positions themselves, in two launches less."""

    cu_seqlens_q: Tensor  # int32 [batch + 1]
    cu_seqlens_k: Tensor  # int32 [batch + 1]
    max_seqlen_q: int
    max_seqlen_k: int
    q_offset: Tensor | None  # int32 [batch]
    longest_q: int  # max_seqlen_q of the whole call: what must not change with query chunks depends on this one
    most_q: int = 0  # launches serve so many packed queries where a call has fewer, so that like calls make the same

    def launched(self, q: Any) -> int:
        """Returns for how many packed queries launches are made: those of q, or `most_q` where these are more."""
        return max(int(q.shape[0]), self.most_q)

    @property
    def batch(self) -> int:
        """Returns the number of sequences."""
        return self.cu_seqlens_q.numel() - 1

    def first_positions(self) -> Tensor:
        """Returns the position of each sequence's first query, int32 [batch]."""
        if self.q_offset is not None:
            return self.q_offset
        computes("positions of queries")
        return (self.cu_seqlens_k - self.cu_seqlens_q).diff()

    def num_blocks(self, block_size: int) -> int:
        """Returns how many blocks the longest sequence has."""
        return -(-self.max_seqlen_k // block_size)

    def k_lens(self) -> Tensor:
        """Returns how many keys each sequence has, int32 [batch]."""
        computes("lengths of keys")
        return self.cu_seqlens_k.diff()

    def tokens(self, total_q: int) -> tuple[Tensor, Tensor]:
        """Returns each query's sequence, int64 [total_q], and the last key that it sees, int32 [total_q] (below 0: none)."""
        computes("what each query sees")
        token = torch.arange(total_q, device=self.cu_seqlens_q.device, dtype=torch.int32)
        sequence = torch.searchsorted(self.cu_seqlens_q[1:], token, right=True).clamp_(max=max(self.batch - 1, 0))
        if self.batch == 0:
            return sequence, token
        position = token - self.cu_seqlens_q[sequence] + self.first_positions()[sequence]
        return sequence, torch.minimum(position, self.k_lens()[sequence] - 1)

    def visible_blocks(self, total_q: int, block_size: int) -> Tensor:
        """Returns how many blocks hold a key that each query sees, int32 [total_q]; its own block is the last of them."""
        _, last_key = self.tokens(total_q)
        return torch.div(last_key, block_size, rounding_mode="floor").clamp_(min=-1) + 1

    def like(self, most_q: int) -> Layout:
        """Returns the lengths as all calls have them whose launches serve so many queries, and whose longest are alike."""
        longest = max(self.max_seqlen_q, min(rounded(self.max_seqlen_q), most_q))
        return replace(self, max_seqlen_q=longest, longest_q=longest, most_q=most_q)

    def query_chunk(self, start: int, stop: int) -> Layout:
        """Returns the layout of the packed queries [start, stop) alone, without a host sync."""
        cu_q, offset = chunk_of(self.cu_seqlens_q, self.cu_seqlens_k, self.q_offset, start, stop)
        longest, most = (min(x, stop - start) for x in (self.max_seqlen_q, self.most_q))
        return replace(self, cu_seqlens_q=cu_q, max_seqlen_q=longest, q_offset=offset, most_q=most)

    def on_host(self) -> list[tuple[int, int, int, int, int]]:
        """Returns each sequence's first and end packed query, first packed key, k_len, and position of its first query. It
        syncs."""
        starts = zip(pairwise(self.cu_seqlens_q.tolist()), pairwise(self.cu_seqlens_k.tolist()), strict=True)
        spans = [(q0, q1, k0, k1 - k0) for (q0, q1), (k0, k1) in starts]
        offsets = [k_len + q0 - q1 for q0, q1, _, k_len in spans] if self.q_offset is None else self.q_offset.tolist()
        return [(*span, offset) for span, offset in zip(spans, offsets, strict=True)]


def layout(
    seqs: Sequences | Layout | None,
    total_q: int | None,
    total_k: int | None,
    device: torch.device,
    cached_lens: Tensor | None = None,
    cache_capacity: int = 0,
    check: bool = False,
    of: str = "seqs.",
) -> Layout:
    """Checks `seqs` and fills in what it leaves None. A `Layout` is returned as it is.

    total_q: packed queries, or None where the starts of queries, which are then given, may end at any number.
    total_k: packed keys, or None with a paged cache, for which `cached_lens` (int32 [batch]) and `cache_capacity` (keys a
    sequence) are given. Values on a GPU are read only when `check` is True or a maximum is missing. of: what stands in front of
    the names of lengths in errors.
    """
    if isinstance(seqs, Layout):
        return seqs
    if seqs is None:
        seqs = Sequences()
    if not isinstance(seqs, Sequences):
        raise TypeError(f"seqs must be an openmsa.Sequences or None, got {type(seqs).__name__}")
    if check and device.type == "meta":
        raise ValueError("check must be False on the meta device, whose tensors hold no values to check")
    readable = check or device.type == "cpu"

    cu_q, max_q = seqs.cu_seqlens_q, seqs.max_seqlen_q
    if cu_q is None:
        assert total_q is not None
        cu_q, max_q = _one_sequence(total_q, device), total_q if max_q is None else max_q
    else:
        cu_q = starts(f"{of}cu_seqlens_q", cu_q, device, total_q, "the number of queries" if readable else "")
    batch = cu_q.numel() - 1

    cu_k, max_k = seqs.cu_seqlens_k, seqs.max_seqlen_k
    if cu_k is not None:
        cu_k = starts(f"{of}cu_seqlens_k", cu_k, device, total_k, "the number of keys" if readable else "")
    elif cached_lens is not None:
        if max_k is None and device.type != "cpu":
            max_k = cache_capacity
        most = None if readable else min(checks.integer(f"{of}max_seqlen_k", max_k, 0), cache_capacity)
        cu_k = starts_of(cached_lens, most)  # lengths that the host does not read stay inside the page table
    else:
        assert total_k is not None
        cu_k, max_k = _one_sequence(total_k, device), total_k if max_k is None else max_k
    if cu_k.numel() - 1 != batch:
        keys = "the cache's seq_lens" if seqs.cu_seqlens_k is None and cached_lens is not None else f"{of}cu_seqlens_k"
        raise ValueError(
            f"{keys} must describe as many sequences as {of}cu_seqlens_q ({batch}; None means one), got {cu_k.numel() - 1}"
        )
    if cached_lens is not None and seqs.cu_seqlens_k is not None and readable:
        value_checks.held(f"{of}cu_seqlens_k", cu_k.diff(), cached_lens)

    max_q = _bound(f"{of}max_seqlen_q", max_q, cu_q, readable)
    max_k = _bound(f"{of}max_seqlen_k", max_k, cu_k, readable)
    offset = seqs.q_offset
    if offset is not None:
        _integers(f"{of}q_offset", offset, "[batch]", device)
        checks.size(f"{of}q_offset", offset, 0, batch, "one entry a sequence")
        if readable:  # the last position, too, must be an int32
            value_checks.in_range(f"{of}q_offset", offset, -INT32_MAX, INT32_MAX - max_q)
        offset = offset.to(torch.int32).contiguous()
    return Layout(cu_q, cu_k, max_q, max_k, offset, max_q)


def _one_sequence(total: int, device: torch.device) -> Tensor:
    if total == 0:
        return torch.zeros(2, dtype=torch.int32, device=device)
    return torch.arange(0, total + 1, total, dtype=torch.int32, device=device)  # [0, total], without a copy from the host


def _integers(name: str, value: Tensor, shape: str, device: torch.device) -> None:
    checks.tensor(name, value, shape, (torch.int32, torch.int64))
    if value.device != device:
        raise ValueError(f"{name} must be on the device of the queries ({device}), got {value.device}")


def starts(name: str, value: Tensor, device: torch.device, total: int | None = None, what: str = "") -> Tensor:
    """Returns `value` as int32 [batch + 1] starts of sequences. With `what` its values are checked: they begin at 0, do not
    decrease, and end at `total`, the number of `what` (None: at any number)."""
    _integers(name, value, "[batch + 1]", device)
    if value.numel() < 1:
        raise ValueError(f"{name} must have at least one entry, got shape {tuple(value.shape)}")
    if what:
        value_checks.starts(name, value, total, what)
    return value.to(torch.int32).contiguous()


def _bound(name: str, bound: int | None, starts: Tensor, readable: bool) -> int:
    if bound is None and starts.device.type == "meta":
        raise ValueError(f"{name} must be given on the meta device, whose tensors hold no values, got None")
    known = bound is None or readable
    longest = max((stop - start for start, stop in pairwise(starts.tolist())), default=0) if known else 0
    if bound is None:
        return longest
    if checks.integer(name, bound, 0, INT32_MAX) < longest:
        raise ValueError(f"{name} must be at least the longest sequence ({longest}), got {bound}")
    return bound


def wide_dtype(q: Any) -> torch.dtype:
    """A stage computes in this dtype: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def out_dtype(q: Any) -> torch.dtype:
    """Attention returns this dtype: the queries' own, bfloat16 where they are stored in a format."""
    return q.dtype if isinstance(q, Tensor) else torch.bfloat16
