# SPDX-License-Identifier: MIT
"""`msa_attention` runs the whole path, scoring, selection and attention, over chunks of queries."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor

from openmsa import known_calls
from openmsa.block_topk import CERTIFIED_STAGE as CERTIFIED
from openmsa.block_topk import STAGE as SELECTION
from openmsa.decode import cpu_step, cpu_token
from openmsa.inputs import AttentionInputs, SelectionCall, check_agreement, check_qkv, check_same_keys, check_selection
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.runtime import checks, dispatch
from openmsa.runtime.dispatch import Stage, check_name, has_triton
from openmsa.runtime.kinds import Call, Kinds, Steps, rounded, tensors_in
from openmsa.runtime.lengths import starts_of
from openmsa.runtime.memory import Memory
from openmsa.sparse_attention import STAGE as ATTENTION
from openmsa.sparse_attention.call import SparseCall
from openmsa.types import Sequences, out_dtype, wide_dtype

QUERY_CHUNK = 16384  # queries whose selection (and, on a GPU, partial results) are held at a time
CALLS = Kinds()  # launches of earlier calls on a GPU


@overload
def msa_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys, topk: int = 16, seqs: Sequences | None = None, *, block_size: int = 128,
    init_blocks: int = 0, local_blocks: int = 1, softmax_scale: float | None = None, query_chunk: int | None = None,
    certified: bool = False, return_lse: Literal[False] = False, impl: str = "auto", check: bool = False,
) -> Tensor: ...  # fmt: skip


@overload
def msa_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys, topk: int = 16, seqs: Sequences | None = None, *, block_size: int = 128,
    init_blocks: int = 0, local_blocks: int = 1, softmax_scale: float | None = None, query_chunk: int | None = None,
    certified: bool = False, return_lse: Literal[True], impl: str = "auto", check: bool = False,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def msa_attention(
    q: Tensor | Stored, k: Tensor | Stored | PagedKV, v: Tensor | Stored | None, index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys, topk: int = 16, seqs: Sequences | None = None, *, block_size: int = 128,
    init_blocks: int = 0, local_blocks: int = 1, softmax_scale: float | None = None, query_chunk: int | None = None,
    certified: bool = False, return_lse: bool, impl: str = "auto", check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@dispatch.operator("openmsa::msa_attention")
def msa_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    query_chunk: int | None = None,
    certified: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
    check: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes MiniMax Sparse Attention: every query attends to the `topk` key blocks that its index branch selects.

    q, k, v, seqs, softmax_scale, return_lse: as in `sparse_attention`.
    index_q, index_k, topk, block_size, init_blocks, local_blocks, certified: as in `select_blocks`; index_q has as many heads
    as k, or 1 (one selection shared by all KV heads).
    query_chunk:  queries handled at a time, which bounds memory; None: 16384. It changes no selection.
    impl, check:  passed to each stage.

    Returns out ``[total_q, num_q_heads, head_dim]``, and with `return_lse` the natural-log lse ``[total_q, num_q_heads]``.
    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, algorithm 1 without the loss.
    """
    usual = check is certified is False and query_chunk is None and type(return_lse) is bool and isinstance(impl, str)
    if usual and impl in ("auto", "cpu") and not getattr(q, "is_nested", False) and getattr(q, "shape", ())[:1] == (1,):
        counts = cpu_step.Counts(topk, block_size, init_blocks, local_blocks)
        if (found := cpu_token.attend_packed(q, k, v, index_q, index_k, seqs, counts, softmax_scale, return_lse)) is not None:
            return found
    launches = None
    recorded = checks.needs_grad(q, k, v, index_q, index_k)
    if getattr(q, "is_cuda", False) and check is False and not recorded and has_triton():
        numbers = (topk, block_size, init_blocks, local_blocks, softmax_scale, query_chunk, certified, return_lse, impl)
        seqs = seqs if seqs is None else known_calls.like(seqs, k, q.device)
        rows = 0 if q.dim() == 0 or getattr(q, "is_nested", False) else q.shape[0]
        most = QUERY_CHUNK if query_chunk is None else query_chunk
        most_q = rounded_rows(rows, most) if type(most) is int and most > 0 and not certified else rows
        launches = CALLS.look(k, v, index_k, seqs, most_q, *numbers, by_row=(q, index_q), rows=rows)
        if launches.replay is not None:
            return _again(launches, q, k, seqs, return_lse)
    selection, inputs, chunk = check_path(
        q, k, v, index_q, index_k, topk, seqs, block_size=block_size, init_blocks=init_blocks, local_blocks=local_blocks,
        softmax_scale=softmax_scale, query_chunk=query_chunk, certified=certified, return_lse=return_lse, check=check,
    )  # fmt: skip
    stage = CERTIFIED if certified else SELECTION
    check_name(impl, stage, ATTENTION)  # before a stage runs
    if q.shape[0] <= chunk and launches is None:
        found = None if certified or recorded else cpu_step.attend_tokens(impl, selection, inputs)
        found = found or ATTENTION.run(impl, attention_call(inputs, selected(stage, impl, selection), block_size))
        return found if return_lse else found[0]
    out, lse = _results(q)
    lengths = inputs.seqs if launches is None else inputs.seqs.like(most_q)
    cached = known_calls.counted(k, seqs) if launches is not None and seqs is not None else None
    launched = lengths.launched(q)

    def attend(start: int) -> Any:
        rows, here = slice(start, min(start + chunk, q.shape[0])), lengths
        if cached is not None:
            here = replace(here, cu_seqlens_k=starts_of(*cached))
        if launched > chunk:
            here = here.query_chunk(start, min(start + chunk, launched))
        blocks = selected(stage, impl, selection._replace(index_q=index_q[rows], seqs=here))
        call = attention_call(inputs._replace(q=q[rows], seqs=here), blocks, block_size)
        return ATTENTION.run(impl, call if recorded else call._replace(out=out[rows], lse=lse[rows]))

    steps: Steps = [partial(attend, start) for start in range(0, max(q.shape[0], 1), chunk)]
    if launches is not None:
        given = [] if cached is not None else [lengths]
        CALLS.first(launches, steps, (q, index_q, k, v, index_k, seqs, *given, out, lse))
    else:
        done: Any = [step() for step in steps]
        if recorded:  # Autograd does not see what is written to a given tensor.
            out, lse = map(torch.cat, zip(*done, strict=True))
    return (out, lse) if return_lse else out


