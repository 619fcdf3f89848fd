# SPDX-License-Identifier: MIT
"""These are vLLM's MiniMax-M3 models with this library's attention in their sparse layers. vLLM imports this file as it imports
its own model: in a subprocess that asks what it can do, and, once the configuration stands, where the model runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention, MiniMaxM3SparseForCausalLM
from vllm.models.minimax_m3.nvidia.mtp import MiniMaxM3MTP as VllmMTP
from vllm.platforms import current_platform

from openmsa.integrations.new_tokens import Caches, Norms, Places, prepare, serves
from openmsa.integrations.vllm.backend import OpenMSABackend, OpenMSAIndexBackend, Step
from openmsa.integrations.vllm.layers import OpenMSAAttention, OpenMSAIndexer
from openmsa.integrations.vllm.sizes import E4M3_NAMES, refusal, sizes_of

logger = init_logger("vllm.openmsa")  # vLLM shows the loggers below its own name.


class _Served:
    """Stands before a model of vLLM: constructs it and serves its sparse layers."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with _plain_index_cache(vllm_config.attention_config) as index_dtype:
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        serve(self, vllm_config, index_dtype)


class MiniMaxM3ForCausalLM(_Served, MiniMaxM3SparseForCausalLM):
    """This is vLLM's text model of MiniMax-M3 with sparse layers that this library serves."""


class MiniMaxM3MTP(_Served, VllmMTP):
    """This is vLLM's drafter of MiniMax-M3 with sparse layers that this library serves."""


class SparseLayer(MiniMaxM3SparseAttention):
    """This is vLLM's sparse layer. A kernel behind which plans start early prepares the new tokens of its decode steps. Steps
    with prompts gain nothing by that, and keep vLLM's own."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        step = Step.current(self.layer_name)
        if step is None or step.prompts is not None:
            output: Tensor = super().forward(positions, hidden_states)
            return output
        slots, index_cache = get_forward_context().slot_mapping, self.indexer.index_cache
        qkv, _ = self.qkv_proj(hidden_states)
        q, index_q = prepare(
            qkv,
            Norms(self.q_norm.weight, self.k_norm.weight, self.index_q_norm.weight, self.index_k_norm.weight),
            self.q_norm.variance_epsilon,
            Places(positions, self.rotary_emb.cos_sin_cache, slots[self.layer_name], slots[index_cache.prefix]),
            Caches(self.kv_cache, index_cache.kv_cache.flatten(1, -2)),
            self.openmsa_sizes,
            index_cache.dtype,
        )
        output, _ = self.o_proj(self._run_attention(q, index_q, torch.empty_like(q)))
        return output


@contextlib.contextmanager
def _plain_index_cache(attention_config: Any) -> Iterator[str]:
    """Gives the dtype of the index cache that is asked for, and has vLLM's constructors see a plain one meanwhile: they refuse
    an E4M3 one where their own kernels lack it, and `serve` makes it E4M3 afterwards."""
    asked = attention_config.indexer_kv_dtype
    if asked in E4M3_NAMES:
        attention_config.indexer_kv_dtype = "bf16"
    try:
        yield "bf16" if asked == "auto" else asked
    finally:
        attention_config.indexer_kv_dtype = asked


def serve(model: Any, vllm_config: Any, index_dtype: str) -> None:
    """Gives each sparse layer of a constructed model this library's backends and implementations, and logs which.

    index_dtype: the dtype of the index cache, by its name in vLLM.
    Raises NotImplementedError, before any layer is changed, where one cannot be served.
    """
    if not current_platform.is_cuda() or not current_platform.has_device_capability(80):
        raise NotImplementedError("OpenMSA serves vLLM on NVIDIA GPUs of compute capability 8.0 or higher only")
    layers = [module for module in model.modules() if isinstance(module, MiniMaxM3SparseAttention)]
    for layer in layers:
        if reason := refusal(layer, vllm_config, index_dtype):
            raise NotImplementedError(f"OpenMSA cannot serve {layer.layer_name}: {reason}")
    for layer in layers:
        _give(layer, index_dtype)
    if layers:
        # A run before each capture loads the kernels, and has plans record their launches, outside of it.
        compilation = vllm_config.compilation_config
        compilation.cudagraph_num_of_warmups = max(1, compilation.cudagraph_num_of_warmups)
        sizes = layers[0].openmsa_sizes
        logger.info(
            "OpenMSA serves the %d sparse layers of %s: prompts with AttentionPlan, decode with DecodePlan (Triton kernels; "
            "%d query and %d KV heads a rank, KV cache %s, index cache %s). The kernels that vLLM named for them do not run.",
            *(len(layers), type(model).__name__, sizes.num_q_heads, sizes.num_kv_heads),
            *(layers[0].kv_cache_dtype, index_dtype),
        )


def _give(layer: Any, index_dtype: str) -> None:
    """Gives one layer its backends and implementations. The cache that vLLM registered for its index keys stays, with another
    backend and dtype: vLLM reads both when it allocates caches, after all models are made."""
    sizes = sizes_of(layer)
    layer.openmsa_sizes = sizes
    if serves(sizes, layer.rotary_emb.rotary_dim):
        layer.__class__ = SparseLayer  # vLLM's constructors make no other class of layers.
    layer.attn_backend = OpenMSABackend
    layer.impl = OpenMSAAttention(sizes, layer.kv_cache_dtype)
    cache = layer.indexer.index_cache
    cache.openmsa_sizes = sizes
    cache.backend_cls = OpenMSAIndexBackend
    cache.indexer_kv_dtype = layer.indexer_kv_dtype = index_dtype
    cache.dtype = torch.float8_e4m3fn if index_dtype in E4M3_NAMES else torch.bfloat16
    layer.indexer.impl = OpenMSAIndexer(layer.indexer.impl, layer.layer_name, sizes)
