# SPDX-License-Identifier: MIT
"""Numbers the rows of the CSR form of a selection, sorts queries into them, and finds the way back to the selection.

A row is one key block of one sequence. Rows are numbered level by level: block 0 of every sequence comes first, in the order
of the batch, then block 1 of every sequence that has one, and so on.

Attention wants the blocks of a query, and callers hand over the queries of a block. `build_k2q_csr` therefore leaves the
selection with the ``k2q_q_indices`` that it returns, in an attribute that lives and dies with that tensor, and no sort is
needed. The attribute counts only while neither CSR tensor was written to (their version counters say so, and on a CPU, where
NumPy may write to the memory of a tensor, their values too) and building and attending are both or neither captured in a CUDA
graph. For everything else (copies, views, CSR tensors from elsewhere, overwritten buffers) one more stable sort on the device
rebuilds the selection. Both give the same ids in the same order: ascending.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.runtime import checks, devices, value_checks

NOTHING = 2**31 - 1
"""This number stands for a row or a block that does not exist; attention skips every block id past the visible ones."""

LARGE = 1 << 24
"""Heads with more entries than this together are sorted one at a time."""

ATTRIBUTE = "_openmsa_selection"
"""An attribute of this name holds the selection of a CSR tensor."""


@dataclass(frozen=True)
class Rows:
    """Numbers the rows of one batch. Nothing here is read on the host."""

    cu_seqlens_q: Tensor  # int32 [batch + 1]
    blocks: Tensor  # int32 [batch], the blocks of each sequence
    levels: int  # a bound on the blocks of one sequence

    @classmethod
    def of(cls, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, block_size: int, levels: int) -> Rows:
        """Makes the numbering from checked lengths, int32 ``[batch + 1]`` both."""
        return cls(cu_seqlens_q, (cu_seqlens_k.diff() + block_size - 1) // block_size, levels)

    @property
    def batch(self) -> int:
        """Returns the number of sequences."""
        return self.blocks.numel()

    def _table(self) -> Tensor:
        """Returns int32 ``[levels, batch]``, how many rows come up to and with the one of each level and sequence."""
        level = torch.arange(self.levels, device=self.blocks.device, dtype=torch.int32)
        return (level[:, None] < self.blocks).flatten().cumsum(0, dtype=torch.int32).view(self.levels, self.batch)

    def of_blocks(self, sequence: Tensor, block: Tensor) -> Tensor:
        """Returns the rows of blocks, int32 of the shape of `block`; NOTHING where there is no such block.

        block: int32 ``[..., total_q, topk]``, block ids within the sequence of each token. sequence: int64 ``[total_q]``."""
        if not self.levels:
            return torch.full_like(block, NOTHING)
        limit = self.blocks.clamp(max=self.levels)
        limit = limit if self.batch == 1 else limit[sequence][:, None]
        held = (block >= 0) & (block < limit)
        if self.batch == 1:
            return torch.where(held, block, NOTHING)
        row = self._table().view(-1)[torch.where(held, block * self.batch + sequence[:, None].int(), 0)]
        return torch.where(held, row - 1, NOTHING)

    def of_rows(self, total_rows: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence and the block of each row, int64 ``[total_rows]`` both; 0 for rows past the last."""
        device = self.blocks.device
        if self.batch == 1:
            block = torch.arange(total_rows, device=device)
            return torch.zeros_like(block), block
        table = self._table()
        level = torch.arange(self.levels, device=device)[:, None]
        row = torch.where((level < self.blocks) & (table <= total_rows), table - 1, total_rows).long()  # [levels, batch]
        place = torch.zeros(total_rows + 1, dtype=torch.int64, device=device)  # the last entry takes blocks that have no row
        place.scatter_(0, row.flatten(), torch.arange(row.numel(), device=device))
        return place[:-1] % max(self.batch, 1), place[:-1] // max(self.batch, 1)

    def of_tokens(self, total_q: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence of each query token, int64 ``[total_q]``, and its number within that, int32 ``[total_q]``."""
        token = torch.arange(total_q, device=self.blocks.device, dtype=torch.int32)
        if self.batch == 1:
            return torch.zeros_like(token, dtype=torch.int64), token
        sequence = torch.searchsorted(self.cu_seqlens_q[1:], token, right=True).clamp_(max=max(self.batch - 1, 0))
        return sequence, token - self.cu_seqlens_q[sequence]


def sort_heads(value: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Sorts each head of int32 ``[heads, entries]``, with equal values in their order. Returns the values, where `most` stands
    for those above it, and the entry that each came from, int64.

    All heads are sorted together in one sort, where PyTorch would sort segments in two, by keys of two bytes where those are
    enough, as a radix sort takes its time by the byte."""
    heads, entries = value.shape
    width = most + 1
    kind = torch.int16 if heads * width <= 2**15 else torch.int32 if heads * width <= 2**31 else torch.int64
    base = (torch.arange(heads, device=value.device)[:, None] * width).to(kind)
    key, entry = (value.clamp(max=most).to(kind) + base).flatten().sort(stable=True)
    return key.view(heads, entries) - base, entry.remainder_(max(entries, 1)).view(heads, entries)


def by_heads(function: Callable[..., tuple[Tensor, ...]], *heads: Tensor) -> tuple[Tensor, ...]:
    """Returns ``function(*heads)`` of tensors ``[heads, ...]``. Where they are large it is called for one head at a time, as a
    sort holds int64 numbers of all its entries."""
    if heads[0].shape[0] < 2 or heads[0].numel() <= LARGE:
        return function(*heads)
    parts = [function(*(x[h : h + 1] for x in heads)) for h in range(heads[0].shape[0])]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


@dataclass(frozen=True)
class _Remembered:
    """This holds a selection that lies with its CSR tensors, and says when it may be used in place of them."""

    blocks: Tensor  # int32 [total_q, num_kv_heads, topk]
    row_ptr: weakref.ref[Tensor]  # the other CSR tensor
    versions: tuple[int, int]  # the version counters of both CSR tensors
    values: tuple[Tensor, ...]  # copies of both on a CPU, elsewhere none
    capturing: bool  # whether a CUDA graph captured the building
    block_size: int


def remember(row_ptr: Tensor, q_indices: Tensor, blocks: Tensor, block_size: int) -> None:
    """Leaves a selection with its CSR tensors: int32 ``[num_kv_heads, total_q, topk]``, ascending, NOTHING at the end."""
    versions, capturing = (row_ptr._version, q_indices._version), devices.capturing(row_ptr.device)
    values = (row_ptr.clone(), q_indices.clone()) if row_ptr.device.type == "cpu" else ()
    known = _Remembered(blocks.transpose(0, 1), weakref.ref(row_ptr), versions, values, capturing, block_size)
    setattr(q_indices, ATTRIBUTE, known)


def selection(row_ptr: Tensor, q_indices: Tensor, topk: int, total_q: int, rows: Callable[[], Rows], block_size: int) -> Tensor:
    """Returns int32 ``[total_q, num_kv_heads, topk]``, the blocks of each query, ascending and NOTHING behind the last. `rows`
    is called where the CSR tensors have to be read."""
    known = getattr(q_indices, ATTRIBUTE, None)
    if known is not None and known.row_ptr() is row_ptr and known.blocks.shape[::2] == (total_q, topk):
        if known.block_size != block_size:
            raise ValueError(
                f"blk_kv must be the block size that the CSR was built with ({known.block_size}), got {block_size}"
            )
        written = row_ptr.is_inference() or q_indices.is_inference() or known.versions != (row_ptr._version, q_indices._version)
        written = written or not all(map(torch.equal, known.values, (row_ptr, q_indices)))
        if not written and known.capturing == devices.capturing(row_ptr.device):
            return known.blocks
    with torch.no_grad():
        numbering = rows()
        if row_ptr.device.type == "cpu":
            _check_csr(row_ptr, q_indices, topk, total_q, numbering)
        return rebuilt(row_ptr, q_indices, topk, total_q, numbering)


def _check_csr(row_ptr: Tensor, q_indices: Tensor, topk: int, total_q: int, rows: Rows) -> None:
    """Reads CSR tensors and raises ValueError where they are none of this batch."""
    last, entries = int(rows.blocks.sum()), q_indices.shape[1]  # the number of rows that name blocks
    if row_ptr.shape[1] <= last:
        raise ValueError(f"k2q_row_ptr.shape[1] must be at least {last + 1}, the blocks and 1, got {row_ptr.shape[1]}")
    value_checks.none("k2q_row_ptr", row_ptr[:, :1] != 0, row_ptr, "0, as the first row starts there")
    value_checks.none("k2q_row_ptr", torch.nn.functional.pad(row_ptr.diff() < 0, (1, 0)), row_ptr, "at least that before it")
    value_checks.none("k2q_row_ptr", row_ptr > entries, row_ptr, f"at most the entries of k2q_q_indices ({entries})")
    behind = row_ptr > row_ptr[:, last : last + 1]
    value_checks.none("k2q_row_ptr", behind, row_ptr, f"that at {last}, as rows behind it name no block")
    if not last:
        return
    entry = torch.arange(entries, dtype=torch.int32, device="cpu").expand(q_indices.shape)
    row = torch.searchsorted(row_ptr[:, 1:].contiguous(), entry.contiguous(), right=True).clamp_(max=last - 1)
    sequence, used = rows.of_rows(last)[0][row], entry < row_ptr[:, -1:]
    outside = (q_indices < 0) | (q_indices >= rows.cu_seqlens_q.diff()[sequence])
    value_checks.none("k2q_q_indices", used & outside, q_indices, "a query of the sequence that its row belongs to")
    token = torch.where(used, rows.cu_seqlens_q[sequence] + q_indices, total_q).long()
    read = token.new_zeros(token.shape[0], total_q + 1).scatter_add_(1, token, torch.ones_like(token))
    if (most := int(read[:, :-1].amax()) if read[:, :-1].numel() else 0) > topk:
        raise ValueError(f"topK must be at least the blocks that one query reads ({most}), got {topk}")


def rebuilt(row_ptr: Tensor, q_indices: Tensor, topk: int, total_q: int, rows: Rows) -> Tensor:
    """Returns the `selection` that the CSR tensors hold. Entries that name no query of the row's sequence are skipped."""
    num_rows = row_ptr.shape[1] - 1
    if not num_rows or not q_indices.numel() or not rows.batch:
        shape = total_q, q_indices.shape[0], topk
        return torch.full(shape, NOTHING, dtype=torch.int32, device=q_indices.device)
    sequence, block = rows.of_rows(num_rows)
    start, length = rows.cu_seqlens_q[sequence], rows.cu_seqlens_q.diff()[sequence]  # the queries of each row's sequence

    def of_heads(row_ptr: Tensor, q_indices: Tensor) -> tuple[Tensor]:
        heads = q_indices.shape[0]
        entry = torch.arange(q_indices.shape[1], device=q_indices.device, dtype=torch.int32).expand(heads, -1).contiguous()
        row = torch.searchsorted(row_ptr[:, 1:].contiguous(), entry, right=True, out_int32=True)
        held = row < num_rows
        row = row.clamp_(max=num_rows - 1)
        held &= (q_indices >= 0) & (q_indices < length[row])
        token = torch.where(held, start[row] + q_indices, total_q)
        token, order = sort_heads(token, total_q)  # the blocks of a token ascend as the rows do
        slot = entry - torch.searchsorted(token, token, out_int32=True)
        place = torch.where((token < total_q) & (slot < topk), token.long() * topk + slot, total_q * topk)
        blocks = torch.full((heads, total_q * topk + 1), NOTHING, dtype=torch.int32, device=row.device)
        blocks.scatter_(1, place, block.int()[row].gather(1, order))  # the last entry takes what is skipped
        return (blocks[:, :-1].view(heads, total_q, topk),)

    return by_heads(of_heads, row_ptr, q_indices)[0].transpose(0, 1)


def token_major(q2k_indices: Tensor, total_q: int, num_kv_heads: int) -> Tensor:
    """Returns a selection, in either order of its first two dimensions, as a view ``[total_q, num_kv_heads, topk]``."""
    checks.tensor("q2k_indices", q2k_indices, "[num_kv_heads, total_q, topk]", (torch.int32,))
    checks.integer("q2k_indices.shape[2] (topk)", q2k_indices.shape[2], 1, 64)
    if tuple(q2k_indices.shape[:2]) == (num_kv_heads, total_q):
        return q2k_indices.transpose(0, 1)
    if tuple(q2k_indices.shape[:2]) != (total_q, num_kv_heads):
        raise ValueError(
            f"q2k_indices must have shape [num_kv_heads, total_q, topk] = [{num_kv_heads}, {total_q}, topk] or the first two "
            f"exchanged, got {tuple(q2k_indices.shape)}"
        )
    return q2k_indices
