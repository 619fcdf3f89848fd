# SPDX-License-Identifier: MIT
"""The engine benchmark's plain model is causal and reads parameters by name, its table compares two records, and it times
forwards apart from steps."""

from argparse import Namespace

import pytest
import torch

from benchmarks.engine import decode, table, tokens
from benchmarks.engine_model import DIM, PlainModel, errors, redraw, write_config

LAYER = {
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
    "self_attn.o_proj.weight": (64, 2 * DIM),
    "self_attn.q_norm.weight": (DIM,),
    "self_attn.k_norm.weight": (DIM,),
}
DENSE = {
    "self_attn.qkv_proj.weight": (4 * DIM, 64),
    "mlp.gate_up_proj.weight": (32, 64),
    "mlp.down_proj.weight": (64, 16),
}
SPARSE = {
    "self_attn.qkv_proj.weight": (6 * DIM, 64),
    "self_attn.index_q_norm.weight": (DIM,),
    "self_attn.index_k_norm.weight": (DIM,),
    "block_sparse_moe.gate.weight": (4, 64),
    "block_sparse_moe.e_score_correction_bias": (4,),
    "block_sparse_moe.experts.w13_weight": (4, 32, 64),
    "block_sparse_moe.experts.w2_weight": (4, 64, 16),
    "block_sparse_moe.shared_experts.gate_up_proj.weight": (32, 64),
    "block_sparse_moe.shared_experts.down_proj.weight": (64, 16),
}


class Parameters(torch.nn.Module):
    def __init__(self):
        super().__init__()
        shapes = {"model.embed_tokens.weight": (32000, 64), "model.norm.weight": (64,), "lm_head.weight": (32000, 64)}
        for i, more in enumerate((DENSE, SPARSE)):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in (LAYER | more).items()}
        for name, shape in shapes.items():
            holder, _, leaf = name.rpartition(".")
            module = self
            for part in holder.split("."):
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))


def small(tmp_path):
    a = Namespace(dense=1, layers=2, hidden=64, heads=2, kv_heads=1, max_len=4096, model_dir=tmp_path)
    model = Parameters()
    assert redraw(model, 3.0) == sum(p.numel() for p in model.parameters())
    return model, write_config(a)


def test_plain_model_is_causal_and_exact_about_its_own_answers(tmp_path):
    model, config = small(tmp_path)
    plain, prompt = PlainModel(dict(model.named_parameters()), config), tokens(300, 1)
    with torch.no_grad():
        whole, part = plain.logits(torch.tensor(prompt)), plain.logits(torch.tensor(prompt[:200]))
    torch.testing.assert_close(whole[:200], part, atol=0.05, rtol=0.05)
    logs = whole.log_softmax(-1)
    answer = whole[-1].argmax().item()
    known = [None, *(logs[i, t].item() for i, t in enumerate(prompt[1:]))]
    row = {"tokens": [answer], "logprobs": [logs[-1, answer].item()], "prompt_logprobs": known}
    (error,) = errors(dict(model.named_parameters()), config, [row], [prompt])
    assert error["prompt_max"] < 1e-5
    assert error["decode_max"] < 1e-5
    assert error["same_argmax"] == 1


def test_table_compares_the_last_run_of_each_kind():
    def record(kernels, ms):
        stage = {"gpu_ms": ms, "host_mean_us": 10 * ms}
        run = {"wall_s": ms / 1e3, "length": 4096, "stages": {"indexer": stage, "attend": stage, "forward": {"gpu_ms": 3 * ms}}}
        forward = {"gpu_ms": 1000.0, "gpu_median_ms": ms}  # One of a step's forwards may have compiled a kernel.
        step = {"batch": 8, "context": 16384, "step_ms": ms, "stages": {"forward": forward}}
        alone = [{"prompt": 5, "tokens": [1, 2, int(ms)]}]
        facts = {"kernels": kernels, "engine": "vllm", "gpu": "H200", "start_s": 1.0}
        return facts | {"alone": alone, "prefill": [run], "decode": [step]}

    text = table([record("own", 9.0), record("own", 6.0), record("openmsa", 3.0)])
    assert "prefill 4096 ms" in text
    assert text.count("2.00x") == 9
    assert "2 of 3 answer tokens are equal" in text


@pytest.mark.parametrize("eager", [True, False])
def test_forwards_are_timed_behind_the_steps_that_the_clock_measures(eager, monkeypatch):
    """A wait of the GPU before a forward would be part of a step's time; layers that are launched one by one get none."""
    seen = []

    class Engine:
        def __init__(self):
            self.stages = Namespace(on=False, ahead=False, take=lambda: {"forward": {}})
            self.made = {}

        def start(self, name, prompt, most):
            self.made[name], self.most = 0, most

        def step(self):
            seen.append((self.stages.on, self.stages.ahead))
            self.made = {name: made + 1 for name, made in self.made.items()}
            assert max(self.made.values()) <= self.most
            return dict(self.made)

        def finish(self, names):
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    row = decode(Engine(), 2, 64, Namespace(speculative=0, steps=5, chunk=16, eager=eager))
    assert row["tokens"] == 10
    assert row["stages"] == {"forward": {}}
    assert seen[-10:] == [(False, False)] * 5 + [(True, not eager)] * 5
