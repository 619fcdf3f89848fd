# SPDX-License-Identifier: MIT
"""A stand-in for vLLM: the names and signatures of 0.26 and 0.33 that `openmsa.integrations.vllm` touches, and an engine that
builds metadata, writes caches and runs sparse layers as vLLM's does, on a GPU where there is one. vLLM itself is not
installed."""

from __future__ import annotations

import logging
import types
from dataclasses import dataclass

import torch
from torch import nn

M3 = "vllm.models.minimax_m3"
DIM = PAGE = BLOCK = 128
ROTARY_DIM = 64
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
E4M3_NAMES = ("fp8", "fp8_e4m3")


def modules(version: int) -> dict[str, types.ModuleType]:
    """Returns new modules by their names, as they are in vLLM 0.26 or 0.33 (`version` 26 or 33)."""
    made: dict[str, types.ModuleType] = {}

    def module(name: str, **names: object) -> types.ModuleType:
        made[name] = types.ModuleType(name)
        made[name].__path__ = []  # type: ignore[attr-defined]
        vars(made[name]).update(names)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, made[name])
        return made[name]

    context = types.SimpleNamespace(attn_metadata=None, slot_mapping=None)

    class Registry:
        def __init__(self) -> None:
            self.models: dict[str, object] = {}

        def register_model(self, model_arch: str, model_cls: object) -> None:
            assert isinstance(model_cls, str), "a class would import the model before its configuration exists"
            assert len(model_cls.split(":")) == 2
            self.models[model_arch] = model_cls

    def has_device_capability(capability: int) -> bool:
        return capability <= 90

    module("vllm", ModelRegistry=Registry())
    module("vllm.logger", init_logger=logging.getLogger)
    module(
        "vllm.platforms",
        current_platform=types.SimpleNamespace(is_cuda=lambda: True, has_device_capability=has_device_capability),
    )
    module("vllm.forward_context", get_forward_context=lambda: context)
    for name in ("vllm.models", M3, f"{M3}.common", f"{M3}.nvidia"):
        module(name)
    indexer = module(f"{M3}.common.indexer", **_indexer(version))
    main = module(f"{M3}.common.sparse_attention", **_main(version))
    module(f"{M3}.nvidia.model", **_model(version, indexer, main, context))
    module(f"{M3}.nvidia.mtp", MiniMaxM3MTP=type("MiniMaxM3MTP", (made[f"{M3}.nvidia.model"].Stack,), {}))
    return made


class Norm(nn.Module):
    """Does what MiniMax-M3's norms do, and returns float32."""

    variance_epsilon = 1e-6

    def __init__(self, seed: int) -> None:
        super().__init__()
        weight = 0.2 * torch.randn(DIM, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight.bfloat16().to(DEVICE), requires_grad=False)

    def forward(self, x):
        x = x.float()
        return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * (1 + self.weight.float())


