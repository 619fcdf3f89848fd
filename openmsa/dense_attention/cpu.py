# SPDX-License-Identifier: MIT
"""This module runs `dense_attention` on CPU. Where the machine has a C compiler, a kernel in C attends, to all blocks
(`openmsa.primitives.cpu_blocks`). Else PyTorch's fused kernel does, which takes keys before the first query unmasked and the
rest causal; both results are merged."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openmsa.block_scores import STAGE as SCORING
from openmsa.dense_attention.call import chosen_results
from openmsa.inputs import ScoringCall
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.rows import rows_of
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives import cpu_blocks
from openmsa.primitives.cpu_rows import reads
from openmsa.runtime import c_library
from openmsa.runtime.matmul import attend_few
from openmsa.types import Layout, out_dtype, wide_dtype

BLOCK = 128  # A kernel in C takes so many keys at a time.
FEW_ROWS = 64  # So few rows, queries times heads, of a KV head
SPLIT_BLOCKS = 64  # take so many blocks a call of it.
SPLIT_KEYS = 16384  # Few queries have so many keys a call: the fused kernel works in parallel over heads and queries only.
UNSURE_ROWS = 256  # So many rows are computed again at a time where the fused kernel's results are unsure.
DEQUANTIZED_KEYS = 2048  # So many keys of a format, or of float16, are held as wider numbers at a time.


def dense_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    causal: bool,
    softmax_scale: float,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_score: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Does what `openmsa.dense_attention.dense_attention` says."""
    if not causal:  # Every query is placed behind the last key.
        seqs = replace(seqs, q_offset=seqs.k_lens())
    if return_out or return_lse:
        out, lse = _attend(q, k, v, seqs, softmax_scale, out, lse)
    if return_max_score:
        keys = PagedIndexKeys(k.k, k.page_table, k.seq_lens) if isinstance(k, PagedKV) else k
        max_score = SCORING.run("cpu", ScoringCall(q, keys, seqs, block_size, max_score))
    return chosen_results(out if return_out else None, lse if return_lse else None, max_score)


