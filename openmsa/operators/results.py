# SPDX-License-Identifier: MIT
"""Says what the public functions return, in empty tensors: shapes, dtypes and strides follow from those of the arguments.

Each function here has the parameters of the public function of the same name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from openmsa.dense_attention.call import check_wanted
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.rows import INDEX_FORMATS, KEY_FORMATS, QUERY_FORMATS
from openmsa.runtime import checks
from openmsa.types import Sequences, out_dtype, wide_dtype

Queries = Tensor | Stored


def empty(like: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor on the device of `like`."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def num_blocks(k: Any, seqs: Sequences | None, block_size: int) -> int:
    """Returns how many blocks the longest sequence has: a size that only the running kernel knows where lengths are read."""
    seqs = Sequences() if seqs is None else seqs
    paged = isinstance(k, (PagedKV, PagedIndexKeys))
    longest = seqs.max_seqlen_k
    if longest is None and seqs.cu_seqlens_k is None:
        if not paged:
            longest = k.shape[0]
        elif k.device.type != "cpu":
            longest = k.capacity
    if longest is None:
        return cast(int, torch.library.get_ctx().new_dynamic_size())
    return -(-longest // block_size)


def block_scores(
    index_q: Queries, index_k: Any, seqs: Sequences | None = None, *, block_size: int = 128, **settings: Any
) -> Tensor:
    """Returns ``[index_heads, total_q, num_blocks]``."""
    _check_index(index_q, index_k)
    shape = index_q.shape[1], index_q.shape[0], num_blocks(index_k, seqs, block_size)
    return empty(index_q, shape, wide_dtype(index_q))


def select_blocks(index_q: Queries, index_k: Any, topk: int = 16, seqs: Sequences | None = None, **settings: Any) -> Tensor:
    """Returns int32 ``[total_q, index_heads, topk]``."""
    _check_index(index_q, index_k)
    return empty(index_q, (*index_q.shape[:2], topk), torch.int32)


def select_blocks_from_scores(scores: Tensor, topk: int = 16, *given: Any, **settings: Any) -> Tensor:
    """Returns int32 ``[total_q, index_heads, topk]``."""
    checks.tensor("scores", scores, "[index_heads, total_q, num_blocks]")
    return empty(scores, (scores.shape[1], scores.shape[0], topk), torch.int32)


def sparse_attention(
    q: Queries, k: Any, v: Any, blocks: Tensor, seqs: Sequences | None = None, *, return_lse: bool = False, **settings: Any
) -> Tensor | tuple[Tensor, ...]:
    """Returns ``[total_q, num_q_heads, head_dim]`` and, where it is asked for, lse ``[total_q, num_q_heads]``."""
    checks.tensor("blocks", blocks, "[total_q, num_kv_heads, topk]", (torch.int32,))
    return _attention(q, k, v, return_lse)


def index_loss(q: Tensor, k: Tensor, index_q: Tensor, *given: Any, **settings: Any) -> Tensor:
    """Returns a scalar."""
    checks.tensor("q", q, "[total_q, num_q_heads, head_dim]")
    checks.tensor("index_q", index_q, "[total_q, index_heads, index_dim]")
    return empty(q, (), torch.promote_types(wide_dtype(q), wide_dtype(index_q)))


def dense_attention(
    q: Queries,
    k: Any,
    v: Any = None,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    return_out: bool = True,
    return_lse: bool = False,
    return_max_score: bool = False,
    **settings: Any,
) -> tuple[Tensor, ...]:
    """Returns what is asked for of out, lse and max scores ``[num_q_heads, total_q, num_blocks]``."""
    check_wanted(return_out, return_lse, return_max_score)
    found = _attention(q, k, v, return_lse)[0 if return_out else 1 :]
    if return_max_score:
        shape = q.shape[1], q.shape[0], num_blocks(k, seqs, block_size)
        found = (*found, empty(q, shape, wide_dtype(q)))
    return found


def msa_attention(
    q: Queries, k: Any, v: Any, index_q: Queries, index_k: Any, *given: Any, return_lse: bool = False, **settings: Any
) -> tuple[Tensor, ...]:
    """Returns what `sparse_attention` returns."""
    _check_index(index_q, index_k)
    return _attention(q, k, v, return_lse)


def plan_select(self: Any, index_q: Queries, index_k: Any, topk: int) -> Tensor:
    """Returns int32 ``[total_q, index_heads, topk]``. topk: that of the plan."""
    return empty(index_q, (*index_q.shape[:2], topk), torch.int32)


def plan_attend(self: Any, q: Queries, k: Any, v: Any, blocks: Tensor, *, out: Any = None, lse: Any = None) -> Tensor:
    """Returns ``[total_q, num_q_heads, head_dim]``."""
    return empty(q, tuple(q.shape), out_dtype(q)) if out is None else out


def nothing(*given: Any, **settings: Any) -> None:
    """Returns what a function returns that only writes."""


def dequantize(self: Stored, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the numbers that a format stands for."""
    return empty(self, tuple(self.shape), dtype)


def _check_index(index_q: Any, index_k: Any) -> None:
    checks.rows("index_q", index_q, "[total_q, index_heads, index_dim]", QUERY_FORMATS)
    if not isinstance(index_k, PagedIndexKeys):
        checks.rows("index_k", index_k, "[total_k, index_key_heads, index_dim]", INDEX_FORMATS)


def _attention(q: Queries, k: Any, v: Any, return_lse: bool) -> tuple[Tensor, ...]:
    checks.rows("q", q, "[total_q, num_q_heads, head_dim]", QUERY_FORMATS)
    if not isinstance(k, PagedKV):
        for name, value in (("k", k), ("v", v)):
            checks.rows(name, value, "[total_k, num_kv_heads, head_dim]", KEY_FORMATS)
    out = empty(q, tuple(q.shape), out_dtype(q))
    return (out, empty(q, tuple(q.shape[:2]), wide_dtype(q))) if return_lse else (out,)
