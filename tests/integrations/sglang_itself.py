# SPDX-License-Identifier: MIT
"""This is SGLang 0.5.16 itself, as far as an attention backend needs it: hook registry, pair of backends, pools, batches, modes
of a forward. The model runner around them is made up and has no model. Packages that SGLang imports and that are not there get
modules in their place whose names do nothing."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from unittest import mock

import torch

from openmsa.integrations import sglang as plugin
from tests.integrations.sglang_stand_in import BLOCK, DIM
from tests.integrations.sglang_stand_in import Engine as StandInEngine

MAY_LACK = (
    *(
        "sgl_kernel",
        "flashinfer",
        "deep_gemm",
        "cutlass",
        "quack",
        "helion",
        "humming",
        "tilelang",
        "tokenspeed_mla",
        "torchao",
    ),
    *("flash_attn", "nvidia_mathdx", "torch_memory_saver", "torchcodec", "torchvision", "decord", "decord2", "outlines"),
    *("xgrammar", "soundfile", "datasets", "modelscope", "mistral_common", "cuda", "IPython", "anthropic", "smg_grpc_servicer"),
    *("zstandard", "av", "blobfile", "timm", "orjson", "pybase64", "setproctitle", "uvloop", "loguru", "openai"),
    *("aiohttp", "requests", "uvicorn", "multipart", "starlette", "zmq", "sentencepiece", "partial_json_parser"),
    *("einops", "compressed_tensors", "llguidance", "interegular", "gguf", "psutil", "watchfiles", "prometheus_client"),
)
"""Packages that SGLang imports beside the classes that are used here, and that these do not need."""
PARTS = ("sglang.srt.function_call.function_call_parser", "sglang.srt.entrypoints.openai.protocol")
"""Modules of SGLang's servers, which its argument parser imports."""


class _Nothing:
    """This is a name of a package that is not there: it can be called, subscripted, inherited from and used as a decorator."""

    def __init__(self, *arguments, **keywords):
        pass

    def __call__(self, *arguments, **keywords):
        plain = len(arguments) == 1 and not keywords and callable(arguments[0])
        return arguments[0] if plain and not isinstance(arguments[0], _Nothing) else _Nothing()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __mro_entries__(self, bases):
        return (object,)

    def __getitem__(self, key):
        return _Nothing()

    def __iter__(self):
        return iter(())

    def __or__(self, other):
        return other

    __ror__ = __or__


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, name, path=None, target=None):
        mine = name in PARTS or name.partition(".")[0] in self.roots
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def installed() -> bool:
    """Says whether SGLang itself is there."""
    found = sys.modules.get("sglang") or importlib.util.find_spec("sglang")
    return found is not None and getattr(found, "origin", getattr(found, "__file__", None)) is not None


def load() -> dict[str, types.ModuleType]:
    """Imports what is used of SGLang, with the hook of the plug-in applied; returns the modules by their names."""
    importlib.import_module("transformers.models.auto.processing_auto")  # looks for packages before any has a stand-in
    from transformers.models.auto.configuration_auto import _LazyConfigMapping

    os.environ.setdefault("SGLANG_OPT_USE_MINIMAX_FUSED_KV_INDEX_STORE", "0")  # otherwise SGLang compiles a kernel of its own
    lacking = {name for name in MAY_LACK if name not in sys.modules and importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, _Finder(lacking))
    register = _LazyConfigMapping.register
    # SGLang registers models that newer transformers know by themselves.
    with mock.patch.object(
        _LazyConfigMapping, "register", lambda self, key, value, exist_ok=False: register(self, key, value, True)
    ):
        names = (
            *("plugins.hook_registry", "layers.attention.attention_registry", "layers.attention.minimax_sparse_backend"),
            *("mem_cache.memory_pool", "model_executor.forward_batch_info", "runtime_context", "configs.model_config"),
        )
        made = {name: importlib.import_module(f"sglang.srt.{name}") for name in names}
    plugin.register()
    made["plugins.hook_registry"].HookRegistry.apply_hooks()
    return made


