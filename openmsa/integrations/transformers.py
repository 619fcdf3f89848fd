# SPDX-License-Identifier: MIT
"""This module makes MSA an attention implementation of Hugging Face transformers, for any causal GQA model that reads its
attention from `AttentionInterface`:

    register("openmsa", topk=16, block_size=128)
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="openmsa")

or, for a model that is loaded already, ``model.set_attn_implementation("openmsa")``. The model's weights and cache stay as
they are; only the attention between its projections changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from openmsa.attention import msa_attention
from openmsa.block_topk import STAGE as SELECTION
from openmsa.inputs import check_counts
from openmsa.integrations.autocast import lowered
from openmsa.integrations.padding import real_first, real_lengths, real_tokens, refuse_packed, static_mask
from openmsa.runtime.dispatch import check_name
from openmsa.sparse_attention import STAGE as ATTENTION
from openmsa.types import Sequences

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import causal_mask_function
except ImportError as error:
    raise ImportError(
        "openmsa.integrations.transformers needs transformers 5.10 or newer: pip install 'openmsa[demo]'"
    ) from error

# A model may hand these to its attention function, and they would change the result; every other keyword is ignored.
UNSUPPORTED = {
    "dropout": "attention dropout",
    "sliding_window": "a sliding window",
    "softcap": "soft-capped logits",
    "position_bias": "a position bias",
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "block_indices": "blocks that the model selects itself",
    "indices": "keys that the model selects itself",
    "head_mask": "a head mask",
    "cache": "the paged cache of continuous batching",
    "cu_seq_lens_q": "sequences packed by cu_seq_lens",
    "output_attentions": "attention weights as an output",
}


class PackedAttention(Protocol):
    """Computes causal attention over packed sequences: q ``[total_q, num_q_heads, head_dim]``, k and v ``[total_k,
    num_kv_heads, head_dim]``, where each sequence's queries are its last positions; the result has q's shape. `module` is the
    model's attention layer (``module.layer_idx`` is its number)."""

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        """Computes the attention that the class describes."""
        ...


Index = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


def group_mean_index(module: nn.Module, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Gives an index branch without training: the index query is the mean of a group's queries, the index key is its key.

    q ``[total_q, num_q_heads, head_dim]``, k ``[total_k, num_kv_heads, head_dim]``, both as the model attends with them
    (after its position embedding). Returns index_q ``[total_q, num_kv_heads, head_dim]`` and index_k, which is k.
    """
    q, k = q.detach(), k.detach()  # a selection has no derivative
    return q.unflatten(1, (k.shape[1], -1)).mean(2), k


def register(
    name: str = "openmsa",
    *,
    topk: int = 16,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    index: Index = group_mean_index,
    impl: str = "auto",
) -> None:
    """Registers `openmsa.msa_attention` under `name` with transformers' `AttentionInterface`.

    name:   its name in ``attn_implementation=``; registering a name again replaces it for every model that uses it.
    topk, block_size, init_blocks, local_blocks, impl: as in `openmsa.msa_attention`.
    index:  ``index(module, q, k) -> index_q, index_k`` on packed tensors, detached where autograd records; the default needs no
            trained weights.

    It serves prefill and decode with any of transformers' caches, batches, and left or right padding given as a 2D
    ``attention_mask``; blocks are counted from each sequence's first real token, so padding changes no result. Padding
    rows give 0. With a model or call that needs anything else (sliding windows, 4D masks, packed ``position_ids``,
    bidirectional attention, dropout, attention weights as an output), the forward raises NotImplementedError, which names it.
    Raises ValueError or TypeError for settings that `msa_attention` would refuse.
    """
    check_counts(topk, block_size, init_blocks, local_blocks)
    check_name(impl, SELECTION, ATTENTION)
    if not callable(index):
        raise TypeError(f"index must be a function of (module, q, k), got {type(index).__name__}")

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float) -> Tensor:
        index_q, index_k = index(module, q, k)
        return msa_attention(
            q,
            k,
            v,
            index_q,
            index_k,
            topk,
            seqs,
            block_size=block_size,
            init_blocks=init_blocks,
            local_blocks=local_blocks,
            softmax_scale=softmax_scale,
            impl=impl,
        )

    register_packed(name, attend)


def register_packed(name: str, attend: PackedAttention) -> None:
    """Registers any causal attention over packed sequences under `name`, as `register` does with `msa_attention`.

    It serves and refuses what `register` does. A sequence's keys are those that the model's cache hands over.
    """
    register_forward(name, packed_forward(name, attend))


def register_forward(name: str, forward: Callable[..., tuple[Tensor, Tensor | None]]) -> None:
    """Registers ``forward(module, query, key, value, attention_mask, ...)`` under `name`, with masks by `padding_mask`."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, as attn_implementation= takes it, got {type(name).__name__}")
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, padding_mask(name))


