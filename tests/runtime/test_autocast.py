# SPDX-License-Identifier: MIT
"""Inside autocast a call gives, bit for bit, what it gives outside, as implementations compute in the precision of inputs."""

import pytest
import torch

from openmsa import block_scores, dense_attention, index_loss, msa_attention, select_blocks, sparse_attention
from openmsa.testing.inputs import problem, random_blocks
from tests.exact import DEVICES

SIZE = {"block_size": 16}
CALLS = {
    "block_scores": lambda p, blocks: block_scores(p.index_q.detach(), p.index_k.detach(), p.seqs, **SIZE),
    "select_blocks": lambda p, blocks: select_blocks(p.index_q.detach(), p.index_k.detach(), 2, p.seqs, **SIZE),
    "sparse_attention": lambda p, blocks: sparse_attention(p.q, p.k, p.v, blocks, p.seqs, **SIZE),
    "dense_attention": lambda p, blocks: dense_attention(p.q, p.k, p.v, p.seqs),
    "msa_attention": lambda p, blocks: msa_attention(p.q, p.k, p.v, p.index_q.detach(), p.index_k.detach(), 2, p.seqs, **SIZE),
    "index_loss": lambda p, blocks: index_loss(p.q, p.k, p.index_q, p.index_k, blocks, p.seqs, **SIZE),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_autocast_changes_nothing(name, gradients, device):
    inputs, inside = (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16, torch.float16)
    p = problem((40, 3), (60, 50), dtype=inputs)
    blocks = random_blocks(p, 2, 16, p.k.shape[1]).to(device)
    p = p.to(device)
    leaves = [p.q, p.k, p.v, p.index_q, p.index_k]

    def run(enabled):
        for leaf in leaves:
            leaf.requires_grad_(gradients)
        with torch.autocast(device, inside, enabled=enabled):
            out = CALLS[name](p, blocks)
        if not out.requires_grad:
            return [out]
        with torch.autocast(device, inside, enabled=enabled):
            found = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)
        return [out.detach(), *(x for x in found if x is not None)]

    for cast, plain in zip(run(True), run(False), strict=True):
        assert cast.dtype == plain.dtype
        torch.testing.assert_close(cast, plain, rtol=0, atol=0, equal_nan=True)
