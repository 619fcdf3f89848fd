# SPDX-License-Identifier: MIT
"""These helpers return scores as the scoring kernels leave them in poisoned memory."""

import torch

from openmsa.block_scores.triton_route import launch_scores, score_rows
from openmsa.testing.compare import assert_equal

BLOCK = 128


def launched_scores(index_q, index_k, lengths, visible):
    """Returns ``[heads, total_q, num_blocks]``. visible: the kernels count the blocks that each query sees, and leave those
    behind them as they are: here -inf; False: the kernels fill them."""
    total_q, heads = index_q.shape[:2]
    num_blocks, device = lengths.num_blocks(BLOCK), index_q.device
    scores = torch.full((heads, total_q, score_rows(num_blocks)), torch.nan, device=device)[..., :num_blocks]
    seen = torch.full((total_q,), -7, dtype=torch.int32, device=device) if visible else None
    launch_scores(index_q, index_k, lengths, BLOCK, scores, seen)
    if seen is not None:
        assert_equal("visible", seen, lengths.visible_blocks(total_q, BLOCK).int().cpu())
        scores = scores.masked_fill(torch.arange(num_blocks, device=device) >= seen[:, None], -torch.inf)
    return scores


def assert_triton_agrees(run, tuned, index_k, monkeypatch):
    """Checks that a kernel's scores are those of the Triton kernel bit for bit, also where pages are absent. run: gives
    `launched_scores` of these keys; tuned: the module of the kernel, whose `serves` decides."""
    table = index_k.page_table.clone()
    for entries in (table, table.index_fill(1, torch.zeros(1, dtype=torch.long, device=table.device), -1)):
        index_k.page_table.copy_(entries)
        with monkeypatch.context() as other:
            got = run()
            other.setattr(tuned, "serves", lambda *args: False)
            assert_equal("Triton's", run(), got.cpu())
    index_k.page_table.copy_(table)
