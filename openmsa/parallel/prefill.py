# SPDX-License-Identifier: MIT
"""In context-parallel prefill queries stay with their rank, and keys of all ranks come to it while it scores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from openmsa.attention import attention_call, check_path, selected
from openmsa.block_topk import CERTIFIED_STAGE as CERTIFIED
from openmsa.block_topk import STAGE as SELECTION
from openmsa.inputs import AttentionInputs, SelectionCall
from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.parallel.pages import places
from openmsa.parallel.ranks import Ranks
from openmsa.parallel.shards import Pieces, TokenShards, check_shards, in_chunks
from openmsa.parallel.sources import Packed, Paged, check_new_keys
from openmsa.parallel.travel import travelling
from openmsa.runtime import checks
from openmsa.runtime.dispatch import check_name
from openmsa.sparse_attention import STAGE as ATTENTION
from openmsa.types import Layout, Sequences, out_dtype, wide_dtype

MOVES: tuple[Literal["keys"], Literal["queries"]] = ("keys", "queries")


@overload
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    shards: TokenShards,
    topk: int = 16,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    kv: PagedKV | None = None,
    index_keys: PagedIndexKeys | None = None,
    cached: Sequence[int] | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    query_chunk: int | None = None,
    certified: bool = False,
    moves: Literal["keys", "queries"] = "keys",
    return_lse: Literal[False] = False,
    impl: str = "auto",
) -> Tensor: ...


@overload
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    shards: TokenShards,
    topk: int = 16,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    kv: PagedKV | None = None,
    index_keys: PagedIndexKeys | None = None,
    cached: Sequence[int] | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    query_chunk: int | None = None,
    certified: bool = False,
    moves: Literal["keys", "queries"] = "keys",
    return_lse: Literal[True],
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


@overload
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    shards: TokenShards,
    topk: int = 16,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    kv: PagedKV | None = None,
    index_keys: PagedIndexKeys | None = None,
    cached: Sequence[int] | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    query_chunk: int | None = None,
    certified: bool = False,
    moves: Literal["keys", "queries"] = "keys",
    return_lse: bool,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    shards: TokenShards,
    topk: int = 16,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    kv: PagedKV | None = None,
    index_keys: PagedIndexKeys | None = None,
    cached: Sequence[int] | None = None,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    softmax_scale: float | None = None,
    query_chunk: int | None = None,
    certified: bool = False,
    moves: Literal["keys", "queries"] = "keys",
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes `msa_attention` of sequences whose tokens are spread over ranks; every rank of the group calls it.

    q, k, v, index_q, index_k:  this rank's tokens, ``[shards.tokens(rank), heads, dim]``, in the order of `TokenShards`; plain
                    tensors with the heads and dims of `msa_attention`.
    shards:         who owns which of the new tokens.
    group:          a process group, a `DeviceMesh` of one dimension, or None for the default group, of ``shards.ranks`` ranks.
    kv, index_keys, cached:  for prompts that come in chunks: this rank's pages of the caches, spread as `PageStripes` says, and
                    how many keys each sequence had before this step, known on the host. New keys are appended, by each rank
                    those of its pages, and attention reads cached and new keys in the format of the caches. All three or none.
                    A scale of a whole tensor or of heads must be the same on all ranks, which is not checked.
    topk, block_size, init_blocks, local_blocks, softmax_scale, query_chunk, certified, impl:  as in `msa_attention`;
                    `certified` needs caches of `CertifiedKeys`.

    moves:          "keys": cached pages of all ranks come to each rank. "queries": with caches; whole pages stay, and queries
                    visit them, which moves less where a chunk is short beside what is cached: about 33 KB a new token in
                    place of 2.3 KB a cached one, in sizes of M3. Certified keys are read as exact ones: `certified` is False.

    Index keys are gathered first; keys and values of all ranks arrive while the rank scores and selects. Every rank holds the
    keys of one layer while it computes that layer. The selection is that of one rank, bit for bit, and outputs are the same but
    for the rounding of kernels that cut their work differently.

    Returns out ``[shards.tokens(rank), num_q_heads, head_dim]``, and with `return_lse` the natural-log lse ``[tokens,
    num_q_heads]``. Gradients flow to q, k and v where there are no caches; every rank must then run the backward.
    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value, before anything is sent. A
    rank that fails makes the others raise RuntimeError at the group's timeout.
    """
    check_shards(shards)
    ranks = Ranks.of(group, shards.ranks)
    stage = CERTIFIED if certified else SELECTION
    check_name(impl, stage, ATTENTION)
    if moves not in MOVES:
        raise ValueError(f"moves must be one of {', '.join(map(repr, MOVES))}, got {moves!r}")
    if moves == "queries" and (kv is None or certified):
        got = "none" if kv is None else "certified=True"
        raise ValueError(f"moves must be 'keys' without caches and for a certified selection, got 'queries' with {got}")
    checks.flag("certified", certified)
    known = shards.known(cached)
    for name, x in (("q", q), ("k", k), ("v", v), ("index_q", index_q), ("index_k", index_k)):
        checks.tensor(name, x, "[tokens of the rank, heads, dim]")
        checks.size(name, x, 0, shards.tokens(ranks.rank), f"the tokens that rank {ranks.rank} owns")
    check = partial(
        check_path,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        softmax_scale=softmax_scale,
        query_chunk=query_chunk,
        return_lse=return_lse,
        check=False,
    )
    selection, inputs, chunk = check(q, k, v, index_q, index_k, topk, None, certified=False)
    missing = [name for name, x in (("kv", kv), ("index_keys", index_keys), ("cached", cached)) if x is None]
    if missing and len(missing) < 3:
        raise ValueError(f"kv, index_keys and cached must be given together, got None for {' and '.join(missing)}")
    if kv is None or index_keys is None:
        if certified:
            raise ValueError("certified must be False without caches, whose index keys are CertifiedKeys, got True")
        source: Packed | Paged = Packed(k, v, index_k, shards, ranks)
    else:
        check_new_keys(q, k, v, index_k, kv, index_keys, shards, known, ranks.rank)
        none = Sequences(torch.zeros(len(known) + 1, dtype=torch.int32, device=q.device), max_seqlen_q=0)
        check(q[:0], kv, None, index_q[:0], index_keys, topk, none, certified=certified)
        if moves == "queries":
            path = inputs, selection, k, v, kv, index_keys
            out, lse = travelling(*path, shards, known, ranks, chunk, impl)
            return (out, lse) if return_lse else out
        where = places(shards, known, kv.page_size, ranks.rank, q.device)
        source = Paged(k, v, index_k, kv, index_keys, where, shards, ranks)
    chunks = in_chunks(shards.layouts(ranks.rank, known, q.device), chunk)
    index = source.index_keys()
    blocks = [selected(stage, impl, _selecting(selection, index_q, index, rows, seqs)) for rows, seqs in chunks]
    keys, values = source.keys_and_values()
    out, lse = _attend(q, inputs._replace(k=keys, v=values), blocks, chunks, block_size, impl)
    return (out, lse) if return_lse else out