def rounded_rows(rows: int, chunk: int) -> int:
    """Returns a number of rows, of which so many are handled at a time, with those of the last chunk rounded up."""
    full, rest = divmod(rows, chunk)
    return full * chunk + min(rounded(rest), chunk)


def _results(q: Tensor | Stored) -> tuple[Tensor, Tensor]:
    """Allocates out and lse."""
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device)
    return out, torch.empty(q.shape[:2], dtype=wide_dtype(q), device=q.device)


def _again(
    launches: Call, q: Tensor | Stored, k: Tensor | Stored | PagedKV, seqs: Sequences | None, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Makes the launches of a call whose kind is known. Only its lengths are computed by the host's code."""
    lengths = [known_calls.lengths_again(q, k, seqs)] if known_calls.counted(k, seqs) is None else []
    out, lse = _results(q)
    launches.addresses.extend(x.data_ptr() for x in tensors_in(*lengths, out, lse))
    CALLS.again(launches, Memory())
    return (out, lse) if return_lse else out


def selected(stage: Stage[SelectionCall], impl: str, call: SelectionCall) -> Tensor:
    """Returns the blocks of a checked selection, without the number of blocks that a certified one scored exactly."""
    result = stage.run(impl, call)
    return cast(Tensor, result[0] if stage is CERTIFIED else result)


def attention_call(inputs: AttentionInputs, blocks: Tensor, block_size: int) -> SparseCall:
    """Returns the call of `sparse_attention`, with lse, for checked inputs and the blocks selected for them."""
    return SparseCall(inputs.q, inputs.k, inputs.v, blocks, inputs.seqs, block_size, inputs.softmax_scale, True)


def check_path(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int,
    seqs: Sequences | None,
    *,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    softmax_scale: float | None,
    query_chunk: int | None,
    certified: bool,
    return_lse: bool,
    check: bool,
) -> tuple[SelectionCall, AttentionInputs, int]:
    """Checks the arguments of `msa_attention` and returns the selection, what attention reads, and the query chunk. Both share
    the lengths that attention's caches and sequences say."""
    checks.flag("return_lse", return_lse)
    chunk = QUERY_CHUNK if query_chunk is None else checks.integer("query_chunk", query_chunk, 1)
    inputs = check_qkv(q, k, v, seqs, softmax_scale, check)
    lengths = inputs.seqs if not check and _same_lengths(q, k, index_q, index_k, seqs) else seqs
    counts = (topk, lengths, block_size, init_blocks, local_blocks)
    selection = check_selection(index_q, index_k, *counts, certified, None, check)
    check_agreement(q, k, index_q, index_k)
    if (check or q.device.type == "cpu") and selection.seqs is not inputs.seqs:
        check_same_keys(selection.seqs.k_lens(), inputs.seqs.k_lens())
    return selection._replace(seqs=inputs.seqs), inputs, chunk


def _same_lengths(q: Any, k: Any, index_q: Any, index_k: Any, seqs: Sequences | None) -> bool:
    """Says whether both branches, whose tensors are not checked yet, surely have the same lengths, so that one layout serves
    both. On a CPU it says no for caches: lengths are compared instead."""
    paged = isinstance(k, PagedKV), isinstance(index_k, PagedIndexKeys)
    if (q.device.type == "cpu" and any(paged)) or any(getattr(x, "is_nested", False) for x in (index_q, index_k)):
        return False  # Nested tensors have no shape.
    if any(getattr(x, "device", 0) != q.device for x in (index_q, index_k)) or q.shape[:1] != getattr(index_q, "shape", "")[:1]:
        return False
    if all(paged):
        same = k.seq_lens is index_k.seq_lens and k.capacity == index_k.capacity
    else:
        same = not any(paged) and k.shape[:1] == getattr(index_k, "shape", ())[:1]
    return same or (q.device.type != "cpu" and seqs is not None and seqs.cu_seqlens_k is not None)
