# SPDX-License-Identifier: MIT
"""This stage attends to every visible key: as the baseline, in dense layers, on short contexts, and for blocks' max scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from openmsa import known_calls
from openmsa.dense_attention.call import DenseCall, check_dense
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import made_results
from openmsa.runtime import checks, dispatch, references
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.types import Sequences

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DenseOptions(TypedDict, total=False):
    """These options of `dense_attention` change no type of its result."""

    causal: bool
    softmax_scale: float | None
    block_size: int
    impl: str
    check: bool


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[True] = True,
    return_lse: Literal[False] = False,
    return_max_score: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Tensor: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[True] = True,
    return_lse: Literal[True],
    return_max_score: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[True] = True,
    return_lse: Literal[False] = False,
    return_max_score: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[True] = True,
    return_lse: Literal[True],
    return_max_score: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[False],
    return_lse: Literal[True],
    return_max_score: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Tensor: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[False],
    return_lse: Literal[False] = False,
    return_max_score: Literal[True],
    **options: Unpack[DenseOptions],
) -> Tensor: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: Literal[False],
    return_lse: Literal[True],
    return_max_score: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...


@overload
def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None = None,
    seqs: Sequences | None = None,
    *,
    return_out: bool = True,
    return_lse: bool = False,
    return_max_score: bool = False,
    **options: Unpack[DenseOptions],
) -> Tensor | tuple[Tensor, ...]: ...


@dispatch.operator("openmsa::dense_attention")
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
    if return_out is False or return_max_score is not False:
        return STAGE.run(impl, check_dense(q, k, v, seqs, causal, softmax_scale, block_size, *wanted, check))
    numbers = (causal, softmax_scale, block_size, *wanted)
    return known_calls.run(STAGE, impl, (q, k, v), seqs, numbers, check, lambda: made_results(q, return_lse))


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
            lambda call: references.unless_values(call.q),
            lambda call: references.on_gpu_by_name_only(call.q),
        ),
    ),
    recorder="openmsa.gradients:recorded",
)
