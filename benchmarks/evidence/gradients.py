# SPDX-License-Identifier: MIT
"""Before anything is trained, the gradients of both attentions and of the index loss are held against float64 in the model's
sizes, with twice the error of PyTorch in bfloat16."""

from __future__ import annotations

import torch

from openmsa import dense_attention, index_loss, sparse_attention
from openmsa.testing.inputs import problem, random_blocks
from openmsa.tiny import ByteConfig
from tests import gradients, oracle
from tests.index_loss import truth


def wrong(config: ByteConfig, device: torch.device) -> list[str]:
    """Returns a sentence for each gradient that is wrong on ragged lengths, or that a second run gives other bits of."""
    found, msa = [], config.msa
    size, topk = msa.index_block_size, 3
    lens = ((300, 0, 3, 1), (2 * size + 305, 7, size, 9))
    p = problem(
        *lens,
        kv_heads=config.num_kv_heads,
        group=config.num_heads // config.num_kv_heads,
        index_heads=msa.index_n_heads,
        head_dim=config.head_dim,
        index_dim=msa.index_head_dim,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    selection = random_blocks(p, topk, size, msa.index_n_heads)
    here = p.to(device)
    grads = gradients.inputs_and_gradients(p)
    scale, own = config.head_dim**-0.5, msa.index_head_dim**-0.5
    for blocks, reads, name in (
        (selection, oracle.reads_of_blocks(selection, size), "selected blocks"),
        (None, oracle.reads_everything(p), "all keys"),
    ):
        chosen = None if blocks is None else blocks.to(device)

        def attention(chosen: torch.Tensor | None = chosen) -> tuple[torch.Tensor, ...]:
            q, k, v = (x.detach().requires_grad_() for x in (here.q, here.k, here.v))
            if chosen is None:
                out, lse = dense_attention(q, k, v, here.seqs, return_lse=True)
            else:
                out, lse = sparse_attention(q, k, v, chosen, here.seqs, block_size=size, return_lse=True)
            some = lse.isfinite()
            return torch.autograd.grad((out, lse[some]), (q, k, v), (grads[0].to(device), grads[1].to(device)[some]))

        def loss(chosen: torch.Tensor | None = chosen) -> tuple[torch.Tensor, ...]:
            index_q, index_k = (x.detach().requires_grad_() for x in (here.index_q, here.index_k))
            value = index_loss(here.q, here.k, index_q, index_k, chosen, here.seqs, block_size=size)
            return (value.detach(), *torch.autograd.grad(value, (index_q, index_k)))

        for what, call, check in (
            ("attention", attention, lambda result, reads=reads: gradients.check(result, p, reads, scale, *grads)),
            ("index loss", loss, lambda result, reads=reads: truth.check(result, p, reads, scale, own)),
        ):
            first, second = call(), call()
            try:
                check(first)
            except AssertionError as error:
                found.append(f"{what} over {name}: {error}")
            if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                found.append(f"{what} over {name}: a second run has other bits")
    return found