def _selecting(call: SelectionCall, index_q: Tensor, keys: Tensor | PagedIndexKeys, rows: slice, seqs: Layout) -> SelectionCall:
    return call._replace(index_q=index_q[rows], index_k=keys, seqs=seqs)


def _attend(
    q: Tensor, inputs: AttentionInputs, blocks: list[Tensor], chunks: Pieces, block_size: int, impl: str
) -> tuple[Tensor, Tensor]:
    """Attends chunk by chunk. Where gradients are wanted, results are joined: autograd does not see what is written to a given
    tensor."""
    calls = [
        attention_call(inputs._replace(q=q[rows], seqs=seqs), chosen, block_size)
        for (rows, seqs), chosen in zip(chunks, blocks, strict=True)
    ]
    if checks.needs_grad(q, inputs.k, inputs.v):
        parts = [ATTENTION.run(impl, call) for call in calls]
        if not parts:  # A rank without queries takes part in the backward of its keys.
            out = q * sum(x.sum() for x in (inputs.k, inputs.v) if isinstance(x, Tensor))
            return out, out.sum(-1, dtype=wide_dtype(q))
        out, lse = (torch.cat(results) for results in zip(*parts, strict=True))
        return out, lse
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device)
    lse = torch.empty(q.shape[:2], dtype=wide_dtype(q), device=q.device)
    for (rows, _), call in zip(chunks, calls, strict=True):
        ATTENTION.run(impl, call._replace(out=out[rows], lse=lse[rows]))
    return out, lse