class Builder:
    """Does what both of vLLM's builders do when they are made."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device
        speculative = vllm_config.speculative_config
        if speculative is not None:
            self.reorder_batch_threshold = 1 + speculative.num_speculative_tokens

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise AssertionError("vLLM's own metadata must not be built")


def _indexer(version: int) -> dict[str, object]:
    class MiniMaxM3IndexerBackend:
        @staticmethod
        def get_name() -> str:
            return "MINIMAX_M3_SPARSE_INDEXER"

        @staticmethod
        def get_builder_cls():
            return MiniMaxM3IndexerMetadataBuilder

    class MiniMaxM3IndexerMetadataBuilder(Builder):
        pass

    class MiniMaxM3IndexerCache(nn.Module):
        def __init__(self, prefix, vllm_config, indexer_kv_dtype) -> None:
            super().__init__()
            self.kv_cache = torch.tensor([])
            self.prefix, self.indexer_kv_dtype, self.dtype = prefix, indexer_kv_dtype, torch.bfloat16
            self.backend_cls = MiniMaxM3IndexerBackend
            layers = vllm_config.compilation_config.static_forward_context
            assert prefix not in layers
            layers[prefix] = self

        def bind_kv_cache(self, kv_cache) -> None:
            self.kv_cache = kv_cache.squeeze(1) if version == 33 else kv_cache

        def get_attn_backend(self):
            return self.backend_cls

    class MiniMaxM3IndexerImpl(nn.Module):
        def __init__(self, *, sizes, prefix, vllm_config, indexer_kv_dtype) -> None:
            super().__init__()
            if indexer_kv_dtype != "bf16":
                raise NotImplementedError(f"indexer_kv_dtype={indexer_kv_dtype!r} is not supported by the Triton indexer impl.")
            self.num_index_heads, self.index_head_dim = sizes["kv_heads"], DIM
            self.topk_blocks, self.block_size = sizes["topk"], BLOCK
            self.init_blocks, self.local_blocks, self.score_type = 0, 1, sizes["score_type"]
            self.index_cache = MiniMaxM3IndexerCache(f"{prefix}.index_cache", vllm_config, indexer_kv_dtype)

    class MiniMaxM3Indexer(nn.Module):
        def __init__(self, **more) -> None:
            super().__init__()
            self.impl = MiniMaxM3IndexerImpl(**more)

        @property
        def index_cache(self):
            return self.impl.index_cache

        def forward(self, index_query):
            return self.impl(index_query)

    return {k: v for k, v in locals().items() if k.startswith("MiniMaxM3")}


def _main(version: int) -> dict[str, object]:
    class MiniMaxM3SparseBackend:
        @staticmethod
        def get_name() -> str:
            return "MINIMAX_M3_SPARSE"

        @staticmethod
        def get_builder_cls():
            return MiniMaxM3SparseMetadataBuilder

    class MiniMaxM3SparseMetadataBuilder(Builder):
        pass

    @dataclass
    class MiniMaxM3SparseMetadata:
        seq_lens: torch.Tensor
        max_seq_len: int
        slot_mapping: torch.Tensor
        num_actual_tokens: int
        num_decodes: int
        num_decode_tokens: int
        num_prefills: int
        num_prefill_tokens: int
        prefill: object = None
        decode: object = None

    class MiniMaxM3SparseImpl:
        def __init__(
            self, num_heads, head_size, scale, num_kv_heads=None, kv_cache_dtype="auto", *, topk_blocks, sparse_block_size
        ) -> None:
            self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
            self.kv_cache_dtype, self.topk_blocks, self.block_size = kv_cache_dtype, topk_blocks, sparse_block_size

    return {k: v for k, v in locals().items() if k.startswith("MiniMaxM3")}


def _model(version: int, indexer, main, context) -> dict[str, object]:
    class MiniMaxM3SparseAttention(nn.Module):
        def __init__(self, *, vllm_config, prefix) -> None:
            super().__init__()
            sizes = vllm_config.sizes
            self.num_heads, self.num_kv_heads, self.head_dim, self.scaling = sizes["heads"], sizes["kv_heads"], DIM, DIM**-0.5
            self.layer_name, self.kv_cache = f"{prefix}.attn", torch.tensor([])
            self.kv_cache_dtype = vllm_config.cache_config.cache_dtype
            self.indexer_kv_dtype = vllm_config.attention_config.indexer_kv_dtype
            if version == 33 and self.indexer_kv_dtype == "auto":
                self.indexer_kv_dtype = "bf16"
            for name in ("_k_scale", "_v_scale"):
                self.register_buffer(name, torch.tensor(1.0, device=DEVICE))
            self.attn_backend = main.MiniMaxM3SparseBackend
            self.impl = "vLLM's own"
            self.indexer = indexer.MiniMaxM3Indexer(
                sizes=sizes, prefix=self.layer_name, vllm_config=vllm_config, indexer_kv_dtype=self.indexer_kv_dtype
            )
            for seed, name in enumerate(("q_norm", "k_norm", "index_q_norm", "index_k_norm")):
                setattr(self, name, Norm(seed))
            angles = torch.arange(2048)[:, None] * 100.0 ** -torch.linspace(0, 1, ROTARY_DIM // 2)
            cos_sin = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
            self.rotary_emb = types.SimpleNamespace(cos_sin_cache=cos_sin.to(DEVICE), rotary_dim=ROTARY_DIM)
            self.qkv_proj = self.o_proj = lambda rows: (rows, None)
            self.prepared_by_vllm = 0  # steps whose new tokens vLLM's own code prepared
            vllm_config.compilation_config.static_forward_context[self.layer_name] = self

        def get_attn_backend(self):
            return self.attn_backend

        def bind_kv_cache(self, kv_cache) -> None:
            self.kv_cache = kv_cache

        def forward(self, positions, hidden_states):
            qkv, _ = self.qkv_proj(hidden_states)
            if not isinstance(context.slot_mapping, dict):
                return qkv.new_zeros(qkv.shape[0], self.num_heads * DIM)
            self.prepared_by_vllm += 1
            q, k, v, index_q, index_k = self.rows(positions, qkv)
            self._write(self.kv_cache, context.slot_mapping[self.layer_name], torch.cat([k, v], -1))
            cache = self.indexer.index_cache
            keys = cache.kv_cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache.kv_cache
            self._write(keys.unsqueeze(1), context.slot_mapping[cache.prefix], index_k)
            q, index_q = q.flatten(1).to(qkv.dtype), index_q.flatten(1).to(cache.dtype)
            output, _ = self.o_proj(self._run_attention(q, index_q, torch.empty_like(q)))
            return output

        def _run_attention(self, query, index_query, output):
            self.indexer(index_query)
            more = {"query_fp8": None} if version == 33 else {}
            return self.impl.forward(self, query, self.kv_cache, output.fill_(torch.nan), **more)

        def rows(self, positions, qkv):
            """Returns queries, keys, values, index queries and index keys ``[tokens, heads, dim]``, normalised and rotated, in
            float32."""
            heads, kv = self.num_heads, self.num_kv_heads
            parts = qkv.view(qkv.shape[0], -1, DIM).split([heads, kv, kv, kv, 1], 1)
            norms = (self.q_norm, self.k_norm, None, self.index_q_norm, self.index_k_norm)
            normed = (x.float() if norm is None else norm(x) for x, norm in zip(parts, norms, strict=True))
            return [x if norm is None else self._turned(x, positions) for x, norm in zip(normed, norms, strict=True)]

        def _turned(self, x, positions):
            cos, sin = self.rotary_emb.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
            a, b, rest = x.split([ROTARY_DIM // 2, ROTARY_DIM // 2, DIM - ROTARY_DIM], -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

        @staticmethod
        def _write(pool, slots, rows) -> None:
            """Writes rows ``[tokens, heads, dim]`` to slots of a pool ``[num_pages, heads, page_size, dim]``, bytes of E4M3 or
            plain."""
            held = slots >= 0
            rows = rows[: slots.numel()][held]
            if pool.dtype == torch.uint8:
                rows = rows.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            pool[slots[held] // PAGE, :, slots[held] % PAGE] = rows.to(pool.dtype)

    class Stack(nn.Module):
        """Stands for the models: sparse layers, one after the other."""

        def __init__(self, *, vllm_config, prefix="") -> None:
            super().__init__()
            names = [f"{prefix}layers.{i}.self_attn" for i in range(vllm_config.sizes["layers"])]
            self.layers = nn.ModuleList(MiniMaxM3SparseAttention(vllm_config=vllm_config, prefix=name) for name in names)

    class MiniMaxM3SparseForCausalLM(Stack):
        pass

    return {k: v for k, v in locals().items() if k.startswith("MiniMaxM3") or k == "Stack"}


def configuration(
    version: int,
    *,
    cache_dtype: str = "auto",
    index_dtype: str | None = None,
    speculative: int = 0,
    max_num_seqs: int = 8,
    **sizes: object,
) -> types.SimpleNamespace:
    """Returns the part of vLLM's configuration that is read. sizes: heads, kv_heads, topk, layers, score_type."""
    numbers = {"heads": 8, "kv_heads": 2, "topk": 4, "layers": 2, "score_type": "max"} | sizes
    name = types.SimpleNamespace
    return name(
        sizes=numbers,
        attention_config=name(indexer_kv_dtype=index_dtype or {26: "bf16", 33: "auto"}[version]),
        cache_config=name(cache_dtype=cache_dtype),
        compilation_config=name(static_forward_context={}, cudagraph_num_of_warmups=0),
        model_config=name(dtype=torch.bfloat16),
        parallel_config=name(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        scheduler_config=name(max_num_seqs=max_num_seqs),
        speculative_config=name(num_speculative_tokens=speculative) if speculative else None,
    )


class Engine:
    """Holds requests and caches, and runs steps of a model's sparse layers as vLLM does: decode requests first, metadata by the
    backends' builders once a step, one block table for both caches of a layer."""

    def __init__(self, version: int, made, model, config, *, layout: str = "HND", num_pages: int = 64) -> None:
        self.version, self.made, self.model, self.config = version, made, model, config
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.pages: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.max_pages = 16
        self.draw = torch.Generator().manual_seed(2)
        self.builders = {}
        for name, layer in config.compilation_config.static_forward_context.items():
            self._bind(name, layer, layout, num_pages)
            spec = types.SimpleNamespace(block_size=PAGE)
            self.builders[name] = layer.get_attn_backend().get_builder_cls()(spec, [name], config, DEVICE)

    def _bind(self, name: str, layer, layout: str, num_pages: int) -> None:
        if name.endswith("index_cache"):
            shape = (num_pages, 1, PAGE, DIM) if self.version == 33 else (num_pages, PAGE, DIM)
            layer.bind_kv_cache(torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE).to(layer.dtype))
            return
        heads = self.config.sizes["kv_heads"]
        dtype = torch.uint8 if self.config.cache_config.cache_dtype in E4M3_NAMES else torch.bfloat16
        if layout == "HND":
            layer.bind_kv_cache(torch.zeros(num_pages, heads, PAGE, 2 * DIM, dtype=dtype, device=DEVICE))
        else:
            layer.bind_kv_cache(torch.zeros(num_pages, PAGE, heads, 2 * DIM, dtype=dtype, device=DEVICE).transpose(1, 2))

    def share_prefix(self, request: str, of: str, tokens: int) -> None:
        """Starts a request whose first full pages are those of another one."""
        self.pages[request] = self.pages[of][: tokens // PAGE]
        self.lengths[request] = tokens

    def step(self, new: dict[str, int], pad_to: int | None = None) -> list[tuple]:
        """Runs `new` tokens of each request, in the given order, through all layers; pad_to: requests of a padded graph batch.
        Returns for each layer its queries, index queries and outputs, ``[tokens, heads, dim]``."""
        common = self._common(new, pad_to)
        sizes, outputs = self.config.sizes, []
        context = self.made["vllm.forward_context"].get_forward_context()
        context.attn_metadata = {name: builder.build(0, common) for name, builder in self.builders.items()}
        context.slot_mapping = dict.fromkeys(self.builders, common.slot_mapping)
        heads, kv = sizes["heads"], sizes["kv_heads"]
        for layer in self.model.layers:
            total = common.num_actual_tokens + (0 if pad_to else 3)  # eager steps are padded behind their last token
            qkv = torch.randn(total, (heads + 3 * kv + 1) * DIM, generator=self.draw).bfloat16().to(DEVICE)
            positions = torch.nn.functional.pad(common.positions, (0, total - common.positions.numel()))
            q, _, _, index_q, _ = layer.rows(positions, qkv)
            out = layer(positions=positions, hidden_states=qkv)
            outputs.append((q.to(qkv.dtype), index_q.to(layer.indexer.index_cache.dtype), out.view(-1, heads, DIM)))
        return outputs

    def _common(self, new: dict[str, int], pad_to: int | None):
        for request, count in new.items():
            pages = self.pages.setdefault(request, [])
            self.lengths[request] = self.lengths.get(request, 0) + count
            while len(pages) * PAGE < self.lengths[request]:
                pages.append(self.free.pop())
        counts = list(new.values()) + [0] * ((pad_to or len(new)) - len(new))
        table = torch.zeros(len(counts), self.max_pages, dtype=torch.int32)
        slots, positions = [], []
        for row, (request, count) in enumerate(new.items()):
            pages, end = self.pages[request], self.lengths[request]
            table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            positions += range(end - count, end)
            slots += [pages[at // PAGE] * PAGE + at % PAGE for at in range(end - count, end)]
        lens = [self.lengths[request] for request in new] + [0] * (len(counts) - len(new))
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        tokens = max(counts) * len(counts) if pad_to else len(slots)
        return types.SimpleNamespace(
            query_start_loc=starts.to(DEVICE),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=DEVICE),
            seq_lens_cpu_upper_bound=torch.tensor(lens, dtype=torch.int32),
            num_reqs=len(counts),
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=max(lens),
            block_table_tensor=table.to(DEVICE),
            positions=torch.tensor(positions, device=DEVICE),
            slot_mapping=torch.tensor(slots + [-1] * (tokens - len(slots)), device=DEVICE),
        )