class Engine(StandInEngine):
    """Runs steps with SGLang's own pools and batches on `device`."""

    def __init__(
        self, made, *, device="cpu", page=128, dtype=torch.bfloat16, index_dtype=None, heads=8, kv_heads=2, layers=(1, 2),
        drafts=0, context=2048, topk=4, requests=8, slots=8192,
    ):  # fmt: skip
        name, count = types.SimpleNamespace, 1 + max(layers)
        flags = [int(i in layers) for i in range(count)]
        config = {
            "sparse_index_dim": DIM, "sparse_block_size": BLOCK, "sparse_topk_blocks": topk, "sparse_num_index_heads": kv_heads,
            "sparse_init_block": 0, "sparse_local_block": 1,
            "sparse_attention_freq": flags, "sparse_disable_index_value": flags,
        }  # fmt: skip
        self.made, self.device, self.heads, self.kv_heads, self.page, self.context = (
            made,
            device,
            heads,
            kv_heads,
            page,
            context,
        )
        pools = made["mem_cache.memory_pool"]
        self.pool = pools.MiniMaxSparseKVPool(
            size=slots, page_size=page, dtype=dtype, head_num=kv_heads, head_dim=DIM, idx_head_dim=DIM,
            dense_layer_ids=[i for i in range(count) if i not in layers], sparse_layer_ids=list(layers), device=device,
            disable_value_sparse_layer_ids=list(layers), index_dtype=index_dtype or dtype, start_layer=0, end_layer=count,
        )  # fmt: skip
        self.request_pool = pools.ReqToTokenPool(requests, context, device, enable_memory_saver=False)
        self.slots = self.request_pool.req_to_token
        self.runner = name(
            model_config=name(
                hf_config=name(sparse_attention_config=config, architectures=["MiniMaxM3SparseForCausalLM"]),
                num_attention_heads=heads, dtype=torch.bfloat16, context_len=context,
            ),
            token_to_kv_pool=self.pool, req_to_token_pool=self.request_pool, use_mla_backend=False,
            server_args=name(
                speculative_algorithm="EAGLE" if drafts else None, speculative_eagle_topk=1 if drafts else None,
                speculative_num_draft_tokens=drafts or None,
            ),
        )  # fmt: skip
        self.layers = [
            name(layer_id=i, tp_q_head_num=heads, v_head_dim=DIM, scaling=DIM**-0.5, k_scale_float=None, v_scale_float=None)
            for i in layers
        ]
        self.free = (torch.randperm(slots // page, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.rows, self.lengths, self.drafts = {}, {}, drafts
        self.draw = torch.Generator(device).manual_seed(2)
        self.buffers = name(
            seq_lens=torch.ones(requests, dtype=torch.int64, device=device),
            req_pool_indices=torch.zeros(requests, dtype=torch.int64, device=device),
        )

    def start(self):
        """Has SGLang's own function, with the plug-in's hook around it, make the pair of backends."""
        dense = self.made["layers.attention.minimax_sparse_backend"].AttentionBackend()
        for method in ("init_forward_metadata", "init_cuda_graph_state"):
            setattr(dense, method, lambda *arguments: None)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.made["runtime_context"].get_parallel().override(attn_tp_size=1, attn_cp_size=1))
            if self.device == "cpu":  # The plug-in serves NVIDIA GPUs alone; for this moment there is one.
                stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
                stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
            wrapper = self.made["layers.attention.attention_registry"].attn_backend_wrapper
            self.backend = wrapper(self.runner, dense)
        return self

    def drawn(self, rows):
        """Returns q, k, v, index queries and index keys of one layer."""
        counts = (self.heads, self.kv_heads, self.kv_heads, self.kv_heads, 1)
        return [torch.randn(rows, n, DIM, generator=self.draw, device=self.device).bfloat16() for n in counts]

    def _batch(self, new, mode, slots, pad_to, padding):
        view = super()._batch(new, mode, slots, pad_to, padding)
        info = self.made["model_executor.forward_batch_info"]
        view.forward_mode = getattr(info.ForwardMode, mode.name)
        tensors = {name: x.to(self.device) for name, x in vars(view).items() if torch.is_tensor(x) and name != "seq_lens_cpu"}
        rest = {name: x for name, x in vars(view).items() if name not in tensors}
        if tensors.get("extend_seq_lens") is not None:
            tensors["extend_prefix_lens"] = tensors["seq_lens"] - tensors["extend_seq_lens"]
        return info.ForwardBatch(
            batch_size=len(view.seq_lens), input_ids=torch.zeros_like(tensors["out_cache_loc"]),
            seq_lens_sum=int(view.seq_lens_cpu.sum()), **tensors, **rest,
        )  # fmt: skip
