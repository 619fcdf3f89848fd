# SPDX-License-Identifier: MIT
"""vLLM asks an attention backend for its metadata builder once a cache group, and the builder for metadata once a step. Here
both caches of a sparse layer, keys and values and index keys, have such a backend, and their metadata is a `Step`.

vLLM puts decode requests first. The leading requests with one common number of new tokens, at most that of a verified draft,
are the decode rows: a `DecodePlan` of the builder serves them, whose buffers stay, so that a CUDA graph can hold the run. All
other requests, prompts and chunks of prompts, are served by an `AttentionPlan`, made once a step for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.models.minimax_m3.common.indexer import MiniMaxM3IndexerBackend, MiniMaxM3IndexerMetadataBuilder
from vllm.models.minimax_m3.common.sparse_attention import (
    MiniMaxM3SparseBackend,
    MiniMaxM3SparseMetadata,
    MiniMaxM3SparseMetadataBuilder,
)

from openmsa import AttentionPlan, DecodePlan
from openmsa.integrations.sizes import LayerSizes
from openmsa.integrations.vllm.sizes import KV_DTYPES


@dataclass(kw_only=True)
class Prompts:
    """Holds the requests of a step that are not decode rows, and their plan, which the first layer makes.

    cu_seqlens_q:  int32 ``[requests + 1]``, from 0. seq_lens: int32 ``[requests]``, new tokens counted.
    page_table:    int32 ``[requests, max_pages]``.
    longest_q, longest_k, total_q:  the most new tokens of a request, a bound on its keys, and all new tokens.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_table: Tensor
    longest_q: int
    longest_k: int
    total_q: int
    page_size: int
    sizes: LayerSizes
    _plan: AttentionPlan | None = field(default=None, repr=False)

    @property
    def plan(self) -> AttentionPlan:
        if self._plan is None:
            self._plan = self.sizes.prompts(
                self.cu_seqlens_q,
                self.seq_lens,
                self.page_table,
                longest_q=self.longest_q,
                longest_k=self.longest_k,
                total_q=self.total_q,
                page=self.page_size,
            )
        return self._plan


@dataclass(kw_only=True)
class DecodeRows:
    """Holds the decode rows of a step: the table and lengths of their requests, and for the main cache the plan that serves
    them."""

    new_tokens: int
    page_table: Tensor  # int32 [requests, max_pages]
    seq_lens: Tensor  # int32 [requests]; 0 pads a graph's batch
    plan: DecodePlan | None = None


@dataclass
class Step(MiniMaxM3SparseMetadata):
    """Adds to vLLM's counts who serves the decode rows, ``[:num_decode_tokens]``, and the tokens behind them."""

    decode_rows: DecodeRows | None = None
    prompts: Prompts | None = None

    @classmethod
    def current(cls, layer_name: str) -> Step | None:
        """Returns this forward's step of a layer's cache; None in vLLM's profiling run, which has no caches yet."""
        every = get_forward_context().attn_metadata
        return every[layer_name] if isinstance(every, dict) else None


def decode_requests(lengths: Tensor, most: int, total: int) -> tuple[int, int]:
    """Returns how many leading requests are decode rows, and how many new tokens each of them has.

    lengths: int ``[requests]`` on a CPU, new tokens of each request. most: new tokens that a decode row may have.
    total:   tokens of the batch. Requests without tokens behind all others pad a graph's batch: they are decode rows where
             `total` counts tokens for them.
    """
    counts = lengths.tolist()
    new = counts[0] if counts else 0
    if not 0 < new <= most:
        return 0, 0
    same = next((i for i, count in enumerate(counts) if count != new), len(counts))
    if not any(counts[same:]) and total == len(counts) * new:
        same = len(counts)
    return same, new


