# SPDX-License-Identifier: MIT
"""This stage, the main branch, computes exact attention over the selected blocks."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from openmsa import known_calls
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import made_results
from openmsa.runtime import dispatch, references
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.sparse_attention import refusals
from openmsa.sparse_attention.call import check_sparse
from openmsa.types import Sequences


@overload
def sparse_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, blocks: Tensor, seqs: Sequences | None = None,
    *, block_size: int = 128, softmax_scale: float | None = None, return_lse: Literal[False] = False, impl: str = "auto",
    check: bool = False,
) -> Tensor: ...  # fmt: skip


@overload
def sparse_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, blocks: Tensor, seqs: Sequences | None = None,
    *, block_size: int = 128, softmax_scale: float | None = None, return_lse: Literal[True], impl: str = "auto",
    check: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def sparse_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, blocks: Tensor, seqs: Sequences | None = None,
    *, block_size: int = 128, softmax_scale: float | None = None, return_lse: bool, impl: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@dispatch.operator("openmsa::sparse_attention")
def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    impl: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax attention of every query over the visible keys of its selected blocks.

    q:              ``[total_q, num_q_heads, head_dim]``, head_dim a multiple of 16 up to 256, float32, float16, bfloat16 or
                    float64, any strides; or `E4M3` with one scale for the tensor or one a head.
    k, v:           ``[total_k, num_kv_heads, head_dim]``, num_kv_heads dividing num_q_heads: tensors of q's dtype, or, with
                    queries of any dtype, both `E4M3` or both `NVFP4`; or a `PagedKV` of such as `k` with `v` None. Formats
                    count as the numbers that they stand for: every scale is in the logits, in lse and in the result.
    blocks:         int32 ``[total_q, num_kv_heads or 1, topk]``, block ids counted from the start of the query's sequence, in
                    any order, distinct; topk 1 to 64; 1 head: one selection shared by all KV heads. -1, and every id past
                    the visible blocks, is skipped.
    seqs, block_size, impl:  as in `openmsa.block_scores`.
    softmax_scale:  factor on the logits; None: ``head_dim ** -0.5``.
    check:          also read the values (block ids from -1 to num_blocks - 1 and distinct, page ids, lengths, NaN) on any
                    device and raise ValueError on a bad one. On a CPU a block that is named twice always raises.

    Returns ``[total_q, num_q_heads, head_dim]`` in q's dtype (bfloat16 for `E4M3`), and with `return_lse` float32
    ``[total_q, num_q_heads]`` (float64 for float64 queries), the natural logarithm of the softmax denominator. A query with
    nothing to read gives 0 and lse -inf.

    Gradients flow to packed tensors q, k and v of one dtype, from both results; none flow through the selection.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, equation 8.
    """
    numbers = (block_size, softmax_scale, return_lse)
    return known_calls.run(STAGE, impl, (q, k, v, blocks), seqs, numbers, check, lambda: made_results(q, return_lse))


TRITON_BACKWARD = "openmsa.sparse_attention.triton_backward:sparse_attention_backward"

STAGE = Stage(
    sparse_attention,
    check_sparse,
    (
        Implementation(
            "triton_decode",
            "openmsa.sparse_attention.triton_decode_call:sparse_attention",
            refusals.cannot_decode,
            refusals.many_queries,
            TRITON_BACKWARD,
        ),
        Implementation(
            "triton_prefill",
            "openmsa.sparse_attention.triton_prefill:sparse_attention",
            refusals.cannot_prefill,
            backward=TRITON_BACKWARD,
        ),
        Implementation(
            "cpu",
            "openmsa.sparse_attention.cpu:sparse_attention",
            lambda call: dispatch.unless_cpu(*call[:3]) or dispatch.unless_recordable(call),
            backward="openmsa.sparse_attention.cpu_backward:sparse_attention_backward",
        ),
        Implementation(
            "reference",
            "openmsa.sparse_attention.reference:sparse_attention",
            lambda call: references.unless_values(call.q),
            lambda call: references.on_gpu_by_name_only(call.q),
        ),
    ),
    recorder="openmsa.gradients:recorded",
)
