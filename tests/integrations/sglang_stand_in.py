# SPDX-License-Identifier: MIT
"""A stand-in for SGLang: the names and signatures of 0.5.16 and 0.5.23 that `openmsa.integrations.sglang` touches, and an
engine that keeps slots, writes caches and runs sparse layers on a CPU as SGLang's does. SGLang itself is not installed."""

from __future__ import annotations

import enum
import sys
import types
from enum import IntEnum, auto

import torch

DIM = BLOCK = 128
NAMES = (
    *("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.configs", "sglang.srt.layers", "sglang.srt.layers.moe"),
    *("sglang.srt.layers.attention", "sglang.srt.mem_cache"),
)


class HookType(enum.Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


class ForwardMode(IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DRAFT_EXTEND_V2 = auto(), auto(), auto(), auto(), auto(), auto()

    def is_extend(self, include_draft_extend_v2=False):
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_target_verify(self):
        return self == ForwardMode.TARGET_VERIFY


def modules(version: int) -> dict[str, types.ModuleType]:
    """Returns new modules by their names, as they are in SGLang 0.5.16 or 0.5.23 (`version` 16 or 23)."""
    made: dict[str, types.ModuleType] = {}

    def module(name: str, **names: object) -> types.ModuleType:
        made[name] = types.ModuleType(name)
        made[name].__path__ = []  # type: ignore[attr-defined]
        vars(made[name]).update(names)
        return made[name]

    for name in NAMES:
        module(name)
    hooks: list[tuple] = []

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
            hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            for target, hook, hook_type in hooks:
                assert hook_type is HookType.AROUND
                owner, _, name = target.rpartition(".")
                original = getattr(sys.modules[owner], name)
                setattr(sys.modules[owner], name, lambda *args, original=original, hook=hook: hook(original, *args))

    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType, hooks=hooks)
    module(
        "sglang.srt.configs.model_config",
        is_minimax_sparse=lambda config: hasattr(config, "sparse_attention_config"),
        get_minimax_sparse_attention_config=lambda config: config.sparse_attention_config,
        get_minimax_sparse_layer_ids=lambda cfg: tuple(
            [i for i, f in enumerate(cfg["sparse_attention_freq"]) if bool(f) is sparse] for sparse in (False, True)
        ),
        get_minimax_sparse_disable_value_layer_ids=lambda cfg: [
            i for i, f in enumerate(cfg.get("sparse_disable_index_value") or []) if f
        ],
        get_minimax_sparse_score_type=lambda cfg: cfg.get("sparse_score_type", "max"),
    )
    module("sglang.srt.layers.moe.utils", is_tbo_enabled=lambda: False)
    runtime = module("sglang.srt.runtime_context", get_parallel=lambda: runtime.parallel)
    runtime.parallel = Parallel()
    if version == 23:
        runtime.spec = None
        runtime.get_spec = lambda: runtime.spec
    module("sglang.srt.mem_cache.memory_pool", MiniMaxSparseKVPool=pool_class(version))
    base = module("sglang.srt.layers.attention.base_attn_backend", AttentionBackend=AttentionBackend)
    pair = module("sglang.srt.layers.attention.minimax_sparse_backend", MiniMaxHybridAttnBackend=hybrid(base.AttentionBackend))
    module(
        "sglang.srt.layers.attention.attention_registry",
        attn_backend_wrapper=lambda runner, full_attn_backend: (pair, full_attn_backend),
    )
    return made


class Parallel:
    """Holds the sizes of SGLang's groups of ranks."""

    attn_tp_size = attn_cp_size = attn_dcp_size = 1

    @property
    def dcp_size(self):
        raise AssertionError("decode context parallel group is not initialized")


class AttentionBackend:
    """Does what SGLang's base class does for metadata."""

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def init_forward_metadata_in_graph(self, forward_batch):
        pass


def hybrid(base):
    class MiniMaxHybridAttnBackend(base):
        def __init__(self, dense_backend, sparse_backend, sparse_layer_ids):
            self.dense, self.sparse, self.sparse_layer_ids = dense_backend, sparse_backend, sparse_layer_ids
            self.sparse.dense_backend = dense_backend

        def init_forward_metadata(self, forward_batch):
            self.sparse.init_forward_metadata(forward_batch)

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            self.sparse.init_forward_metadata_out_graph(forward_batch, in_capture)

        def init_forward_metadata_in_graph(self, forward_batch):
            self.sparse.init_forward_metadata_in_graph(forward_batch)

        def init_cuda_graph_state(self, max_bs, max_num_tokens):
            self.sparse.init_cuda_graph_state(max_bs, max_num_tokens)

        def get_cuda_graph_seq_len_fill_value(self):
            return self.sparse.get_cuda_graph_seq_len_fill_value()

        def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            assert layer.layer_id in self.sparse_layer_ids
            return self.sparse.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    return MiniMaxHybridAttnBackend


def pool_class(version: int):
    class MiniMaxSparseKVPool:
        """Holds ``[slots, heads, dim]`` a layer; E4M3 ones as bytes, which SGLang views at each request."""

        def __init__(self, slots, page_size, dtype, index_dtype, kv_heads, layers):
            self.page_size = page_size
            main = {
                "dtype": dtype,
                "head_num": kv_heads,
                "head_dim": DIM,
                "kv_cache_layout": "nhd",
                "is_quantized_kv_cache": False,
            }
            self.main_pool = types.SimpleNamespace(**main)
            self.index_k_pool = types.SimpleNamespace(dtype=index_dtype)
            self.held = {i: (*(_zeros(slots, kv_heads, dtype) for _ in "kv"), _zeros(slots, 1, index_dtype)) for i in layers}

        def get_kv_buffer(self, layer_id):
            return tuple(x.view(self.main_pool.dtype) for x in self.held[layer_id][:2])

        def get_index_k_buffer(self, layer_id):
            return self.held[layer_id][2].view(self.index_k_pool.dtype)

        def _write(self, layer, loc, rows, scales):
            for pool, values, scale in zip(self.held[layer.layer_id], rows, scales, strict=True):
                if pool.dtype == torch.uint8:
                    values = (values.float() / (scale or 1.0)).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
                pool[loc] = values

        if version == 16:

            def set_fused_kv_index_buffer(self, layer, loc, cache_k, cache_v, cache_idx_k, cache_idx_v):
                assert cache_idx_v is None
                self._write(layer, loc, (cache_k, cache_v, cache_idx_k), (None, None, None))

        else:

            def set_fused_kv_index_buffer(
                self, layer, loc, cache_k, cache_v, cache_idx_k, cache_idx_v,
                k_scale=None, v_scale=None, idx_k_scale=None, idx_v_scale=None,
            ):  # fmt: skip
                assert cache_idx_v is None
                assert idx_v_scale is None
                self._write(layer, loc, (cache_k, cache_v, cache_idx_k), (k_scale, v_scale, idx_k_scale))

    return MiniMaxSparseKVPool


def _zeros(slots, heads, dtype):
    return torch.zeros(slots, heads, DIM, dtype=torch.uint8 if dtype == torch.float8_e4m3fn else dtype)


class Engine:
    """Holds requests and slots, and runs steps of the sparse layers as SGLang does: one kind of batch a step, metadata once a
    step, new keys written by the backend, decode batches padded for graphs in buffers that stay."""

    def __init__(
        self, version, made, *, page=128, dtype=torch.bfloat16, index_dtype=torch.bfloat16, heads=8, kv_heads=2, layers=(1, 2),
        drafts=0, algorithm="EAGLE", eagle_topk=1, context=2048, **sparse,
    ):  # fmt: skip
        name, count = types.SimpleNamespace, 1 + max(layers)
        flags = [int(i in layers) for i in range(count)]
        config = {
            "sparse_index_dim": DIM, "sparse_block_size": BLOCK, "sparse_topk_blocks": 4, "sparse_num_index_heads": kv_heads,
            "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": flags, "sparse_disable_index_value": flags,
        } | sparse  # fmt: skip
        spec = name(
            speculative_algorithm=algorithm if drafts else None,
            speculative_eagle_topk=eagle_topk if drafts else None,
            speculative_num_draft_tokens=drafts or None,
        )
        made["sglang.srt.runtime_context"].spec = spec
        pool = made["sglang.srt.mem_cache.memory_pool"].MiniMaxSparseKVPool
        self.version, self.made, self.heads, self.kv_heads, self.page, self.context = (
            version,
            made,
            heads,
            kv_heads,
            page,
            context,
        )
        pages = 8192 // page
        self.pool = pool((pages + 1) * page, page, dtype, index_dtype, kv_heads, layers)
        self.slots = torch.zeros(9, context, dtype=torch.int32)
        self.runner = name(
            model_config=name(
                hf_config=name(sparse_attention_config=config),
                num_attention_heads=heads,
                dtype=torch.bfloat16,
                context_len=context,
            ),
            token_to_kv_pool=self.pool,
            req_to_token_pool=name(req_to_token=self.slots, size=8),
            server_args=spec if version == 16 else None,
        )
        scales = {"idx_k_scale_float": None, "idx_v_scale_float": None} if version == 23 else {}
        self.layers = [
            name(layer_id=i, tp_q_head_num=heads, v_head_dim=DIM, k_scale_float=None, v_scale_float=None, **scales)
            for i in layers
        ]
        self.free = (torch.randperm(pages, generator=torch.Generator().manual_seed(1)) + 1).tolist()  # page 0 is for padding
        self.rows: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.drafts, self.draw = drafts, torch.Generator().manual_seed(2)
        self.buffers = name(seq_lens=torch.ones(8, dtype=torch.int64), req_pool_indices=torch.zeros(8, dtype=torch.int64))

    def start(self):
        registry = self.made["sglang.srt.layers.attention.attention_registry"]
        self.backend = registry.attn_backend_wrapper(self.runner, "dense")
        return self

    def share_prefix(self, request, of, tokens):
        """Starts a request whose first tokens, whole pages, are those of another one."""
        self._row(request)
        self.slots[self.rows[request], :tokens] = self.slots[self.rows[of], :tokens]
        self.lengths[request] = tokens

    def _row(self, request):
        self.rows.setdefault(request, 1 + len(self.rows))
        self.lengths.setdefault(request, 0)

    def step(self, new, mode, pad_to=None, padding=0):
        """Runs `new` tokens of each request through all layers. pad_to: requests of a graph's batch; padding: tokens behind an
        eager batch. Returns for each layer its queries, index queries and outputs, ``[tokens, heads, dim]``."""
        slots = []
        for request, count in new.items():
            self._row(request)
            row, first = self.slots[self.rows[request]], self.lengths[request]
            for at in range(first, first + count):
                row[at] = self.free.pop() * self.page if at % self.page == 0 else row[at - 1] + 1
            slots += row[first : first + count].tolist()
            self.lengths[request] = first + count
        batch = self._batch(new, mode, slots, pad_to, padding)
        rows = batch.out_cache_loc.numel()
        backend, outputs = self.backend, []
        if pad_to:
            view = types.SimpleNamespace(**{k: v for k, v in vars(batch).items() if not k.startswith(("extend", "out"))})
            backend.init_forward_metadata_out_graph(view)
            backend.init_forward_metadata_in_graph(batch)
        else:
            backend.init_forward_metadata(batch)
        for layer in self.layers:
            q, k, v, index_q, index_k = self.drawn(rows)
            none, out = backend.forward(q, k, v, layer, batch, True, idx_q=index_q, idx_k=index_k, idx_v=None)
            assert none is None
            outputs.append((q, index_q, out.view(-1, self.heads, DIM)))
        return outputs

    def drawn(self, rows):
        """Returns q, k, v, index queries and index keys of one layer."""
        counts = (self.heads, self.kv_heads, self.kv_heads, self.kv_heads, 1)
        return [torch.randn(rows, n, DIM, generator=self.draw).bfloat16() for n in counts]

    def _batch(self, new, mode, slots, pad_to, padding):
        unseen = self.drafts if mode.is_target_verify() else 0
        lens = torch.tensor([self.lengths[r] - unseen for r in new])
        requests = torch.tensor([self.rows[r] for r in new])
        if pad_to:
            each = next(iter(new.values()))
            padding = (pad_to - len(new)) * each
            held, fill = self.buffers, self.backend.get_cuda_graph_seq_len_fill_value()
            held.seq_lens[:pad_to], held.req_pool_indices[:pad_to] = fill, 0
            held.seq_lens[: len(new)], held.req_pool_indices[: len(new)] = lens, requests
            lens, requests = held.seq_lens[:pad_to], held.req_pool_indices[:pad_to]
        counts = list(new.values())
        extends = mode.is_extend() and not mode.is_target_verify()
        return types.SimpleNamespace(
            forward_mode=mode,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            req_pool_indices=requests,
            out_cache_loc=torch.tensor(slots + [0] * padding),
            extend_seq_lens=torch.tensor(counts, dtype=torch.int32) if extends else None,
            extend_seq_lens_cpu=counts if extends else None,
            spec_info=types.SimpleNamespace(draft_token_num=self.drafts) if self.drafts else None,
        )
