# SPDX-License-Identifier: MIT
"""This module has what `benchmarks/engine.py` asks of vLLM: an engine in this process, its sparse layers, and the time of their
stages."""

from __future__ import annotations

import importlib.util
import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch


def environment(a: Namespace) -> None:
    """Sets what vLLM reads when it is imported. `a.plugins` are named beside ours."""
    ours = ["openmsa"] if a.kernels == "openmsa" else []
    shims = ["m3_shims"] if importlib.util.find_spec("m3_shims") else []
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": ",".join([*shims, *a.plugins, *ours]),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_USE_BREAKABLE_CUDAGRAPH": "1",  # as vLLM sets it for this model; a plug-in of vLLM may import it earlier
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if a.ranks > 1:  # Functions go to the processes of the ranks.
        wanted |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if not importlib.util.find_spec("deep_gemm"):
        wanted["VLLM_USE_DEEP_GEMM"] = "0"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


class Vllm:
    """Holds an engine that serves the model of `a.model_dir`."""

    def __init__(self, a: Namespace) -> None:
        from transformers import AutoConfig
        from vllm import LLM
        from vllm.transformers_utils.configs.minimax_m3 import MiniMaxM3TextConfig

        AutoConfig.register("minimax_m3_text", MiniMaxM3TextConfig, exist_ok=True)
        attention: dict[str, Any] = {"backend": a.dense_backend}
        if a.index_dtype:
            attention["indexer_kv_dtype"] = a.index_dtype
        more: dict[str, Any] = {} if a.checkpoint else {"load_format": "dummy"}
        if a.gpu_share is not None:
            more["gpu_memory_utilization"] = a.gpu_share
        if a.speculative:
            more["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": a.speculative,
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
            }
        self.llm = LLM(
            model=str(a.checkpoint or a.model_dir),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            max_model_len=a.max_len,
            tensor_parallel_size=a.ranks,
            max_num_batched_tokens=a.chunk,
            max_num_seqs=max([32, *a.batch]),
            block_size=128,
            kv_cache_dtype=a.kv_dtype,
            kv_cache_memory_bytes=int(a.kv_gib * 2**30),
            enable_prefix_caching=a.prefix_caching,
            attention_config=attention,
            enforce_eager=a.eager,
            compilation_config={"cudagraph_capture_sizes": sorted({1, 2, 4, 8, 16, 32, *a.batch, *a.capture})},
            generation_config="vllm",
            **more,
        )
        self.stages = Stages()
        if a.ranks == 1:
            self.inside(self.stages.watch)
            self.llm.collective_rpc(lambda worker: self.stages.watch_forward(worker.model_runner))

    def inside(self, function: Callable[[Any], Any]) -> Any:
        """Calls `function` with the model of each rank; returns what it returned on the first one."""
        return self.llm.apply_model(function)[0]

    def facts(self) -> dict[str, Any]:
        import vllm

        config = self.llm.llm_engine.vllm_config
        return {
            "engine": f"vllm {vllm.__version__}",
            "graphs": str(config.compilation_config.cudagraph_mode),
            "layers": self.inside(describe),
        }

    def generate(self, prompts: list[list[int]], count: int, **more: Any) -> list[dict[str, Any]]:
        """Returns the tokens, and the log-probabilities that are asked for, of greedy answers of `count` tokens."""
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], greedy(count, **more), use_tqdm=False)
        return [_record(output) for output in outputs]

    def start(self, name: str, prompt: list[int], count: int) -> None:
        """Adds a request, which `step` then serves."""
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, greedy(count))

    def step(self) -> dict[str, int]:
        """Runs one step; returns how many tokens each request that made one has by now."""
        return {o.request_id: len(o.outputs[0].token_ids) for o in self.llm.llm_engine.step()}

    def finish(self, abort: Iterable[str] = ()) -> None:
        """Aborts the requests that `abort` names, and runs steps until no request is left."""
        self.llm.llm_engine.abort_request(list(abort))
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()


