# SPDX-License-Identifier: MIT
"""The index loss trains the index branch to attend as the main branch does."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.inputs import check_qkv
from openmsa.runtime import checks, dispatch, references, value_checks
from openmsa.runtime.dispatch import Implementation, Stage, never
from openmsa.sparse_attention.call import check_sparse
from openmsa.types import Layout, Sequences


@dispatch.operator("openmsa::index_loss")
def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None = None,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    index_scale: float | None = None,
    coefficient: float = 1.0,
    lse: Tensor | None = None,
    return_loss: bool = True,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Computes the KL divergence of the index branch's attention from the main branch's, token by token, with its gradients.

    For query i and index head r, both are distributions over the keys that i sees in the blocks that it selected (the sparse
    stage of training) or over all keys that it sees (``blocks=None``, the warm-up stage). The teacher is the mean of the
    softmax weights of the query heads of r, the student the softmax of ``index_scale * index_q[i, r] . index_k``. The loss is

        coefficient / (total_q * index_heads) * sum over i and r of  KL(teacher || student)

    q, k:           ``[total_q, num_q_heads, head_dim]`` and ``[total_k, num_kv_heads, head_dim]``, tensors as in
                    `openmsa.sparse_attention`, of one dtype. They are constants: no gradient flows to them, nor to `lse`.
    index_q, index_k:  ``[total_q, index_heads, index_dim]`` and ``[total_k, index_key_heads, index_dim]``, tensors as in
                    `openmsa.block_scores`, of one dtype. index_heads is num_kv_heads, or 1: that head learns the mean of all
                    query heads. index_key_heads divides index_heads.
    blocks:         int32 ``[total_q, index_heads or 1, topk]``, the selection, as in `openmsa.sparse_attention`; None: all
                    visible keys.
    seqs, block_size, impl, check:  as in `openmsa.sparse_attention`; block_size says nothing where blocks is None.
    softmax_scale:  factor on the main branch's logits; None: ``head_dim ** -0.5``.
    index_scale:    factor on the index branch's; None: ``index_dim ** -0.5``.
    lse:            float32 ``[total_q, num_q_heads]`` (float64 for float64 queries), what the main attention over the same keys
                    with the same scale returned; None: it is computed again, which costs as much as the teacher does.
    return_loss:    False: the value that is returned is 0, and only its gradients are true. This saves one logarithm in
                    num_q_heads / index_heads exponentials, and no memory; without gradients it saves everything.

    Returns a float32 scalar (float64 where an input is). Gradients flow to index_q and index_k; select the blocks of detached
    ones. Gradients are computed together with the loss and kept until the backward in float32, as many elements as index_q and
    index_k have; nothing of [tokens, keys] is ever held. In graphs of `torch.compile` the value and the gradients are computed
    apart, so that the value costs as much again. A query that sees nothing adds 0, and counts in total_q.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, equations 9 and 10.
    """
    call = check_loss(
        q, k, index_q, index_k, blocks, seqs, block_size, softmax_scale, index_scale, coefficient, lse,
        return_loss=return_loss, check=check,
    )  # fmt: skip
    return STAGE.run(impl, call)


class LossCall(NamedTuple):
    """Holds the checked arguments of `index_loss`."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor
    blocks: Tensor | None
    seqs: Layout
    block_size: int
    softmax_scale: float
    index_scale: float
    coefficient: float
    lse: Tensor | None
    return_loss: bool


def share(index_q: Tensor, coefficient: float) -> float:
    """Returns what multiplies the sum of all divergences: the coefficient over the number of (query, index head) pairs."""
    return coefficient / max(index_q.shape[0] * index_q.shape[1], 1)


def check_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Sequences | Layout | None,
    block_size: int,
    softmax_scale: float | None,
    index_scale: float | None,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
    check: bool,
) -> LossCall:
    """Checks the arguments of `index_loss`."""
    checks.integer("block_size", block_size, 16, 256)
    checks.flag("return_loss", return_loss)
    checks.tensor("q", q, "[total_q, num_q_heads, head_dim]")
    checks.tensor("k", k, "[total_k, num_kv_heads, head_dim]")
    packed: Layout
    if blocks is None:
        packed, scale = check_qkv(q, k, k, seqs, softmax_scale, check)[3:]
    else:
        sparse = check_sparse(q, k, k, blocks, seqs, block_size, softmax_scale, True, check)
        packed, scale = sparse.seqs, sparse.softmax_scale
    _check_index(q, k, index_q, index_k, blocks, check)
    if lse is not None:
        checks.tensor("lse", lse, "[total_q, num_q_heads]", (torch.promote_types(q.dtype, torch.float32),))
        checks.alike("lse", lse, "q", q, dtype=False)
        for dimension, what in enumerate(("total_q", "num_q_heads")):
            checks.size("lse", lse, dimension, q.shape[dimension], f"{what} of q")
        if check:
            value_checks.finite("lse", lse)
    own = index_q.shape[2] ** -0.5 if index_scale is None else checks.scale("index_scale", index_scale)
    coefficient = checks.scale("coefficient", coefficient)
    return LossCall(q, k, index_q, index_k, blocks, packed, block_size, scale, own, coefficient, lse, return_loss)


def _check_index(q: Tensor, k: Tensor, index_q: Tensor, index_k: Tensor, blocks: Tensor | None, check: bool) -> None:
    checks.tensor("index_q", index_q, "[total_q, index_heads, index_dim]")
    checks.tensor("index_k", index_k, "[total_k, index_key_heads, index_dim]")
    checks.head_dim("index_dim", index_q.shape[2])
    checks.alike("index_q", index_q, "q", q, dtype=False)
    checks.alike("index_k", index_k, "index_q", index_q)
    checks.size("index_q", index_q, 0, q.shape[0], "total_q of q")
    checks.size("index_k", index_k, 0, k.shape[0], "total_k of k")
    checks.size("index_k", index_k, 2, index_q.shape[2], "index_dim of index_q")
    heads, kv_heads = index_q.shape[1], k.shape[1]
    if heads not in (1, kv_heads):
        raise ValueError(f"index_q.shape[1] (index_heads) must be num_kv_heads ({kv_heads}) or 1, got {heads}")
    checks.divides("index_key_heads", index_k.shape[1], "index_heads", heads)
    if blocks is not None and blocks.shape[1] not in (1, heads):
        raise ValueError(f"blocks.shape[1] must be index_heads ({heads}) or 1, got {blocks.shape[1]}")
    if check:
        value_checks.finite("index_q", index_q)
        value_checks.finite("index_k", index_k)


TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _refuse_triton(call: LossCall) -> str | None:
    return dispatch.unless_cuda(*call[:4], dtypes=TRITON_DTYPES)


STAGE = Stage(
    index_loss,
    check_loss,
    (
        Implementation(
            "triton",
            "openmsa.index_loss.triton_loss:index_loss",
            _refuse_triton,
            backward="openmsa.index_loss.triton_loss:loss_and_gradients",
        ),
        Implementation(
            "cpu",
            "openmsa.index_loss.cpu:index_loss",
            lambda call: dispatch.unless_cpu(*call[:4]),
            backward="openmsa.index_loss.cpu:loss_and_gradients",
        ),
        Implementation(
            "reference",
            "openmsa.index_loss.reference:index_loss",
            never,
            lambda call: references.on_gpu_by_name_only(call.q),
        ),
    ),
    recorder="openmsa.index_loss.recording:recorded",
)
