# SPDX-License-Identifier: MIT
"""Before anything is trained, the index loss is compared with float64 on the device of the study."""

from __future__ import annotations

import sys

import torch

from openmsa import index_loss


def check_gradients(device: torch.device) -> None:
    """Ends the program where an index loss or a gradient of it is wrong: at most twice the error of PyTorch in bfloat16 against
    float64, over all keys and over selected blocks, and the same bits again."""
    from openmsa.testing.inputs import problem, random_blocks
    from tests import oracle
    from tests.index_loss import truth

    wrong = []
    for dim, group, heads in ((64, 3, 3), (128, 4, 2), (32, 3, 2), (16, 2, 1)):
        p = problem((300, 0, 3), (133, 7, 96), kv_heads=heads, group=group, head_dim=dim, dtype=torch.bfloat16)
        selection = random_blocks(p, 4, 64, heads)
        for blocks, reads in ((selection, oracle.reads_of_blocks(selection, 64)), (None, oracle.reads_everything(p))):
            results = []
            for _ in range(2):
                there = p.to(device)
                leaves = [x.detach().requires_grad_() for x in (there.index_q, there.index_k)]
                given = None if blocks is None else blocks.to(device)
                index_q, index_k = leaves
                loss = index_loss(there.q, there.k, index_q, index_k, given, there.seqs, block_size=64)
                results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
            what = f"dim {dim}, group {group}, {'all keys' if blocks is None else 'selected'}"
            try:
                truth.check(results[0], p, reads, dim**-0.5, dim**-0.5)
            except AssertionError as error:
                wrong.append(f"{what}: {error}")
            if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
                wrong.append(f"{what}: a second run has other bits")
    if wrong:
        sys.exit("the index loss is wrong on this device:\n" + "\n".join(wrong))
