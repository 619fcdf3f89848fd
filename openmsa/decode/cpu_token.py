# SPDX-License-Identifier: MIT
"""On a CPU one function scores, selects and attends for one new token: by C kernels (`cpu_step`), or by PyTorch's operations in
a short context, where each product takes a tenth of a millisecond, as much as the checks and small operations of two stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from openmsa.block_scores.cpu import MIN_ROWS, block_max, score_few
from openmsa.block_topk.cpu import FEW_SCORES, choose
from openmsa.decode import cpu_step
from openmsa.decode.cpu_step import Counts
from openmsa.kv_cache import Stored
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.runtime import checks
from openmsa.runtime.matmul import pad_few, products_few
from openmsa.sparse_attention.cpu_token import READ_ANYWAY, attend_all, attend_token, reads_all
from openmsa.types import INT32_MAX, Sequences

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attend_packed(
    q: Any, k: Any, v: Any, index_q: Any, index_k: Any, seqs: Any, counts: Counts, scale: Any, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Does what `msa_attention` does for one query, the last position of one packed sequence: returns out ``[1, num_q_heads,
    head_dim]`` and, with `return_lse`, lse ``[1, num_q_heads]``. The arguments need not be checked: returns None where they are
    wrong, too long, or not the plain tensors of such a call."""
    tensors = (q, k, v, index_q, index_k)
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or x.is_nested or x.layout is not torch.strided:
            return None
        if x.dim() != 3 or x.dtype not in DTYPES:
            return None
    (queries, heads, dim), (keys, kv_heads, _), (_, key_heads, index_dim) = q.shape, k.shape, index_k.shape
    index_heads = index_q.shape[1]
    if queries != 1 or not keys or not counts.valid():
        return None
    if v.shape != k.shape or k.shape[2] != dim or index_q.shape != (1, index_heads, index_dim) or index_k.shape[0] != keys:
        return None
    if not (q.dtype == k.dtype == v.dtype and index_q.dtype == index_k.dtype) or kv_heads > checks.MANY_HEADS:
        return None
    if not (heads and kv_heads and key_heads):
        return None
    if heads % kv_heads or index_heads not in (1, kv_heads) or index_heads % key_heads:
        return None
    if dim % 16 or index_dim % 16 or not (16 <= dim <= 256 and 16 <= index_dim <= 256):
        return None
    if keys > most_keys(q, k, v, index_q, index_k, counts.block_size):
        return None
    if not (scale is None or (type(scale) is float and abs(scale) <= checks.FLOAT32_MAX)) or not _is_last(seqs, keys):
        return None
    if checks.needs_grad(*tensors) or torch.is_autocast_enabled("cpu"):
        return None
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((1, heads), dtype=torch.float32, device="cpu") if return_lse else None
    scale = dim**-0.5 if scale is None else scale
    blocks = torch.empty(1, index_heads, counts.topk, dtype=torch.int32, device="cpu")
    if not attend(q, Rows(k), Rows(v), index_q, Rows(index_k), keys, counts, scale, blocks, out, lse):
        return None
    return out if lse is None else (out, lse)


def most_keys(
    q: Tensor, keys: Tensor | Stored, values: Tensor | Stored, index_q: Tensor, index_keys: Tensor | Stored, block_size: int
) -> int:
    """Returns how many keys a sequence may have that `attend` serves for these queries and caches, 0 where it does not."""
    if index_q.shape[1] // index_keys.shape[1] >= MIN_ROWS:
        return 0
    if cpu_step.compiled():
        return INT32_MAX if cpu_step.serves(q, keys, values, index_q, index_keys) else 0
    return FEW_SCORES * block_size // index_q.shape[1]


def _is_last(seqs: Any, keys: int) -> bool:
    """Says whether `seqs` surely describes one sequence of so many keys whose last position is the one query."""
    if seqs is None:
        return True
    if type(seqs) is not Sequences or seqs.q_offset is not None:
        return False
    for starts, longest, total in ((seqs.cu_seqlens_q, seqs.max_seqlen_q, 1), (seqs.cu_seqlens_k, seqs.max_seqlen_k, keys)):
        if (type(longest) is not int and longest is not None) or longest not in (None, total):
            return False
        if starts is None:
            continue
        if type(starts) is not Tensor or starts.device.type != "cpu" or starts.dtype not in (torch.int32, torch.int64):
            return False
        if starts.tolist() != [0, total]:
            return False
    return True


