# SPDX-License-Identifier: MIT
"""The arguments of scoring, of selection and of both attentions are checked here and become the calls of implementations."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.results import check_scores_place
from openmsa.kv_cache.rows import INDEX_FORMATS, KEY_FORMATS, QUERY_FORMATS, check_values
from openmsa.runtime import checks, overlap
from openmsa.runtime.kinds import tensors_in
from openmsa.types import Layout, Sequences, layout


class ScoringCall(NamedTuple):
    """These are the checked arguments of `block_scores`. scores: a place for the result, which the implementation returns, as
    `check_scores_place` says; None: a new tensor."""

    index_q: Tensor | Stored
    index_k: Tensor | Stored | PagedIndexKeys
    seqs: Layout
    block_size: int
    scores: Tensor | None = None

    def writing(self, scores: Tensor) -> ScoringCall:
        """Returns the call with the place of its result, which is checked."""
        num_blocks = self.seqs.num_blocks(self.block_size)
        check_scores_place("scores", scores, self.index_q, num_blocks, list(tensors_in(self.index_q, self.index_k)))
        return self._replace(scores=scores)


def check_scoring(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Sequences | Layout | None,
    block_size: int,
    check: bool,
) -> ScoringCall:
    """Checks the arguments of `block_scores`; of `CertifiedKeys` the exact keys are taken."""
    checks.flag("check", check)
    checks.rows("index_q", index_q, "[total_q, index_heads, index_dim]", QUERY_FORMATS)
    checks.head_dim("index_dim", index_q.shape[2])
    checks.integer("block_size", block_size, 16, 256)
    index_k = exact_keys(index_k)
    if isinstance(index_k, PagedIndexKeys):
        key_heads, keys = index_k.num_heads, index_k.keys
        checks.alike("index_k.keys", keys, "index_q", index_q)
        checks.size("index_k.keys", keys, 3, index_q.shape[2], "index_dim of index_q")
        packed = index_k.layout(seqs, index_q.shape[0], index_q.device, check)
        check_last("index_q.shape[0]", index_q.shape[0], packed.max_seqlen_k, seqs)
    else:
        checks.rows("index_k", index_k, "[total_k, index_key_heads, index_dim]", INDEX_FORMATS)
        key_heads = index_k.shape[1]
        checks.alike("index_k", index_k, "index_q", index_q)
        checks.size("index_k", index_k, 2, index_q.shape[2], "index_dim of index_q")
        packed = layout(seqs, index_q.shape[0], index_k.shape[0], index_q.device, check=check)
        check_last("index_q.shape[0]", index_q.shape[0], index_k.shape[0], seqs)
        checks.heads_first("index_q", index_q, "index_k", index_k)
    checks.divides("index_key_heads", key_heads, "index_heads", index_q.shape[1])
    if check:
        check_values("index_q", index_q)
        check_values("index_k", index_k.gather(packed.k_lens())[0] if isinstance(index_k, PagedIndexKeys) else index_k)
    return ScoringCall(index_q, index_k, packed, block_size)


def exact_keys(index_k: Tensor | Stored | PagedIndexKeys) -> Tensor | Stored | PagedIndexKeys:
    """Returns the keys that scores are computed from, which are the exact ones of `CertifiedKeys`."""
    if isinstance(index_k, CertifiedKeys):
        return index_k.exact
    if isinstance(index_k, PagedIndexKeys) and isinstance(index_k.keys, CertifiedKeys):
        return PagedIndexKeys(index_k.keys.exact, index_k.page_table, index_k.seq_lens)
    return index_k


class SelectionCall(NamedTuple):
    """These are the checked arguments of `select_blocks`. In a certified selection index_k holds both precisions.

    blocks:  where to write, int32 ``[total_q, index_heads, topk]``, contiguous, which the implementation returns; None: a new
             tensor.
    """

    index_q: Tensor | Stored
    index_k: Tensor | Stored | PagedIndexKeys
    seqs: Layout
    block_size: int
    topk: int
    init_blocks: int
    local_blocks: int
    blocks: Tensor | None = None


def check_selection(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int,
    seqs: Sequences | Layout | None,
    block_size: int,
    init_blocks: int,
    local_blocks: int,
    certified: bool,
    rescored: Tensor | None,
    check: bool,
) -> SelectionCall:
    """Checks the arguments of `select_blocks`."""
    checks.flag("certified", certified)
    for name, value in (("index_q", index_q), ("index_k", index_k)):
        checks.no_gradient(name, value, "blocks are selected, which has no derivative")
    check_counts(topk, block_size, init_blocks, local_blocks)
    scoring = check_scoring(index_q, index_k, seqs, block_size, check)
    call = SelectionCall(*scoring[:4], topk, init_blocks, local_blocks)
    if certified:
        _check_certified(call, index_k, rescored)
        return call._replace(index_k=index_k)
    if rescored is not None:
        raise ValueError(f"rescored must be None unless certified is True, got {type(rescored).__name__}")
    return call


def _check_certified(call: SelectionCall, index_k: Tensor | Stored | PagedIndexKeys, rescored: Tensor | None) -> None:
    keys = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    if not isinstance(keys, CertifiedKeys):
        raise ValueError(f"index_k must be CertifiedKeys (or pages of them) for certified=True, got {type(keys).__name__}")
    if rescored is not None:
        checks.tensor("rescored", rescored, "[total_q, index_heads]", (torch.int32,))
        overlap.check_written("rescored", rescored)
        checks.alike("rescored", rescored, "index_q", call.index_q, dtype=False)
        for dimension, what in enumerate(("total_q", "index_heads")):
            checks.size("rescored", rescored, dimension, call.index_q.shape[dimension], f"{what} of index_q")


def check_counts(topk: int, block_size: int, init_blocks: int, local_blocks: int) -> None:
    """Checks how many blocks are selected, how many of them are forced, and their size."""
    checks.integer("topk", topk, 1, 64)
    checks.integer("block_size", block_size, 16, 256)
    checks.integer("init_blocks", init_blocks, 0)
    checks.integer("local_blocks", local_blocks, 0)
    if init_blocks + local_blocks > topk:
        raise ValueError(f"init_blocks + local_blocks must be at most topk ({topk}), got {init_blocks} + {local_blocks}")


def check_last(name: str, queries: int, keys: int, seqs: Sequences | Layout | None) -> None:
    """Where `seqs` gives no lengths, the queries are the last positions of one sequence, so there are no more than its keys."""
    if queries > keys and (seqs is None or seqs == Sequences(None, None, seqs.max_seqlen_q, seqs.max_seqlen_k)):
        raise ValueError(
            f"{name} must be at most the number of keys ({keys}) where seqs gives no lengths, as the queries are then the last "
            f"positions of one sequence of [tokens, heads, dim], got {queries}"
        )


class AttentionInputs(NamedTuple):
    """These are the checked arguments that all attentions share; v is None where k is a `PagedKV`."""

    q: Tensor | Stored
    k: Tensor | Stored | PagedKV
    v: Tensor | Stored | None
    seqs: Layout
    softmax_scale: float


def check_qkv(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Sequences | Layout | None,
    softmax_scale: float | None,
    check: bool,
    causal: bool = True,
) -> AttentionInputs:
    """Checks shapes, head counts, dtypes, formats, devices and lengths, and the values when `check`."""
    checks.flag("check", check)
    checks.rows("q", q, "[total_q, num_q_heads, head_dim]", QUERY_FORMATS)
    head_dim = q.shape[2]
    checks.head_dim("head_dim", head_dim)
    if isinstance(k, PagedKV):
        if v is not None and v is not k:
            raise ValueError(f"v must be None when k is a PagedKV (it holds both), got {type(v).__name__}")
        v, num_kv_heads = None, k.num_heads
        checks.alike("k.k", k.k, "q", q)
        checks.size("k.k", k.k, 3, head_dim, "head_dim of q")
        packed = k.layout(seqs, q.shape[0], q.device, check)
        values: dict[str, Any] = dict(zip(("k.k", "k.v"), k.gather(packed.k_lens()), strict=False)) if check else {}
    else:
        _check_packed(q, k, v)
        packed, num_kv_heads = layout(seqs, q.shape[0], k.shape[0], q.device, check=check), k.shape[1]
        values = {"k": k, "v": v}
    if causal:
        check_last("q.shape[0]", q.shape[0], packed.max_seqlen_k if isinstance(k, PagedKV) else k.shape[0], seqs)
    checks.divides("num_kv_heads", num_kv_heads, "num_q_heads", q.shape[1])
    if check:
        for name, value in ({"q": q} | values).items():
            check_values(name, value)
    scale = head_dim**-0.5 if softmax_scale is None else checks.scale("softmax_scale", softmax_scale)
    return AttentionInputs(q, k, v, packed, scale)


def _check_packed(q: Tensor | Stored, k: Tensor | Stored, v: Tensor | Stored | None) -> None:
    for name, value in (("k", k), ("v", v)):
        checks.rows(name, value, "[total_k, num_kv_heads, head_dim]", KEY_FORMATS)
    assert v is not None
    if checks.stored_as(v) != checks.stored_as(k):
        raise TypeError(f"v must be stored as k ({checks.stored_as(k)}), got {checks.stored_as(v)}")
    for name, value in (("k", k), ("v", v)):
        checks.alike(name, value, "q", q)
        checks.size(name, value, 2, q.shape[2], "head_dim of q")
    checks.alike("v", v, "k", k)
    checks.size("v", v, 0, k.shape[0], "total_k of k")
    checks.size("v", v, 1, k.shape[1], "num_kv_heads of k")
    checks.heads_first("q", q, "k", k)


def check_agreement(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
) -> None:
    """The index branch and the main branch must describe the same tokens and groups."""
    checks.alike("index_q", index_q, "q", q, dtype=False)
    checks.size("index_q", index_q, 0, q.shape[0], "total_q of q")
    num_kv_heads = k.num_heads if isinstance(k, PagedKV) else k.shape[1]
    if index_q.shape[1] not in (1, num_kv_heads):
        raise ValueError(f"index_q.shape[1] must be num_kv_heads ({num_kv_heads}) or 1, got {index_q.shape[1]}")
    if not isinstance(k, PagedKV) and not isinstance(index_k, PagedIndexKeys):
        checks.size("index_k", index_k, 0, k.shape[0], "total_k of k")


def check_same_keys(index_lens: Tensor, lens: Tensor) -> None:
    """Raises where the two caches, which give the lengths that `seqs` does not, hold different numbers of keys."""
    differ = (index_lens != lens).nonzero().flatten()
    if differ.numel():
        b = int(differ[0])
        raise ValueError(
            f"index_k must hold as many keys as k (seq_lens: {int(lens[b])} for sequence {b}), got {int(index_lens[b])}"
        )
