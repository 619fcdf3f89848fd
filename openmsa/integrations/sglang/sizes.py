# SPDX-License-Identifier: MIT
"""`sizes_of` reads what plans must know of SGLang's sparse layers; `refusal` says which servers are not served."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from sglang.srt.configs.model_config import (
    get_minimax_sparse_attention_config,
    get_minimax_sparse_disable_value_layer_ids,
    get_minimax_sparse_layer_ids,
    get_minimax_sparse_score_type,
)
from sglang.srt.layers.moe.utils import is_tbo_enabled
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

from openmsa.integrations.sizes import LayerSizes

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Either cache may be of these."""
CHAINS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""SGLang's speculative algorithms that draft a chain of tokens where ``--speculative-eagle-topk`` is 1."""
LEAST_PAGE = 16

_runtime = importlib.import_module("sglang.srt.runtime_context")


def speculation(runner: Any) -> Any:
    """Returns what holds ``speculative_algorithm``, ``speculative_eagle_topk`` and ``speculative_num_draft_tokens``: a part of
    SGLang's context (0.5.23), or the server's arguments (0.5.16)."""
    return _runtime.get_spec() if hasattr(_runtime, "get_spec") else runner.server_args


def sparse_config(runner: Any) -> dict[str, Any]:
    """Returns ``sparse_attention_config`` of the model."""
    return get_minimax_sparse_attention_config(runner.model_config.hf_config)


def sizes_of(runner: Any) -> LayerSizes:
    """Reads a rank's share of the sparse layers from SGLang's `ModelRunner`, whose pools exist."""
    config, main = sparse_config(runner), runner.token_to_kv_pool.main_pool
    ranks = _runtime.get_parallel().attn_tp_size
    heads = config["sparse_num_index_heads"]
    return LayerSizes(
        num_q_heads=runner.model_config.num_attention_heads // ranks,
        num_kv_heads=main.head_num,
        head_dim=main.head_dim,
        index_heads=heads // min(ranks, heads),
        index_dim=config["sparse_index_dim"],
        topk=config["sparse_topk_blocks"],
        block_size=config["sparse_block_size"],
        init_blocks=_forced(config, "init", 0),
        local_blocks=_forced(config, "local", 1),  # The block of a query counts beside those that tokens before it fill.
        softmax_scale=main.head_dim**-0.5,
    )


def _forced(config: dict[str, Any], name: str, own: int) -> int:
    """Returns how many blocks are always selected, which a configuration gives in blocks, or in tokens beside `own` blocks."""
    if f"sparse_{name}_block" in config:
        return int(config[f"sparse_{name}_block"])
    return -(-int(config[f"sparse_{name}_tokens"]) // config["sparse_block_size"]) + own


def refusal(runner: Any) -> str | None:
    """Says in a sentence why the sparse layers of a server cannot be served; returns None where they can."""
    if not torch.cuda.is_available() or torch.version.hip or torch.cuda.get_device_capability() < (8, 0):
        return "it needs an NVIDIA GPU of compute capability 8.0 or higher"
    return _refused_cache(runner) or _refused_model(runner) or _refused_drafts(runner) or _refused_server(runner)


def _refused_cache(runner: Any) -> str | None:
    pool = runner.token_to_kv_pool
    if type(pool) is not MiniMaxSparseKVPool:
        return f"the KV pool must be SGLang's MiniMaxSparseKVPool, got {type(pool).__name__}"
    if getattr(runner, "hisparse_coordinator", None) is not None:
        return "HiSparse must be off, since it keeps selected blocks apart from their pages"
    for name, part in (("KV", pool.main_pool), ("index", pool.index_k_pool)):
        if part is not None and part.dtype not in CACHE_DTYPES:
            return f"the {name} cache must be of {', '.join(map(str, CACHE_DTYPES))}, got {part.dtype}"
    if getattr(pool.main_pool, "is_quantized_kv_cache", False):
        return "the KV cache must be plain or E4M3 with one scale a layer, got one with scales of its own"
    layout = getattr(pool.main_pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        return f"the layout of the KV cache must be 'nhd', got {layout!r}"
    page, block = pool.page_size, sparse_config(runner)["sparse_block_size"]
    if page < LEAST_PAGE or (page % block and block % page):
        return f"--page-size must divide {block} or be a multiple of it, and be at least {LEAST_PAGE}, got {page}; 128 is best"
    return None


def _refused_model(runner: Any) -> str | None:
    config, sizes = sparse_config(runner), sizes_of(runner)
    score_type = get_minimax_sparse_score_type(config)
    if score_type != "max":
        return f"sparse_score_type must be 'max', which a block's score is here, got {score_type!r}"
    valued = set(get_minimax_sparse_layer_ids(config)[1]) - set(get_minimax_sparse_disable_value_layer_ids(config))
    if valued:
        return f"sparse_disable_index_value must be set for all sparse layers, it is not for {sorted(valued)}"
    if sizes.index_heads not in (1, sizes.num_kv_heads):
        return f"a rank's index heads must be 1 or its {sizes.num_kv_heads} KV heads, got {sizes.index_heads}"
    return None


def _refused_drafts(runner: Any) -> str | None:
    drafts, sizes = speculation(runner), sizes_of(runner)
    algorithm = drafts.speculative_algorithm
    if algorithm is None:
        return None
    if str(algorithm).upper() not in CHAINS or (drafts.speculative_eagle_topk or 1) != 1:
        return (
            f"drafts must be chains: --speculative-algorithm one of {CHAINS} with --speculative-eagle-topk 1, "
            f"got {algorithm} and {drafts.speculative_eagle_topk}"
        )
    count = drafts.speculative_num_draft_tokens or 1
    if count > sizes.most_drafts + 1:
        most, heads = sizes.most_drafts + 1, sizes.index_heads
        return f"--speculative-num-draft-tokens must be at most {most} with {heads} index heads a rank, got {count}"
    return None


def _refused_server(runner: Any) -> str | None:
    if is_tbo_enabled():
        return "--enable-two-batch-overlap must be off, since a plan serves one whole batch"
    parallel = _runtime.get_parallel()
    # Where SGLang has `attn_dcp_size`, its `dcp_size` fails an assertion in servers without such ranks.
    for name in ("attn_cp_size", "attn_dcp_size" if hasattr(parallel, "attn_dcp_size") else "dcp_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} must be 1, since a selection needs all keys of a sequence, got {size}"
    return None