def attend(
    q: Tensor,
    keys: Rows,
    values: Rows,
    index_q: Tensor,
    index_keys: Rows,
    length: int,
    counts: Counts,
    scale: float,
    blocks: Tensor,
    out: Tensor,
    lse: Tensor | None,
) -> bool:
    """Attends with the newest token of a sequence of `length` keys, at least 1 and at most `most_keys`: q ``[1, num_q_heads,
    head_dim]``, index_q ``[1, index_heads, index_dim]``. Writes blocks, int32 ``[1, index_heads, topk]``, contiguous, out, like
    q, and, unless it is None, lse ``[1, num_q_heads]``. False: a score is NaN, so the stages must serve the call."""
    given = (q, keys, values, index_q, index_keys, length, counts, scale)
    if cpu_step.compiled():
        cpu_step.attend(*given, blocks, out, lse)
        return True
    if (ids := _attend(*given, out, lse)) is None:
        return False
    blocks[0] = torch.tensor([of + [-1] * (counts.topk - len(of)) for of in ids], dtype=torch.int32, device="cpu")
    return True


def _attend(
    q: Tensor,
    keys: Rows,
    values: Rows,
    index_q: Tensor,
    index_keys: Rows,
    length: int,
    counts: Counts,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> list[list[int]] | None:
    """Does what `attend` does with PyTorch's operations, and returns the blocks of each index head, ascending, or None."""
    with torch.inference_mode():  # Operations begin sooner where autograd need not be asked.
        kv_heads, key_heads, size = keys.rows.shape[1], index_keys.rows.shape[1], counts.block_size
        group, visible = q.shape[-2] // kv_heads, -(-length // size)
        scored = min(length, max(0, visible - counts.local_blocks) * size)  # The last blocks are forced.
        few = visible <= READ_ANYWAY * counts.topk  # Otherwise attention would read copies of some keys.
        queries = (q.float() * scale).reshape(kv_heads, group, -1)
        rows = index_q.float().reshape(key_heads, -1, index_q.shape[-1])
        if few and keys.pages is None and rows.shape[1] == 1 and _same(keys.rows, index_keys.rows):
            # In an index without training the keys are read once for both.
            both = torch.cat((queries, rows), 1)
            both = pad_few(both) if group < 4 else both
            products = products_few(both, keys.heads(0, length), ties=scored)  # [kv_heads, rows, length]
            ids = _chosen(block_max(products[:, group : group + 1, :scored], size), visible, counts)
            if ids is not None and reads_all(ids, visible):
                logits = products if products.shape[1] % 4 == 0 else products[:, :group].contiguous()
                if attend_all(logits, ids, values.heads(0, length), size, out, lse):
                    return ids
        else:
            ids = _chosen(score_few(rows, index_keys, scored, size) if scored else rows[..., :0], visible, counts)
        if ids is not None:
            attend_token(queries, ids, length - 1, keys, values, size, out, lse)
        return ids


def _same(rows: Any, others: Any) -> bool:
    """Says whether both are the same plain rows in memory."""
    plain = type(rows) is Tensor and type(others) is Tensor and rows.data_ptr() == others.data_ptr()
    return plain and (rows.dtype, rows.shape, rows.stride()) == (others.dtype, others.shape, others.stride())


def _chosen(scores: Tensor, visible: int, counts: Counts) -> list[list[int]] | None:
    """Returns which of the first `visible` blocks the scores ``[heads, rows, blocks]`` of a token select, or None where one is
    NaN. Blocks that are forced because they are the last need no score."""
    of_heads = [of_row for of_head in scores.tolist() for of_row in of_head]
    if math.isnan(sum(map(sum, of_heads))):
        return None
    local = max(0, visible - counts.local_blocks)
    return [choose(of_head, visible, counts.topk, counts.init_blocks, local) for of_head in of_heads]
