# SPDX-License-Identifier: MIT
"""Pages may be shared for reading; a token must be written where no other token is."""

from __future__ import annotations

import torch
from torch import Tensor


def check_private(page_table: Tensor, seq_lens: Tensor, sequence: Tensor, position: Tensor, page_size: int) -> None:
    """Raises ValueError when a new token (its `sequence` and `position`, int64 ``[total_new]``) would land on another new token
    or on one of the `seq_lens` keys that some sequence already has there. Reads the tensors."""
    page, row = page_table[sequence, position // page_size].long(), position % page_size  # [total_new]
    if (page * page_size + row).unique().numel() != page.numel():
        raise ValueError(
            "page_table must give appended tokens places of their own, got two sequences that would write the same place"
        )
    logical = torch.arange(page_table.shape[1], device=page_table.device)
    holds = torch.isin(page_table, page.int()) & (logical * page_size < seq_lens[:, None])  # [batch, max_pages]
    owner, at = holds.nonzero(as_tuple=True)
    kept = seq_lens[owner] - at * page_size  # keys from the start of the page
    clash = (page_table[owner, at][:, None] == page) & (row < kept[:, None])  # [pages that hold keys, total_new]
    if bool(clash.any()):
        first, token = clash.nonzero()[0].tolist()
        raise ValueError(
            f"page_table must not share a page that is written to: page {int(page[token])} of sequence {int(sequence[token])} "
            f"holds keys of sequence {int(owner[first])} at row {int(row[token])}"
        )