def packed_forward(name: str, attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """Wraps `attend`, a `PackedAttention`, as a function of transformers' `AttentionInterface`, which `name` stands for in its
    errors. Where a layer hands over `msa_index`, ``attend`` gets its index_q and index_k too, packed as q and k."""

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        msa_index: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        # query [batch, num_q_heads, q_len, head_dim], key and value [batch, num_kv_heads, k_len, head_dim]
        # msa_index: [batch, index_heads, q_len, index_dim] and [batch, index_key_heads, k_len, index_dim]
        refuse_unsupported(name, module, attention_mask, is_causal, kwargs)
        q_len, k_len, number = query.shape[2], key.shape[2], getattr(module, "layer_idx", 0)
        refuse_packed(name, number, kwargs.get("position_ids"), q_len, k_len - q_len, attention_mask)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        index_query, index_key = ((), ()) if msa_index is None else (msa_index[:1], msa_index[1:])
        queries = [x.transpose(1, 2) for x in lowered(query, *index_query)]  # [batch, length, heads, head_dim]
        keys = [x.transpose(1, 2) for x in lowered(key, value, *index_key)]
        if attention_mask is None:
            seqs = equal_lengths(query.shape[0], q_len, k_len, query.device)
            q, *index_q = (x.flatten(0, 1) for x in queries)
            k, v, *index_k = (x.flatten(0, 1) for x in keys)
            return attend(module, q, k, v, seqs, scale, *index_q, *index_k).reshape(queries[0].shape), None
        q_real, k_real = real_tokens(attention_mask, q_len, k_len)
        seqs = real_lengths(q_real, k_real)
        q_rows, k_rows = real_first(q_real), real_first(k_real)
        q, *index_q = (x[q_rows].flatten(0, 1) for x in queries)
        k, v, *index_k = (x[k_rows].flatten(0, 1) for x in keys)
        found = attend(module, q, k, v, seqs, scale, *index_q, *index_k)
        out = torch.empty_like(queries[0], memory_format=torch.contiguous_format)  # [batch, q_len, num_q_heads, head_dim]
        out[q_rows] = found.view(out.shape)
        return out, None

    return forward


def padding_mask(name: str) -> Callable[..., Tensor | None]:
    """Returns the function that prepares the mask of attention `name`: None where every key is real, else a 2D mask."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] = causal_mask_function,
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> Tensor | None:
        """Returns None where every token is real and no key lies behind the queries, else bool ``[batch, filled]``, True at
        real tokens, whose last q_length columns are the queries'. In a traced graph, where a static cache's `q_offset` is a
        tensor, it is ``[batch, kv_length + q_length]``: the keys' columns, those behind the queries False, then the queries'.
        """
        if mask_function is not causal_mask_function or kv_offset:
            _refuse(
                name,
                "a mask other than causal (a sliding window, chunks, packed position_ids, or bidirectional attention; a traced "
                "graph without attention_mask and cache counts as packed)",
            )
        traced = torch.compiler.is_compiling()
        if traced and isinstance(q_offset, Tensor):
            return static_mask(batch_size, q_length, kv_length, q_offset, attention_mask)
        filled = int(q_offset) + q_length  # A static cache hands over more keys than it holds.
        if filled > kv_length:
            _refuse(name, f"a cache that hands over {kv_length} keys for {filled} tokens")
        if attention_mask is None:
            whole = filled == kv_length
            return None if whole else torch.ones(batch_size, filled, dtype=torch.bool, device=device)
        if attention_mask.shape[1] < filled:
            raise ValueError(
                f"attention_mask must cover {filled} tokens (cached and new), got shape {tuple(attention_mask.shape)}"
            )
        attention_mask = attention_mask[:, :filled].bool()
        return None if not traced and filled == kv_length and bool(attention_mask.all()) else attention_mask

    return mask


def _refuse(name: str, what: str) -> NoReturn:
    raise NotImplementedError(f"attention {name!r} cannot serve {what}; it serves causal attention with or without padding")


def refuse_unsupported(
    name: str, module: nn.Module, attention_mask: Tensor | None, is_causal: bool | None, kwargs: dict[str, Any]
) -> None:
    """Raises NotImplementedError for what would change the result and is not served."""
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _refuse(name, "bidirectional attention (is_causal=False)")
    if attention_mask is not None and attention_mask.dim() != 2:
        _refuse(name, f"an attention_mask of shape {tuple(attention_mask.shape)}: only 2D padding masks")
    for key, what in UNSUPPORTED.items():
        value = kwargs.get(key)
        if value is not None and (isinstance(value, Tensor) or value):
            _refuse(name, f"{what} ({key})")


def equal_lengths(batch: int, q_len: int, k_len: int, device: torch.device) -> Sequences:
    """Returns the lengths of `batch` sequences of q_len queries and k_len keys each."""
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Sequences(starts * q_len, starts * k_len, q_len, k_len)