class _StepBuilder:
    """Builds a `Step`. It stands before vLLM's builder of either cache, which says how CUDA graphs and drafts are treated."""

    kv_cache_spec: Any
    layer_names: list[str]
    vllm_config: Any
    device: torch.device
    reorder_batch_threshold: int | None

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        layers = vllm_config.compilation_config.static_forward_context
        found = {layers[name].openmsa_sizes for name in layer_names}
        if len(found) != 1:
            raise NotImplementedError(f"all sparse layers of a cache group must have the same sizes, got {found}")
        self._sizes: LayerSizes = found.pop()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """Returns the step's metadata. It reads no tensor of the device."""
        common = common_attn_metadata
        starts, table = common.query_start_loc_cpu, common.block_table_tensor
        lengths = starts.diff()
        decodes, new = decode_requests(lengths, self.reorder_batch_threshold or 1, common.num_actual_tokens)
        decode_tokens, real_tokens = decodes * new, int(starts[-1])
        rows = prompts = None
        if decodes:
            rows = DecodeRows(new_tokens=new, page_table=table[:decodes], seq_lens=common.seq_lens[:decodes])
        if real_tokens > decode_tokens:
            bounds, first = common.seq_lens_cpu_upper_bound, common.query_start_loc[decodes:]
            prompts = Prompts(
                cu_seqlens_q=first - decode_tokens if decode_tokens else first,
                seq_lens=common.seq_lens[decodes:],
                page_table=table[decodes:],
                longest_q=int(lengths[decodes:].max()),
                longest_k=int(common.max_seq_len if bounds is None else bounds[decodes:].max()),
                total_q=real_tokens - decode_tokens,
                page_size=self.kv_cache_spec.block_size,
                sizes=self._sizes,
            )
        return Step(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=common.num_reqs - decodes,
            num_prefill_tokens=common.num_actual_tokens - decode_tokens,
            decode_rows=rows,
            prompts=prompts,
        )


class OpenMSAMetadataBuilder(_StepBuilder, MiniMaxM3SparseMetadataBuilder):
    """Builds the steps of the main cache, and owns the plans of decode rows."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._decode_plans: dict[tuple[int, int], DecodePlan] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if step.decode_rows is not None:
            step.decode_rows.plan = self._decode_plan(step.decode_rows.new_tokens, step.decode_rows.page_table.shape[1])
        return step

    def _decode_plan(self, new_tokens: int, max_pages: int) -> DecodePlan:
        """Returns the plan of so many new tokens a request. Plans stay, since graphs hold addresses of their buffers."""
        key = (new_tokens, max_pages)
        if key not in self._decode_plans:
            self._decode_plans[key] = self._sizes.decode(
                most=self.vllm_config.scheduler_config.max_num_seqs,
                new_tokens=new_tokens,
                max_pages=max_pages,
                page=self.kv_cache_spec.block_size,
                dtype=self.vllm_config.model_config.dtype,
                device=self.device,
            )
        return self._decode_plans[key]


class OpenMSAIndexMetadataBuilder(_StepBuilder, MiniMaxM3IndexerMetadataBuilder):
    """Builds the steps of the index cache. vLLM keeps both caches behind one block table; nothing here relies on that."""


class OpenMSABackend(MiniMaxM3SparseBackend):
    """This is the main cache's backend. Its layout is vLLM's, in any order of the dimensions in memory."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        return "MINIMAX_M3_OPENMSA"

    @staticmethod
    def get_builder_cls() -> type[OpenMSAMetadataBuilder]:
        return OpenMSAMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Says (0.33) that drafts may not be shortened on the device: decode rows have equally many tokens."""
        return False


class OpenMSAIndexBackend(MiniMaxM3IndexerBackend):
    """This is the index cache's backend."""

    @staticmethod
    def get_name() -> str:
        return "MINIMAX_M3_INDEXER_OPENMSA"

    @staticmethod
    def get_builder_cls() -> type[OpenMSAIndexMetadataBuilder]:
        return OpenMSAIndexMetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Says the same as `OpenMSABackend`."""
        return False
