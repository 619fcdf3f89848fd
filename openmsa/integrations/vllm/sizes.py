# SPDX-License-Identifier: MIT
"""`sizes_of` reads what plans must know of a sparse layer of vLLM; `refusal` says which engines and layers are not served."""

from __future__ import annotations

from typing import Any

from openmsa.integrations.sizes import LayerSizes

E4M3_NAMES = ("fp8", "fp8_e4m3")
"""vLLM's names of an E4M3 cache."""
KV_DTYPES = ("auto", "bfloat16", "float16", *E4M3_NAMES)
"""The main cache may be one of these (``--kv-cache-dtype``)."""
INDEX_DTYPES = ("bf16", *E4M3_NAMES)
"""The index cache may be one of these (``--attention-config.indexer_kv_dtype``)."""


def sizes_of(layer: Any) -> LayerSizes:
    """Reads the sizes of vLLM's `MiniMaxM3SparseAttention` as its constructor left it."""
    indexer = layer.indexer.impl
    return LayerSizes(
        num_q_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        index_heads=indexer.num_index_heads,
        index_dim=indexer.index_head_dim,
        topk=indexer.topk_blocks,
        block_size=indexer.block_size,
        init_blocks=indexer.init_blocks,
        local_blocks=indexer.local_blocks,
        softmax_scale=layer.scaling,
    )


def refusal(layer: Any, vllm_config: Any, index_dtype: str) -> str | None:
    """Says in a sentence why a sparse layer cannot be served as it is configured; returns None where it can.

    layer: vLLM's `MiniMaxM3SparseAttention`. index_dtype: the index cache that was asked for.
    """
    if layer.kv_cache_dtype not in KV_DTYPES:
        return f"kv_cache_dtype must be one of {KV_DTYPES}, got {layer.kv_cache_dtype!r}"
    if index_dtype not in INDEX_DTYPES:
        return f"attention_config.indexer_kv_dtype must be one of {INDEX_DTYPES}, got {index_dtype!r}"
    score_type = layer.indexer.impl.score_type
    if score_type != "max":
        return f"sparse_score_type must be 'max', which a block's score is here, got {score_type!r}"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(vllm_config.parallel_config, name, 1)
        if size > 1:
            return f"{name} must be 1, since a selection needs all keys of a sequence, got {size}"
    speculative = vllm_config.speculative_config
    drafts = (speculative.num_speculative_tokens or 0) if speculative is not None else 0
    sizes = sizes_of(layer)
    if drafts > sizes.most_drafts:
        heads = sizes.index_heads
        return f"num_speculative_tokens must be at most {sizes.most_drafts} with {heads} index heads a rank, got {drafts}"
    return None
