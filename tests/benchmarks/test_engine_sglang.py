# SPDX-License-Identifier: MIT
"""The benchmark of SGLang's engine writes a checkpoint that the plain model reads, knows who serves, and compares records."""

import gzip
import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from benchmarks.engine import tokens
from benchmarks.engine_checkpoint import parameters, write_checkpoint
from benchmarks.engine_model import DIM, PlainModel
from benchmarks.engine_sglang import ROWS, command, rows_of, served, table
from benchmarks.engine_sglang_run import FEWEST_KERNELS, Forwards, Sglang

OWN = "x [MiniMaxSparse] Backend initialized (score_type='max')"
OURS = "y OpenMSA serves the 6 sparse layers: prompts"


def test_plain_model_reads_the_checkpoint(tmp_path):
    from safetensors.torch import load_file

    a = Namespace(dense=1, layers=2, hidden=64, heads=2, kv_heads=1, max_len=4096, model_dir=tmp_path, logit_std=3.0)
    config = write_checkpoint(a, "cpu")
    assert json.loads((tmp_path / "config.json").read_text()) == config
    found = parameters(config, load_file(tmp_path / "model.safetensors"))
    assert found["model.layers.0.self_attn.qkv_proj.weight"].shape == (4 * DIM, 64)
    assert found["model.layers.1.self_attn.qkv_proj.weight"].shape == (6 * DIM, 64)
    assert found["model.layers.1.block_sparse_moe.experts.w13_weight"].shape == (4, 1024, 64)
    with torch.no_grad():
        logits = PlainModel(found, config).logits(torch.tensor(tokens(300, 1)))
    assert logits.shape == (300, 32000)
    assert logits.std() > 0.5


def test_the_log_says_who_serves():
    assert served(OURS, "openmsa") == OURS[2:]
    assert served(OWN, "own") == OWN[2:]
    for log, kernels in ((OWN, "openmsa"), (OURS, "own"), (OWN + "\n" + OURS, "openmsa"), ("", "own")):
        with pytest.raises(RuntimeError, match=f"must be served by '{kernels}'"):
            served(log, kernels)


def test_an_engine_gets_the_arguments_of_the_first_process(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--heads", "32", "--", "chunked_prefill_size=4096"])
    assert command("own", 7)[3:] == ["--heads", "32", "--kernels", "own", "--orders", "7", "--", "chunked_prefill_size=4096"]


def test_rows_can_be_chosen():
    a = Namespace(long=[4096], prefix=[512, 64], batch=[1, 8], context=2048, rows=list(ROWS))
    assert [what for what, _ in rows_of(a)] == ["answers", "prefill", "prefix", "decode", "decode"]
    a.rows = ["decode"]
    assert rows_of(a) == [("decode", (1, 2048)), ("decode", (8, 2048))]


def test_table_compares_two_engines():
    def answers(kernels, shift):
        row = {"prompt": 3, "tokens": [1, 2, 3 + int(shift)], "logprobs": [-1.0, -2.0 - shift, -3.0]}
        return {"row": "answers", "kernels": kernels, "alone": [row | {"prompt_logprobs": [None, -1.0, -2.0 + shift]}]}

    def timed(kernels, ms, steps=(1.0,)):
        prefix = {"row": "prefix", "sizes": [256, 64], "wall_s": ms / 1e3, "cached": 256, "apart": 0.0, "first": [7]}
        decode = {"row": "decode", "sizes": [8, 512], "step_ms": ms, "forward_ms": ms / 4}
        turns = [decode | {"step_ms": ms * x, "kernels": kernels} for x in steps]
        return [{**prefix, "kernels": kernels}, *turns]

    ours = timed("openmsa", 3.0, steps=(9.0, 0.5, 1.0))
    text = table([answers("own", 0.0), answers("openmsa", 1.0), *timed("own", 6.0), *ours])
    assert "prompt of 3: 2 leading of 3 answer tokens are equal, 0.67 of all" in text
    assert "prompt mean 0.5000 max 1.000, equal answer max 1.000" in text
    assert (
        "prefix 256 x 64 ms: own 6.000, openmsa 3.000, 2.00 times faster; cached [256, 256], 1 of 1 first tokens are equal"
        in text
    )
    assert "decode 8 x 512 ms: own 6.000, openmsa 3.000, 2.00 times faster" in text
    assert "decode 8 x 512, forward on the GPU, ms: own 1.5000, openmsa 0.7500, 2.000 times faster" in text


def launch(correlation, start, kernels):
    """Returns events of a trace: so many kernels of 2 us, a microsecond apart."""
    args = {"correlation": correlation}
    return [{"cat": "kernel", "ts": start + 3 * i, "dur": 2, "args": args} for i in range(kernels)]


def test_graphs_are_launches_of_many_kernels():
    events = [{"cat": "gpu_memcpy", "ts": 0, "dur": 500, "args": {}}]
    events += launch(8, 1000, FEWEST_KERNELS + 2) + launch(7, 0, FEWEST_KERNELS) + launch(9, 500, FEWEST_KERNELS - 1)
    events += [
        {"name": name, "cat": "cuda_runtime", "ts": ts, "dur": 7} for name, ts in (("cudaGraphLaunch", 3), ("cudaMalloc", 4))
    ]
    found = Forwards.of(events[::-1])
    assert found.forward == pytest.approx([(3 * FEWEST_KERNELS - 1) / 1e3, (3 * FEWEST_KERNELS + 5) / 1e3])
    assert found.behind == pytest.approx([1 - (3 * FEWEST_KERNELS - 1) / 1e3])
    assert found.launch == pytest.approx([7e-3])


def test_forwards_are_read_from_the_trace_of_one_answer():
    asked = []

    class Engine:
        def start_profile(self, output_dir, **more):
            self.folder = Path(output_dir)
            asked.append(more)

        def generate(self, input_ids, sampling_params):
            asked.append((input_ids, sampling_params["max_new_tokens"]))
            return []

        def stop_profile(self):
            trace = {"traceEvents": launch(1, 0, 20)}
            (self.folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))

    run = Sglang.__new__(Sglang)
    run.llm = Engine()
    assert run.forwards([[1, 2]], 5).forward == pytest.approx([59e-3])
    assert asked[0]["activities"] == ["GPU"]
    assert asked[1] == ([[1, 2]], 5)
