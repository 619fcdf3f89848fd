# SPDX-License-Identifier: MIT
"""This module runs MiniMax-M3 of Hugging Face transformers (`minimax_m3_vl`) on this library, on any device:

    register_minimax_m3("openmsa-m3")
    model = AutoModelForImageTextToText.from_pretrained(..., attn_implementation="openmsa-m3")

The model's sparse layers hand the blocks that their indexer selected to the attention function as ``block_indices``; this is
the hook that transformers' own path for SM100 uses. Nothing of transformers is patched and the indexer stays the model's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import dense_attention
from openmsa.integrations.transformers import equal_lengths, packed_forward, refuse_unsupported, register_forward
from openmsa.runtime.dispatch import check_name
from openmsa.runtime.lengths import starts_of
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences


def register_minimax_m3(name: str = "openmsa-m3", *, impl: str = "auto") -> None:
    """Registers attention for MiniMax-M3 models under `name` with transformers' `AttentionInterface`.

    name:  its name in ``attn_implementation=``. impl: as in `openmsa.sparse_attention` and `openmsa.dense_attention`.

    Sparse layers run `sparse_attention` over the blocks that their indexer selected, whatever their number (up to 64), block
    size (16 to 256), order and head_dim; full layers run `dense_attention`; the vision tower, which is bidirectional, runs
    PyTorch's attention. They serve prefill and decode with any of transformers' caches and every 2D ``attention_mask``, as the
    model's eager path does: blocks are counted from the first slot of a row, padding included, and a query that sees no key,
    as in left padding, gives the mean of all values. That matters, because the indexer also scores the keys of padding. Only
    the outputs at padding behind real tokens, and in full layers between them, differ from the eager path. Through that mean
    they reach real tokens where a row is padded on both sides.

    Whatever else a model needs raises NotImplementedError, as with `openmsa.integrations.transformers.register`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    check_name(impl, SPARSE, DENSE)

    def attend_all(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        return dense_attention(q, k, v, seqs, softmax_scale=softmax_scale, impl=impl)

    dense = packed_forward(name, attend_all)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        block_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        # query [batch, num_q_heads, q_len, head_dim], block_indices [batch, index_heads, q_len, topk]
        if block_indices is None:
            if is_causal is False:
                return sdpa_attention_forward(
                    module, query, key, value, attention_mask, scaling=scaling, is_causal=False, **kwargs
                )
            out, _ = dense(module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **kwargs)
            if attention_mask is not None:
                out = _filled_with_mean(out, ~attention_mask[:, -query.shape[2] :, None], value)
            return out, None
        refuse_unsupported(name, module, attention_mask, is_causal, kwargs)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        indexer: Any = module.indexer
        options = {"block_size": indexer.block_size, "softmax_scale": scale, "impl": impl}
        return _attend_blocks(query, key, value, block_indices, attention_mask, options), None

    register_forward(name, forward)


def _attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, block_indices: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attends to the selected blocks: returns ``[batch, q_len, num_q_heads, head_dim]``. mask: bool ``[batch, filled]``."""
    batch, _, q_len, _ = query.shape
    filled = key.shape[2] if mask is None else mask.shape[1]  # A static cache hands over more keys than it holds.
    q = query.transpose(1, 2).flatten(0, 1)  # [batch * q_len, num_q_heads, head_dim]
    k, v = (x[:, :, :filled].transpose(1, 2) for x in (key, value))  # [batch, filled, num_kv_heads, head_dim]
    ids = block_indices.transpose(1, 2).flatten(0, 1).to(torch.int32)  # [batch * q_len, index_heads, topk]
    seqs = equal_lengths(batch, q_len, filled, query.device)
    if mask is None:
        out = sparse_attention(q, k.flatten(0, 1), v.flatten(0, 1), ids, seqs, return_lse=False, **options)
        return out.unflatten(0, (batch, q_len))
    out, lse = (x.unflatten(0, (batch, q_len)) for x in _attend_around_padding(q, k, v, ids, mask, seqs, options))
    return _filled_with_mean(out, lse == -torch.inf, value)


def _filled_with_mean(out: Tensor, empty: Tensor, value: Tensor) -> Tensor:
    """Puts the mean of its head's `value` ``[batch, num_kv_heads, k_len, head_dim]`` into `out` ``[batch, q_len, num_q_heads,
    head_dim]`` where `empty` (bool ``[batch, q_len, num_q_heads or 1]``): a softmax over logits all masked alike. It syncs."""
    if not bool(empty.any()):
        return out
    mean = value.mean(2).repeat_interleave(out.shape[2] // value.shape[1], 1)[:, None]  # [batch, 1, num_q_heads, head_dim]
    return torch.where(empty[..., None], mean, out)


def _attend_around_padding(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, mask: Tensor, seqs: Sequences, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns out and lse, merged from a call over blocks without padding and calls in which each run of real keys in the other
    blocks is a sequence of its own.

    Left padding costs one call more, right padding none: what follows a row's last real token is seen by no real query.
    """
    batch, filled = mask.shape
    block_size, q_len = options["block_size"], q.shape[0] // batch
    slot = torch.arange(filled, device=mask.device)
    last = torch.where(mask, slot, -1).amax(dim=1, keepdim=True)
    tail = -filled % block_size
    whole = (
        nn.functional.pad(mask | (slot > last), (0, tail), value=True).unflatten(1, (-1, block_size)).all(2)
    )  # [batch, blocks]

    row = torch.arange(q.shape[0], device=q.device) // q_len  # the sequence of each query
    clean = whole[row[:, None, None], ids.clamp(0, whole.shape[1] - 1).long()]
    out, lse = sparse_attention(
        q, k.flatten(0, 1), v.flatten(0, 1), ids.masked_fill(~clean, -1), seqs, return_lse=True, **options
    )
    for first, length in _real_runs(mask & ~whole.repeat_interleave(block_size, 1)[:, :filled], block_size):
        piece = torch.arange(block_size, device=q.device)
        inside = piece < length[:, None]  # [batch, block_size]
        at = (first[:, None] + piece).clamp(max=filled - 1)
        keys, values = (x[torch.arange(batch, device=q.device)[:, None], at][inside] for x in (k, v))
        position = (filled - q_len - first).to(torch.int32)
        here = Sequences(seqs.cu_seqlens_q, starts_of(length), q_len, block_size, position)
        wanted = (ids == (first // block_size)[row, None, None]).any(-1, keepdim=True)  # [total_q, index_heads, 1]
        more, more_lse = sparse_attention(q, keys, values, wanted.to(torch.int32) - 1, here, return_lse=True, **options)
        out, lse = _merged(out, lse, more, more_lse)
    return out, lse


def _real_runs(partial: Tensor, block_size: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the runs of True in ``[batch, filled]``, cut at block borders, the i-th of each row together: first slot and
    length, int64 ``[batch]`` each (length 0 where a row has fewer). It syncs with the host."""
    border = torch.arange(partial.shape[1], device=partial.device) % block_size == 0
    before = nn.functional.pad(partial, (1, 0))[:, :-1] & ~border
    after = nn.functional.pad(partial & ~border, (0, 1))[:, 1:]
    rows, firsts = (partial & ~before).nonzero(as_tuple=True)
    lengths = (partial & ~after).nonzero(as_tuple=True)[1] - firsts + 1
    counts = torch.bincount(rows, minlength=partial.shape[0])
    rank = torch.arange(rows.numel(), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    runs = []
    for i in range(int(counts.max()) if rows.numel() else 0):
        first, length = (torch.zeros_like(counts) for _ in range(2))
        first[rows[rank == i]], length[rows[rank == i]] = firsts[rank == i], lengths[rank == i]
        runs.append((first, length))
    return runs


def _merged(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two attentions over disjoint keys: ``[total_q, num_q_heads, head_dim]`` and lse ``[total_q, num_q_heads]``."""
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -torch.inf, 0)
    weight, more_weight = ((x - safe).exp()[..., None] for x in (lse, more_lse))
    return (out * weight + more * more_weight).to(out.dtype), total
