# SPDX-License-Identifier: MIT
"""This stage attends to every visible key: as the baseline, in dense layers, on short contexts, and for blocks' max scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from openmsa.inputs import check_qkv
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import check_places, check_scores_place, tensors_of
from openmsa.runtime import checks, dispatch
from openmsa.runtime.dispatch import Implementation, Stage, never
from openmsa.types import Layout, Sequences


def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    block_size: int = 128,
    return_out: bool = True,
    return_lse: bool = False,
    return_max_score: bool = False,
    impl: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Computes softmax attention of every query over all keys that it sees.

    q, k, v, seqs, softmax_scale, block_size, impl, check: as in `openmsa.sparse_attention`.
    causal:            True: a query sees the keys at or before its position (`Sequences.q_offset` moves it); False: all keys
                       of its sequence.
    return_out, return_lse, return_max_score: which results to return, in this order; one alone comes as a tensor, several as a
                       tuple. At least one must be True.

    out is ``[total_q, num_q_heads, head_dim]`` in q's dtype (bfloat16 for `E4M3`); lse float32 ``[total_q, num_q_heads]``,
    natural logarithm; max_score float32 ``[num_q_heads, total_q, num_blocks]``, the maximum raw (unscaled) dot product over
    the visible keys of each block of `block_size` keys, -inf where there is none, NaN counting as -inf (float64 each for
    float64 inputs).
    A query that sees nothing gives 0 and lse -inf.

    Gradients flow to packed tensors q, k and v of one dtype, from out and from lse; only the reference has those of max_score.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    """
    wanted = (return_out, return_lse, return_max_score)
    return STAGE.run(impl, check_dense(q, k, v, seqs, causal, softmax_scale, block_size, *wanted, check))


class DenseCall(NamedTuple):
    """Holds the checked arguments of `dense_attention`. out, lse: contiguous tensors that the results are written to, and that
    the implementation returns; max_score: such a tensor too, but as `check_scores_place` says; None: new ones."""

    q: Tensor | Stored
    k: Tensor | Stored | PagedKV
    v: Tensor | Stored | None
    seqs: Layout
    causal: bool
    softmax_scale: float
    block_size: int
    return_out: bool
    return_lse: bool
    return_max_score: bool
    out: Tensor | None = None
    lse: Tensor | None = None
    max_score: Tensor | None = None

    def writing(self, out: Tensor | None, lse: Tensor | None, max_score: Tensor | None = None) -> DenseCall:
        """Returns the call with the places of its results, which are checked."""
        wanted = {"out": self.return_out, "lse": self.return_lse, "max_score": self.return_max_score}
        for (name, asked), place in zip(wanted.items(), (out, lse, max_score), strict=True):
            if place is not None and not asked:
                raise ValueError(f"{name} must be None with return_{name}=False, got {type(place).__name__}")
        read = tensors_of(self.q, self.k, self.v)
        check_places(self.q, read, out, lse)
        if max_score is not None:
            num_blocks = self.seqs.num_blocks(self.block_size)
            check_scores_place("max_score", max_score, self.q, num_blocks, [*read, *tensors_of(out, lse)])
        return self._replace(out=out, lse=lse, max_score=max_score)


def check_dense(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Sequences | None,
    causal: bool,
    softmax_scale: float | None,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    check: bool,
) -> DenseCall:
    """Checks the arguments of `dense_attention`."""
    checks.integer("block_size", block_size, 16, 256)
    checks.flag("causal", causal)
    wanted = {"return_out": return_out, "return_lse": return_lse, "return_max_score": return_max_score}
    if not any([checks.flag(name, value) for name, value in wanted.items()]):
        raise ValueError("return_out, return_lse or return_max_score must be True, got False for all three")
    inputs = check_qkv(q, k, v, seqs, softmax_scale, check)
    return DenseCall(*inputs[:4], causal, inputs.softmax_scale, block_size, return_out, return_lse, return_max_score)


def chosen_results(out: Tensor | None, lse: Tensor | None, max_score: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Returns the results that are not None, in order: several as a tuple, one alone as it is."""
    results = tuple(result for result in (out, lse, max_score) if result is not None)
    return results[0] if len(results) == 1 else results


TRITON_READS = {"q": ("plain", "e4m3"), "k": ("plain", "e4m3", "nvfp4")}
"""The kernel takes these formats of q and of k; v has the format of k."""


def _refuse_triton(call: DenseCall) -> str | None:
    return (
        dispatch.unless_reads(TRITON_READS, q=call.q, k=call.k) or dispatch.unless_cuda(*call[:3]) or _unless_recordable(call)
    )


def _refuse_cpu(call: DenseCall) -> str | None:
    return dispatch.unless_cpu(*call[:3]) or _unless_recordable(call)


def _unless_recordable(call: DenseCall) -> str | None:
    if call.return_max_score and checks.needs_grad(*call[:3]):
        return "it computes no gradients of max_score; ask for it under torch.no_grad()"
    return dispatch.unless_recordable(call)


STAGE = Stage(
    dense_attention,
    check_dense,
    (
        Implementation(
            "triton",
            "openmsa.dense_attention.triton_forward:dense_attention",
            _refuse_triton,
            backward="openmsa.dense_attention.triton_backward:dense_attention_backward",
        ),
        Implementation(
            "cpu",
            "openmsa.dense_attention.cpu:dense_attention",
            _refuse_cpu,
            backward="openmsa.dense_attention.cpu_backward:dense_attention_backward",
        ),
        Implementation(
            "reference",
            "openmsa.dense_attention.reference:dense_attention",
            never,
            lambda call: dispatch.on_gpu_by_name_only(call.q),
        ),
    ),
    recorder="openmsa.gradients:recorded",
)