def _attend(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    scale: float,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    total_q, heads, dim = q.shape
    k_pool, v_pool = (k.k, k.v) if isinstance(k, PagedKV) else (k, v)
    assert v_pool is not None
    kv_heads = k_pool.shape[1]
    out = torch.empty(total_q, heads, dim, dtype=out_dtype(q), device="cpu") if out is None else out
    lse = torch.empty((total_q, heads), dtype=wide_dtype(q), device="cpu") if lse is None else lse
    if seqs.num_blocks(BLOCK) and _takes_kernel(q, k_pool, v_pool):
        _attend_compiled(q, k, v, seqs, scale, out, lse)
        return out, lse
    dtype = q.dtype  # PyTorch's fused kernel is several times slower in float16 than in float32.
    if isinstance(q, Stored) or isinstance(k_pool, Stored) or q.dtype == torch.float16:
        dtype = wide_dtype(q)
    out.zero_(), lse.fill_(-torch.inf)
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        q0 -= min(offset, 0)  # Queries before position 0 see nothing.
        prefix = min(max(offset, 0), k_len)  # All queries see so many keys.
        if q0 >= q1 or not k_len:
            continue
        pages = k.page_table[b] if isinstance(k, PagedKV) else None
        rows = Rows(k_pool, k0, pages, dtype), Rows(v_pool, k0, pages, dtype)
        queries = rows_of(q, slice(q0, q1), dtype=dtype).to(dtype)
        if q1 - q0 == 1 and k_len <= SPLIT_KEYS:
            last = min(max(offset, 0) + 1, k_len)
            row = queries[0].to(wide_dtype(q)).unflatten(0, (kv_heads, -1)) * scale
            merged, merged_lse = attend_few(row, *(of.heads(0, last).to(row.dtype) for of in rows))
            out[q0], lse[q0] = merged.flatten(0, 1), merged_lse.flatten(0, 1)
            continue
        queries = queries.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, q_len, dim]
        converted = isinstance(k_pool, Stored) or k_pool.dtype != dtype
        step = DEQUANTIZED_KEYS if converted else max(prefix, 1)
        parts: list[tuple[Tensor, Tensor]] = []
        for first in range(0, prefix, step):
            keys, values = (of.heads(first, min(first + step, prefix)).to(dtype) for of in rows)
            parts = [_merge([*parts, _unmasked(queries, keys, values, scale)])]
        if prefix < k_len:
            keys, values = (of.heads(prefix, min(k_len, prefix + q1 - q0)).to(dtype) for of in rows)
            parts = [*parts, _causal(queries, keys, values, scale)]
        merged, merged_lse = _merge(parts)
        out[q0:q1] = merged.permute(2, 0, 1, 3).flatten(1, 2)
        lse[q0:q1] = merged_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def _takes_kernel(q: Tensor | Stored, k: Tensor | Stored, v: Tensor | Stored) -> bool:
    """Says whether a kernel in C reads these and is as fast as PyTorch's, which multiplies bfloat16 on AMX tiles, as ours does
    for some numbers of heads alone."""
    if not reads(cpu_blocks.SOURCE, q, k, v):
        return False
    on_tiles = q.dtype == k.dtype == torch.bfloat16 and c_library.library(cpu_blocks.SOURCE).tiles == "AMX tiles"
    return not on_tiles or (q.shape[1] // k.shape[1] % cpu_blocks.TILE_HEADS == 0 and q.shape[2] % cpu_blocks.TILE_DIM == 0)


def _attend_compiled(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Layout,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends by a kernel in C to all blocks. Those of few queries are cut into splits, each with queries of its own, whose
    results are merged: the kernel works in parallel over KV heads and queries only."""
    spans, (total_q, heads) = cpu_blocks.spans_of(k, v, seqs, wide_dtype(q)), lse.shape
    blocks = torch.arange(seqs.num_blocks(BLOCK), dtype=torch.int32, device="cpu")
    rows = seqs.longest_q * heads // spans[0].keys.rows.shape[1] if spans else 0
    if rows > FEW_ROWS or len(blocks) <= SPLIT_BLOCKS or isinstance(q, Stored):
        cpu_blocks.attend(q, blocks.expand(total_q, 1, -1), spans, BLOCK, scale, out, lse)
        return
    ids = pad_sequence(list(blocks.split(SPLIT_BLOCKS)), batch_first=True, padding_value=-1)
    starts = [i * total_q for i in range(len(ids))]
    each = [replace(x, first=x.first + start, stop=x.stop + start) for start in starts for x in spans]
    parts = torch.empty(len(ids), *q.shape, device="cpu"), torch.empty(len(ids), *lse.shape, device="cpu")
    given = q.repeat(len(ids), 1, 1), ids.repeat_interleave(total_q, 0)[:, None], each
    cpu_blocks.attend(*given, BLOCK, scale, *(part.flatten(0, 1) for part in parts))
    merged, merged_lse = _merge(list(zip(*parts, strict=True)))
    out.copy_(merged), lse.copy_(merged_lse)


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Calls PyTorch's flash kernel for q, k, v ``[batch, heads, len, dim]``, causal from the top left; returns out and lse."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))  # The kernel assumes that rows are dense
    if scale == 0:  # and that the scale is positive.
        out, lse = _fused(q.double() * 0, k.double(), v.double(), 1.0, causal)
        return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))
    if scale < 0:
        q, scale = -q, -scale
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    # Where the kernel knows no largest logit it says lse 0, and for some infinite logits out 0.
    unsure = ~lse.isfinite() | (lse == 0)
    if bool(unsure.any()):
        for at in unsure.flatten(2).any(2).nonzero().tolist():
            one, rows = tuple(at), unsure[tuple(at)].nonzero().flatten()
            for some in rows.split(UNSURE_ROWS):
                out[one][some], lse[one][some] = _plain(q[one][some], k[one], v[one], scale, some if causal else None)
    return out, lse


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, last_key: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attends with rows ``[n, dim]`` to keys of one head, up to each row's last one (None: all). A logit of inf gives NaN, and
    one of -inf counts for nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = (q.to(wide) @ k.to(wide).T) * scale
    if last_key is not None:
        logits.masked_fill_(torch.arange(k.shape[0], device="cpu") > last_key[:, None], -torch.inf)
    sums = logits.logsumexp(1)
    weights = logits.sub_(sums.masked_fill(sums == -torch.inf, 0)[:, None]).exp_()
    return (weights @ v.to(wide)).to(q.dtype), sums


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))  # One KV head serves its group.
    return _fused(q, k, v, scale, True)


def _unmasked(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    kv_heads, group, q_len, dim = q.shape
    rows = q.reshape(kv_heads, 1, group * q_len, dim)  # The group's heads are rows of one product.
    splits = max(1, k.shape[1] // SPLIT_KEYS) if group * q_len <= 64 else 1
    length = k.shape[1] // splits
    tail = slice(length * splits, None)
    k_split, v_split = (x[:, : length * splits].unflatten(1, (splits, length)) for x in (k, v))
    out, lse = _fused(rows.expand(-1, splits, -1, -1), k_split, v_split, scale, False)  # [kv_heads, splits, rows, dim]
    parts = [(out[:, s], lse[:, s]) for s in range(splits)]
    if k[:, tail].shape[1]:
        out, lse = _fused(rows, k[:, None, tail], v[:, None, tail], scale, False)
        parts.append((out[:, 0], lse[:, 0]))
    out, lse = _merge(parts)
    return out.view(kv_heads, group, q_len, dim), lse.view(kv_heads, group, q_len)


def _merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges partial results over disjoint keys: out ``[..., dim]`` and lse ``[...]`` each."""
    if len(parts) == 1:
        return parts[0]
    logs = torch.stack([lse for _, lse in parts])
    total = logs.logsumexp(0)
    finite = total.masked_fill(total == -torch.inf, 0)
    out = sum((lse - finite).exp()[..., None] * out for out, lse in parts)
    assert isinstance(out, Tensor)
    return out.to(parts[0][0].dtype), total
