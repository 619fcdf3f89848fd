# SPDX-License-Identifier: MIT
"""Block scores, of the index branch, say how much each key block matters to each query."""

from __future__ import annotations

from torch import Tensor

from openmsa.inputs import ScoringCall, check_scoring
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.runtime import dispatch, references
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.types import Sequences


@dispatch.operator("openmsa::block_scores")
def block_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Computes the maximum raw dot product of each index query with the visible keys of each block.

    index_q:  ``[total_q, index_heads, index_dim]``, index_dim a multiple of 16 up to 256, float32, float16, bfloat16 or
              float64, any strides; or `E4M3` with one scale for the tensor or one a head.
    index_k:  ``[total_k, index_key_heads, index_dim]``, where index_key_heads divides index_heads (1: all heads share the
              keys), or a `PagedIndexKeys` of them: a tensor of the same dtype, or, with queries of any dtype, `E4M3`, `Int8`,
              `NVFP4` or `MXFP4`, whose scores are those of the numbers they stand for, scales included. `CertifiedKeys` count
              as their exact keys.
    seqs:     packed lengths; None: one sequence, whose last total_q positions are the queries.
    block_size:  keys a block, 16 to 256.
    impl:     "auto", the first implementation of the stage's table that serves the call, or the name of one, such as
              "reference"; NotImplementedError lists why it cannot serve. `openmsa.explain` tells without a call.
    check:    also read the values (page ids, lengths, NaN) on any device and raise ValueError on a bad one.

    Returns float32 ``[index_heads, total_q, num_blocks]`` (float64 for float64 inputs), num_blocks = ceil(longest k_len /
    block_size): ``max over visible j in the block of index_q . index_k[j]``, accumulated in float32 and not scaled; -inf
    where the block holds no visible key. A NaN product counts as -inf. Blocks start at key 0 of each sequence.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, equations 5 to 7 (without the scale, which does not change the order).
    """
    return STAGE.run(impl, check_scoring(index_q, index_k, seqs, block_size, check))


TRITON_READS = {"index_q": ("plain", "e4m3"), "index_k": ("plain", "e4m3", "int8", "nvfp4", "mxfp4")}
"""The scoring kernel takes these formats: a new one is named here."""


def _refuse_triton(call: ScoringCall) -> str | None:
    reason = dispatch.unless_reads(TRITON_READS, index_q=call.index_q, index_k=call.index_k)
    return reason or dispatch.unless_cuda_inference(call.index_q, call.index_k)


STAGE = Stage(
    block_scores,
    check_scoring,
    (
        Implementation("triton", "openmsa.block_scores.triton_route:block_scores", _refuse_triton),
        Implementation(
            "cpu",
            "openmsa.block_scores.cpu:block_scores",
            lambda call: dispatch.unless_cpu_inference(call.index_q, call.index_k),
        ),
        Implementation(
            "reference",
            "openmsa.block_scores.reference:block_scores",
            lambda call: references.unless_values(call.index_q),
            lambda call: references.on_gpu_by_name_only(call.index_q),
        ),
    ),
)
