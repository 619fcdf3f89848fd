# SPDX-License-Identifier: MIT
"""This module has what `benchmarks/engine_sglang.py` asks of one of SGLang's offline engines, and how its rows are measured."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.engine import SHORT, tokens
from benchmarks.engine_checkpoint import parameters
from benchmarks.engine_model import errors

LOGGED = 2048
"""Last tokens of a long prompt whose log-probabilities are compared."""
FEWEST_KERNELS = 16
"""A launch of so many kernels or more is a step's graph."""
GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")
"""A trace names the host's call that launches a graph so."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
"""SGLang's processes have these variables, unless they are set: nothing is fetched, and all of them talk on this machine."""


class Forwards(NamedTuple):
    """Holds milliseconds of the launches of graphs, in order: on the GPU from the first kernel's start to the last one's end,
    from there to the next one's first kernel, and of the host's calls that launch them."""

    forward: list[float]
    behind: list[float]
    launch: list[float]

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> Forwards:
        """Finds them in a trace of PyTorch's profiler, where the kernels of one launch have one correlation."""
        kernels: dict[int, list[tuple[float, float]]] = {}
        for event in events:
            if event.get("cat") == "kernel":
                kernels.setdefault(event["args"]["correlation"], []).append((event["ts"], event["ts"] + event["dur"]))
        spans = sorted((min(x)[0], max(end for _, end in x)) for x in kernels.values() if len(x) >= FEWEST_KERNELS)
        calls = sorted((e["ts"], e["dur"]) for e in events if e.get("name") in GRAPH_LAUNCHES and "dur" in e)
        return cls(
            [1e-3 * (end - start) for start, end in spans],
            [1e-3 * (start - end) for (_, end), (start, _) in itertools.pairwise(spans)],
            [1e-3 * duration for _, duration in calls],
        )


