# SPDX-License-Identifier: MIT
"""The selection of each query, read back from its CSR form.

Attention wants the blocks of a query, callers hand over the queries of a block. `build_k2q_csr` therefore leaves the selection
with the ``k2q_q_indices`` that it returns, an attribute of that tensor which lives and dies with it, and no sort is needed.
The attribute counts only while neither CSR tensor was written to (their version counters say so) and building and attending
are both or neither captured in a CUDA graph. Everything else - copies, views, CSR tensors from elsewhere, overwritten buffers -
takes the general way, one more stable sort on the device. Both give the same ids in the same order: ascending.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fmha_sm100.k2q_rows import NOTHING, Rows
from fmha_sm100.k2q_sort import by_heads, sort_heads
from openmsa.runtime import devices

ATTRIBUTE = "_openmsa_selection"


@dataclass(frozen=True)
class _Remembered:
    blocks: Tensor  # int32 [total_q, num_kv_heads, topk]
    row_ptr: weakref.ref[Tensor]
    versions: tuple[int, int]
    capturing: bool
    block_size: int


def remember(row_ptr: Tensor, q_indices: Tensor, blocks: Tensor, block_size: int) -> None:
    """Leaves the selection, int32 ``[num_kv_heads, total_q, topk]``, ascending, NOTHING at the end, with the CSR tensors."""
    versions, capturing = (row_ptr._version, q_indices._version), devices.capturing(row_ptr.device)
    known = _Remembered(blocks.transpose(0, 1), weakref.ref(row_ptr), versions, capturing, block_size)
    setattr(q_indices, ATTRIBUTE, known)


def selection(row_ptr: Tensor, q_indices: Tensor, topk: int, total_q: int, rows: Callable[[], Rows], block_size: int) -> Tensor:
    """int32 ``[total_q, num_kv_heads, topk]``: the blocks of each query, ascending, NOTHING behind the last. rows: called when
    the CSR tensors have to be read."""
    known = getattr(q_indices, ATTRIBUTE, None)
    if known is not None and known.row_ptr() is row_ptr and known.blocks.shape[::2] == (total_q, topk):
        if known.block_size != block_size:
            raise ValueError(
                f"blk_kv must be the block size that the CSR was built with ({known.block_size}), got {block_size}"
            )
        written = row_ptr.is_inference() or q_indices.is_inference() or known.versions != (row_ptr._version, q_indices._version)
        if not written and known.capturing == devices.capturing(row_ptr.device):
            return known.blocks
    with torch.no_grad():
        return rebuilt(row_ptr, q_indices, topk, total_q, rows())


def rebuilt(row_ptr: Tensor, q_indices: Tensor, topk: int, total_q: int, rows: Rows) -> Tensor:
    """`selection` from the CSR tensors alone. Entries that name no query of the row's sequence are skipped."""
    num_rows = row_ptr.shape[1] - 1
    if not num_rows or not q_indices.numel() or not rows.batch:
        shape = total_q, q_indices.shape[0], topk
        return torch.full(shape, NOTHING, dtype=torch.int32, device=q_indices.device)
    sequence, block = rows.of_rows(num_rows)
    start, length = rows.cu_seqlens_q[sequence], rows.cu_seqlens_q.diff()[sequence]  # of each row's queries

    def of_heads(row_ptr: Tensor, q_indices: Tensor) -> tuple[Tensor]:
        heads = q_indices.shape[0]
        entry = torch.arange(q_indices.shape[1], device=q_indices.device, dtype=torch.int32).expand(heads, -1).contiguous()
        row = torch.searchsorted(row_ptr[:, 1:].contiguous(), entry, right=True, out_int32=True)
        held = row < num_rows
        row = row.clamp_(max=num_rows - 1)
        held &= (q_indices >= 0) & (q_indices < length[row])
        token = torch.where(held, start[row] + q_indices, total_q)
        token, order = sort_heads(token, total_q)  # rows ascend, so the blocks of a token do
        slot = entry - torch.searchsorted(token, token, out_int32=True)
        place = torch.where((token < total_q) & (slot < topk), token.long() * topk + slot, total_q * topk)
        blocks = torch.full((heads, total_q * topk + 1), NOTHING, dtype=torch.int32, device=row.device)
        blocks.scatter_(1, place, block.int()[row].gather(1, order))  # the last one takes the rest
        return (blocks[:, :-1].view(heads, total_q, topk),)

    return by_heads(of_heads, row_ptr, q_indices)[0].transpose(0, 1)
