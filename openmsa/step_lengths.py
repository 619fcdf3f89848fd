# SPDX-License-Identifier: MIT
"""The lengths of a step, as a plan takes them. Bounds are rounded up on a GPU, so that steps and calls of like lengths make the
same launches: kernels read the lengths themselves from tensors, and leave alone what lies behind the last start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks
from openmsa.runtime.kinds import rounded
from openmsa.types import INT32_MAX, Layout, Sequences, layout


def of_step(seqs: Sequences, page_table: Tensor | None, seq_lens: Tensor | None, page_size: Any, most_q: int) -> Layout:
    """Checks what a plan is given, and returns the lengths of its step. page_table, seq_lens, page_size: as in
    `openmsa.AttentionPlan`. most_q: for how many packed queries launches are made."""
    cu_q = seqs.cu_seqlens_q
    assert cu_q is not None
    if page_table is None:
        if seqs.cu_seqlens_k is None or seq_lens is not None:
            raise ValueError("cu_seqlens_k alone must be given where page_table is None, or page_table with seq_lens")
        made = layout(seqs, None, None, cu_q.device, of="")
    else:
        if seq_lens is None or seqs.cu_seqlens_k is not None:
            raise ValueError("seq_lens must be given beside page_table, and cu_seqlens_k must be None")
        for name, value in (("page_table", page_table), ("seq_lens", seq_lens)):
            checks.tensor(name, value, "[batch, max_pages]" if name == "page_table" else "[batch]", (torch.int32,))
            checks.alike(name, value, "cu_seqlens_q", cu_q, dtype=False)
            checks.size(name, value, 0, cu_q.numel() - 1, "the sequences of cu_seqlens_q")
        capacity = page_table.shape[1] * checks.integer("page_size", page_size, 1, INT32_MAX)
        made = layout(seqs, None, None, cu_q.device, seq_lens, capacity, of="")
        made = replace(made, max_seqlen_k=max(made.max_seqlen_k, min(rounded(made.max_seqlen_k), capacity)))
    return made if cu_q.device.type != "cuda" else made.like(most_q)