def greedy(count: int, **more: Any) -> Any:
    """Returns what asks vLLM for the likeliest `count` tokens."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, **more)


def _record(output: Any) -> dict[str, Any]:
    made = output.outputs[0]
    row: dict[str, Any] = {"prompt": len(output.prompt_token_ids), "tokens": list(made.token_ids)}
    if made.logprobs:
        row["logprobs"] = [step[t].logprob for step, t in zip(made.logprobs, made.token_ids, strict=True)]
        row["top"] = [{str(t): x.logprob for t, x in step.items()} for step in made.logprobs]
    if output.prompt_logprobs:
        pairs = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
        row["prompt_logprobs"] = [step[t].logprob if step else None for step, t in pairs]
    return row


def sparse_layers(model: Any) -> list[Any]:
    """Returns the sparse attention layers of vLLM's model."""
    from vllm.models.minimax_m3.nvidia.model import MiniMaxM3SparseAttention

    return [m for m in model.modules() if isinstance(m, MiniMaxM3SparseAttention)]


def describe(model: Any) -> list[dict[str, Any]]:
    """Returns which classes serve the sparse layers, and how their caches lie, each combination once with its layers."""

    def name(x: Any) -> str:
        cls = x if isinstance(x, type) else type(x)
        return f"{cls.__module__}.{cls.__qualname__}"

    rows: dict[str, dict[str, Any]] = {}
    for layer in sparse_layers(model):
        caches = {"kv_cache": layer.kv_cache, "index_cache": layer.indexer.index_cache.kv_cache}
        row = {
            "attention": name(layer.impl),
            "indexer": name(layer.indexer.impl),
            "backend": name(layer.get_attn_backend()),
            **{k: [str(x.dtype), list(x.shape), list(x.stride())] for k, x in caches.items()},
        }
        rows.setdefault(str(row), {**row, "layers": 0})["layers"] += 1
    return list(rows.values())


HOST_CYCLES = 2_000_000
"""A forward that is launched behind a wait of so many of the GPU's cycles, about a millisecond, finds its graph there."""


class Stages:
    """Takes the time of the indexer and of the attention of sparse layers, on the GPU and on the host, and of whole forwards,
    while `on`. A CUDA graph's layers are not seen, its forward is. Where the host is `ahead`, the GPU waits before a forward,
    so that its time on the GPU holds no time in which the GPU waits for the graph's launch."""

    def __init__(self) -> None:
        self.on = self.ahead = False
        self._taken: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, float]]] = {}

    def watch(self, model: Any) -> None:
        """Wraps the stages of this model's sparse layers."""
        for layer in sparse_layers(model):
            layer.impl.forward = self._timed("attend", layer.impl.forward)
            layer.indexer.forward = self._timed("indexer", layer.indexer.forward)

    def watch_forward(self, runner: Any) -> None:
        """Wraps the whole forward of vLLM's model runner (V1; its V2 has no such method, and is not timed)."""
        if hasattr(runner, "_model_forward"):
            runner._model_forward = self._timed("forward", runner._model_forward)

    def _timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            if not self.on or torch.cuda.is_current_stream_capturing():
                return call(*arguments, **keywords)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self.ahead and stage == "forward":
                torch.cuda._sleep(HOST_CYCLES)
            start.record()
            before = time.perf_counter()
            result = call(*arguments, **keywords)
            host = time.perf_counter() - before
            end.record()
            self._taken.setdefault(stage, []).append((start, end, host))
            return result

        return timed

    def take(self) -> dict[str, dict[str, float]]:
        """Returns by stage: calls, their GPU time together and the host's mean and median of a call, and forgets them."""
        torch.cuda.synchronize()
        out = {}
        for stage, calls in self._taken.items():
            gpu, host = [s.elapsed_time(e) for s, e, _ in calls], sorted(h for _, _, h in calls)
            out[stage] = {
                "calls": len(calls),
                "gpu_ms": round(sum(gpu), 4),
                "gpu_median_ms": round(sorted(gpu)[len(gpu) // 2], 4),
                "host_mean_us": round(1e6 * sum(host) / len(host), 1),
                "host_median_us": round(1e6 * host[len(host) // 2], 1),
            }
        self._taken = {}
        return out
