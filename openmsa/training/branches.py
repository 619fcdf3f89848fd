# SPDX-License-Identifier: MIT
"""This module says what a layer computes with its index branch, and the branch's loss, which is differentiated layer by
layer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from openmsa.block_topk import select_blocks
from openmsa.dense_attention import dense_attention
from openmsa.index_loss import index_loss
from openmsa.modules import IndexBranch, MSAConfig
from openmsa.sparse_attention import sparse_attention
from openmsa.training.layers import LayerInputs


def index_vectors(branch: IndexBranch, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Returns the index queries and keys of a layer, in the dtype of its queries."""
    index_q, index_k = branch(inputs.hidden.to(branch.q_proj.weight.dtype), inputs.cos, inputs.sin)
    return index_q.to(inputs.q.dtype), index_k.to(inputs.q.dtype)


def selected(inputs: LayerInputs, index_q: Tensor, index_k: Tensor, config: MSAConfig) -> Tensor:
    """Returns the blocks that each query reads, int32 ``[total_q, index_heads, topk]``."""
    return select_blocks(
        index_q.detach(),
        index_k.detach(),
        config.index_topk_blocks,
        inputs.seqs,
        block_size=config.index_block_size,
        init_blocks=config.index_init_blocks,
        local_blocks=config.index_local_blocks,
    )


def dense(inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Returns attention to all visible keys, and its lse."""
    return dense_attention(inputs.q, inputs.k, inputs.v, inputs.seqs, softmax_scale=inputs.softmax_scale, return_lse=True)


def sparse(inputs: LayerInputs, blocks: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns attention to the selected blocks, and its lse."""
    return sparse_attention(
        inputs.q,
        inputs.k,
        inputs.v,
        blocks,
        inputs.seqs,
        block_size=block_size,
        softmax_scale=inputs.softmax_scale,
        return_lse=True,
    )


class LayerLosses:
    """Computes the attention of a model's layers in training, and differentiates each layer's index loss as soon as the layer
    runs, so that one layer's graph exists at a time.

    branches: index branch by layer; a layer without one is dense. warmup: whether attention is dense and the loss is over all
    visible keys; otherwise both are over the selected blocks. share: multiplies the losses. losses: those of the layers so
    far, times share, added up over forwards.
    """

    def __init__(self, branches: Mapping[int, IndexBranch], config: MSAConfig, *, warmup: bool, share: float = 1.0) -> None:
        self.branches, self.config, self.warmup, self.share = branches, config, warmup, share
        self.losses: dict[int, Tensor] = {}

    def __call__(self, inputs: LayerInputs) -> Tensor:
        if inputs.number not in self.branches:
            return dense(inputs)[0]
        with torch.enable_grad():
            index_q, index_k = index_vectors(self.branches[inputs.number], inputs)
        if self.warmup:
            blocks = None
            out, lse = dense(inputs)
        else:
            blocks = selected(inputs, index_q, index_k, self.config)
            out, lse = sparse(inputs, blocks, self.config.index_block_size)
        with torch.enable_grad():
            loss = index_loss(
                inputs.q,
                inputs.k,
                index_q,
                index_k,
                blocks,
                inputs.seqs,
                block_size=self.config.index_block_size,
                softmax_scale=inputs.softmax_scale,
                coefficient=self.share,
                lse=lse,
            )
            loss.backward()
        value = loss.detach()
        self.losses[inputs.number] = self.losses[inputs.number] + value if inputs.number in self.losses else value
        return out