class Sglang:
    """Holds SGLang's offline engine, which serves the checkpoint of `a.model_dir` with the kernels `a.kernels` names."""

    def __init__(self, a: Namespace) -> None:
        self.a = a
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if a.kernels == ["openmsa"]:  # Without the variable, SGLang loads the plug-in, too, which then does nothing.
            os.environ.setdefault("SGLANG_PLUGINS", "openmsa")
        import sglang

        more: dict[str, Any] = {"disable_cuda_graph": True} if a.eager else {"cuda_graph_backend_prefill": a.prefill_graph}
        if not a.eager:
            more["cuda_graph_bs_decode"] = sorted({1, 2, 4, 8, *a.batch})
        more |= {name: json.loads(value) for name, _, value in (text.partition("=") for text in a.more)}
        self.version = sglang.__version__
        self.llm = sglang.Engine(
            **{
                "model_path": str(a.model_dir),
                "skip_tokenizer_init": True,
                "device": a.device,
                "page_size": 128,
                "attention_backend": a.dense_backend,
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "context_length": a.max_len,
                "chunked_prefill_size": a.chunk,
                "max_prefill_tokens": a.chunk,
                "max_total_tokens": a.kv_tokens,
                "max_running_requests": max([8, *a.batch]),
                "mem_fraction_static": a.memory,
                "random_seed": 0,
                "log_level": "info",
                **more,
            }
        )

    def facts(self) -> dict[str, Any]:
        args = self.llm.server_args
        names = ("attention_backend", "page_size", "cuda_graph_config", "moe_runner_backend", "disable_overlap_schedule")
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
        return {
            "engine": f"sglang {self.version}",
            "gpu": gpu,
            "torch": torch.__version__,
            "server": {name: str(getattr(args, name)) for name in names},
        }

    def generate(
        self, prompts: list[list[int]], count: int, logprobs: int | None = None, logged: int | None = None
    ) -> list[dict[str, Any]]:
        """Returns greedy answers of `count` tokens, with the log-probabilities of the `logprobs` likeliest tokens where it is
        given, and of the last `logged` tokens of the prompts where that is."""
        more: dict[str, Any] = {}
        if logprobs is not None:
            starts = [len(p) if logged is None else max(0, len(p) - logged) for p in prompts]
            more = {"return_logprob": True, "top_logprobs_num": logprobs}
            more["logprob_start_len"] = starts if logged is not None else [-1] * len(prompts)
        asked = {"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True}
        answers = self.llm.generate(input_ids=prompts, sampling_params=asked, **more)
        return [_row(answer) for answer in answers]

    def flush(self) -> None:
        """Forgets all cached prompts."""
        self.llm.flush_cache()

    def forwards(self, prompts: list[list[int]], count: int) -> Forwards:
        """Returns what the launches of decode steps' graphs take while the prompts are answered."""
        with tempfile.TemporaryDirectory() as folder:
            self.llm.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
            self.generate(prompts, count)
            self.llm.stop_profile()
            traces = [json.loads(gzip.decompress(path.read_bytes())) for path in Path(folder).rglob("*.json.gz")]
        return Forwards.of([event for trace in traces for event in trace["traceEvents"]])

    def answers(self, lengths: list[int]) -> dict[str, Any]:
        """Returns answers to prompts alone and together, and how far the former are from a forward in plain PyTorch."""
        prompts = [tokens(n, n) for n in lengths]
        logged = [max(lengths[:-1]) if n in SHORT else LOGGED for n in lengths]
        alone = [self.generate([p], 32, logprobs=5, logged=most)[0] for p, most in zip(prompts, logged, strict=True)]
        together = self.generate(prompts, 32)
        row: dict[str, Any] = {"alone": alone, "together": [x["tokens"] for x in together]}
        row["leading"] = [
            next((i for i, (a, b) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if a != b), len(x["tokens"]))
            for x, y in zip(alone, together, strict=True)
        ]
        from safetensors.torch import load_file

        config = json.loads((Path(self.a.model_dir) / "config.json").read_text())
        weights = load_file(Path(self.a.model_dir) / "model.safetensors", device=self.a.device)
        short = [i for i, n in enumerate(lengths) if n in SHORT]
        row["errors"] = errors(parameters(config, weights), config, [alone[i] for i in short], [prompts[i] for i in short])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return row


def _row(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    row: dict[str, Any] = {"prompt": meta["prompt_tokens"], "tokens": answer["output_ids"], "cached": meta["cached_tokens"]}
    if "output_token_logprobs" in meta:
        row["logprobs"] = [x[0] for x in meta["output_token_logprobs"]]
        row["prompt_logprobs"] = [x[0] for x in meta["input_token_logprobs"]]
        row["top"] = [{str(t): logprob for logprob, t, *_ in step} for step in meta["output_top_logprobs"]]
    return row


def measured(run: Sglang, what: str, sizes: tuple[int, ...], repeat: int, a: Namespace) -> dict[str, Any]:
    """Measures a row in the engine `run`."""
    if what == "answers":
        return run.answers([*SHORT, max(a.long)])
    if what == "prefill":
        run.flush()
        return _median([timed(run, [tokens(sizes[0], sizes[0] + 100 + i)], 1) for i in range(repeat)])
    if what == "prefix":
        shared = tokens(sizes[0], 7)
        run.generate([shared], 1)
        row = _median([timed(run, [shared + tokens(sizes[1], 200 + i)], 1) for i in range(repeat)])
        prompt = shared + tokens(sizes[1], 200)
        cached = run.generate([prompt], 1, logprobs=5)[0]
        run.flush()
        anew = run.generate([prompt], 1, logprobs=5)[0]
        return row | {"read": cached["cached"], "read_anew": anew["cached"], "apart": _apart(cached["top"][0], anew["top"][0])}
    prompts = [tokens(sizes[1], 1000 + i) for i in range(sizes[0])]
    for count in (8 + a.steps, 8):  # From here on their keys are cached, and all is compiled.
        run.generate(prompts, count)
    laps = []
    for _ in range(repeat):
        short, long = (timed(run, prompts, count)["wall_s"] for count in (8, 8 + a.steps))
        laps.append((long - short) / a.steps)
    row = {"step_ms": 1e3 * statistics.median(laps), "steps_ms": [1e3 * x for x in laps]}
    if a.device == "cuda" and not a.eager:
        forwards = run.forwards(prompts, 8 + a.steps)
        row |= {f"{name}_ms": statistics.median(x) for name, x in forwards._asdict().items() if x}
        row |= {"forwards": len(forwards.forward), "forward_quartiles_ms": statistics.quantiles(forwards.forward)}
    return row


def timed(run: Sglang, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """Returns the seconds that answers of `count` tokens take, how many tokens were read from the cache, and the first token of
    the first answer."""
    begun = time.perf_counter()
    answers = run.generate(prompts, count)
    wall = time.perf_counter() - begun
    return {"wall_s": wall, "cached": sum(x["cached"] for x in answers), "first": answers[0]["tokens"][0]}


def _median(taken: list[dict[str, Any]]) -> dict[str, Any]:
    walls = [x["wall_s"] for x in taken]
    first = [x["first"] for x in taken]
    return {"wall_s": statistics.median(walls), "walls_s": walls, "cached": taken[-1]["cached"], "first": first}


def _apart(x: dict[str, float], y: dict[str, float]) -> float | None:
    return max((abs(x[t] - y[t]) for t in x if t in y), default=None)
