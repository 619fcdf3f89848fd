# SPDX-License-Identifier: MIT
"""What `openmsa plan` says of memory is what caches allocate, and its other answers follow from that."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from openmsa import HostKV, PagedIndexKeys, PagedKV
from openmsa.capacity import GPUS, INDEX_ROW_BYTES, KV_ROW_BYTES, PRESETS, Machine, Model, Request, plan
from openmsa.capacity.rates import GIB
from openmsa.cli import app
from openmsa.host_kv.block_cache import planes
from openmsa.kv_cache import Stored

M3 = PRESETS["minimax-m3"]
SMALL = Model(
    name="small", sparse_layers=3, dense_layers=1, num_q_heads=8, num_kv_heads=2, head_dim=32, index_dim=64, block_size=32,
    topk=4,
)  # fmt: skip
H200 = Machine(gpu=GPUS["h200"])


def held(pool):
    """Returns the bytes of a pool, its scales among them."""
    parts = [x for x in vars(pool).values() if isinstance(x, (torch.Tensor, Stored))] if isinstance(pool, Stored) else [pool]
    return sum(held(x) if isinstance(x, Stored) else x.numel() * x.element_size() for x in parts)


@pytest.mark.parametrize("index", INDEX_ROW_BYTES)
@pytest.mark.parametrize("kv", KV_ROW_BYTES)
def test_memory_is_what_caches_allocate(kv, index):
    request = Request(context=1000, batch=3, kv=kv, index=index, cache=0.3)
    answer = plan(SMALL, request, H200)
    table = torch.arange(3 * 32, dtype=torch.int32).view(3, 32)
    formats = {"format": "plain" if kv == "bf16" else kv}
    sizes, dtype = (96, 2, 32, 32), torch.bfloat16
    resident = PagedKV.allocate(table, *sizes, dtype, **formats)
    slots = round(0.3 * 96 * 2)
    host = HostKV.allocate(table, *sizes, dtype, **formats, cache_blocks=slots, block_size=32, topk=4)
    keys = PagedIndexKeys.allocate(table, 96, 1, 32, 64, dtype, "plain" if index == "bf16" else index)
    assert answer.resident.gpu["K and V"] == 3 * (held(resident.k) + held(resident.v))
    assert answer.resident.gpu["K and V of dense layers"] == held(resident.k) + held(resident.v)
    assert answer.resident.gpu["index keys"] == answer.in_host_memory.gpu["index keys"] == 3 * held(keys.keys)
    taken = sum(1 << (plane.numel() * plane.element_size() - 1).bit_length() for plane in planes(host.k, host.v))
    assert answer.in_host_memory.host["K and V"] == 3 * taken > 3 * host.host_bytes
    counts = 3 * host.cache.counts.numel() * 8
    assert answer.in_host_memory.gpu["block cache"] == 3 * host.device_bytes - counts


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 64), gpus=st.integers(1, 8), memory=st.floats(8, 200), host=st.none() | st.floats(1, 2000),
    cache=st.floats(0, 0.5), kv=st.sampled_from(list(KV_ROW_BYTES)), index=st.sampled_from(list(INDEX_ROW_BYTES)),
)  # fmt: skip
def test_the_longest_context_fits_and_a_longer_one_does_not(batch, gpus, memory, host, cache, kv, index):
    machine = replace(H200, gpus=gpus, gpu_memory=memory * GIB, host_memory=host and host * GIB)
    request = Request(context=128, batch=batch, kv=kv, index=index, cache=cache)
    for name in ("resident", "in_host_memory"):
        longest = getattr(plan(M3, request, machine), name).longest
        for context, fits in ((longest, True), (longest + 1, False)):
            if context:
                assert getattr(plan(M3, replace(request, context=context), machine), name).fits == fits


def test_times_follow_bytes():
    request = Request(context=1 << 18, batch=8)
    answer = plan(M3, request, H200)
    # By hand: index keys and chosen blocks of 57 layers, all keys of 3, at 4.55 TB/s and 1.1 of it; 174 launches.
    tokens, chosen = 8 << 18, 8 * 2048 * 2048
    seconds = 1.1 * (57 * (256 * tokens + chosen) + 3 * 2048 * tokens) / 4.55e12 + (57 * 3 + 3) * 2e-6
    assert answer.resident.step_s == pytest.approx(seconds)
    assert answer.in_host_memory.step_s == pytest.approx(seconds + 57 * (0.05 * chosen / 51.2e9 + 2 * 2e-6 + 26e-6))
    assert plan(M3, replace(request, hits=1.0), H200).in_host_memory.step_s < answer.in_host_memory.step_s
    two = plan(M3, request, replace(H200, gpus=2))
    assert two.resident.step_s == pytest.approx((seconds + 174 * 2e-6) / 2 + (2 * 57 + 3) * 8e-6)
    assert answer.resident.step_s / 2 < two.resident.step_s < answer.resident.step_s
    assert sum(two.resident.gpu.values()) == sum(answer.resident.gpu.values()) / 2


def test_advice_says_what_helps():
    def said(request, machine):
        return " ".join(plan(M3, request, machine).advice)

    one = Request(context=1 << 20)
    assert "All fits on the GPUs" in said(replace(one, batch=1, context=1 << 17), H200)
    text = said(replace(one, batch=4), replace(H200, host_memory=400 * GIB))
    assert "Neither way fits." in text
    assert "Host memory must have 456 GiB for keys and values, not 400." in text
    assert "5 GPUs hold all keys and values." in text
    assert "HostKV with HostDecodePlan" in said(replace(one, batch=4), replace(H200, host_memory=500 * GIB))
    assert "Host memory" not in said(replace(one, context=1 << 17), replace(H200, host_memory=1 * GIB))
    assert "A smaller block cache makes room" in said(replace(one, batch=4, cache=0.6), H200)
    assert "leave no room on a GPU" in said(one, replace(H200, weights=140 * GIB))
    assert "times as long: a larger block cache" in said(replace(one, batch=1, context=1 << 15, hits=0.2), H200)


def test_a_config_gives_the_model(tmp_path):
    sparse = {"sparse_attention_freq": [0] * 3 + [1] * 57, "sparse_index_dim": 128, "sparse_block_size": 128}
    config = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "model_type": "MiniMax-M3"}
    file = tmp_path / "config.json"
    whole = config | {"sparse_attention_config": sparse | {"sparse_topk_blocks": 16}}
    for content in (whole, {"text_config": whole}):
        file.write_text(json.dumps(content))
        assert Model.from_config(file) == M3
    kinds = ["full_attention"] + ["minimax_m3_sparse"] * 2
    flat = config | {"layer_types": kinds, "index_head_dim": 64, "index_block_size": 64, "index_topk_blocks": 8}
    file.write_text(json.dumps(flat))
    found = Model.from_config(file)
    assert (found.sparse_layers, found.dense_layers, found.index_dim, found.block_size, found.topk) == (2, 1, 64, 64, 8)
    branches = {
        "index_n_key_heads": 3,
        "index_head_dim": 64,
        "index_block_size": 32,
        "index_topk_blocks": 4,
        "dense_layers": [0, 2],
    }
    llama = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 5, "msa": branches}
    file.write_text(json.dumps(llama))  # openmsa convert writes such a config
    found = Model.from_config(file)
    assert (found.sparse_layers, found.dense_layers, found.head_dim, found.index_key_heads, found.topk) == (3, 2, 64, 3, 4)
    assert Model.from_config(tmp_path) == found, "a folder stands for the config.json in it"
    for content, sentence in (
        (config, "must say which layers are sparse"),
        ({"msa": branches}, "must have num_hidden_layers"),
        (config | {"sparse_attention_config": sparse}, "must have index_topk_blocks or sparse_attention_config.sparse_topk_"),
        ([], "must say which layers"),
        ([1], "config of .*config.json must be an object of names and values, got list"),
        ({"text_config": "x"}, "text_config of .*config.json must be an object of names and values, got str"),
        ({"text_config": None, "layer_types": 5}, "layer_types of .*config.json must be a list of numbers or names, got 5"),
        (flat | {"layer_types": ["full_attention"] * 3}, "must say which layers are sparse"),
        (flat | {"num_attention_heads": 0}, "num_attention_heads of .*config.json must be at least 1, got 0"),
        (flat | {"num_attention_heads": -64}, "num_attention_heads of .*config.json must be at least 1, got -64"),
        (flat | {"head_dim": None, "hidden_size": "a"}, "hidden_size of .*config.json must be an int, got str"),
        (flat | {"head_dim": 0}, "head_dim of .*config.json must be at least 1, got 0"),
        (flat | {"index_n_key_heads": "3"}, "index_n_key_heads of .*config.json must be an int, got str"),
        (flat | {"num_key_value_heads": 10**30}, "num_key_value_heads of .*config.json must be from 1 to 2147483647"),
        (llama | {"num_hidden_layers": 10**12}, "num_hidden_layers of .*config.json must be from 1 to 2147483647"),
        (llama | {"msa": branches | {"dense_layers": None}}, "config.json must have dense_layers"),
        (
            llama | {"msa": branches | {"dense_layers": "02"}},
            "dense_layers of .*config.json must be a list of numbers or names, got 02",
        ),
        (llama | {"msa": branches | {"dense_layers": [5]}}, "dense_layers of .*config.json must be from 0 to 4, got 5"),
        (llama | {"msa": branches | {"dense_layers": ["0"]}}, "dense_layers of .*config.json must be an int, got str"),
        (flat | {"layer_types": [[1], {}]}, "layer_types of .*config.json must be a list of numbers or names, got "),
    ):
        file.write_text(json.dumps(content))
        with pytest.raises((ValueError, TypeError), match=sentence):
            Model.from_config(file)
    for text in ("{", "[" * 100_000, '{"num_attention_heads": ' + "1" * 5000 + "}"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"model must be a preset or a JSON config file, got .*config.json"):
            Model.from_config(file)
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(ValueError, match="model must be a preset or a JSON config file, got"):
            Model.from_config(Path(name))


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_a_size_of_a_config_is_not_called_an_option(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"layer_types": ["sparse"], "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": "x"})
    )
    assert invoke("--model", str(tmp_path)).output.startswith("head_dim of ")
    sizes = {"head_dim": 100, "index_head_dim": 64, "index_block_size": 64, "index_topk_blocks": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": ["sparse"], "num_attention_heads": 4, **sizes}))
    words = "config.json must hold sizes that MSA takes: head_dim must be a multiple of 16 from 16 to 256, got 100\n"
    assert invoke("--model", str(tmp_path)).output.endswith(words)


def test_the_command_prints_a_table_of_80_columns_and_json():
    found = invoke("--context", "1M", "--batch", "4", "--gpus", "2", "--host-memory", "500", "--weights", "100")
    assert found.exit_code == 0
    assert max(map(len, found.stdout.splitlines())) <= 80
    for part in ("index keys", "block cache", "longest context, batch 4", "2 x NVIDIA H200", "4 x 1,048,576 keys"):
        assert part in found.stdout
    answer = json.loads(invoke("--context", "128K", "--heads", "32/2", "--layers", "10/0", "--json").stdout)
    assert answer["resident"]["gpu"]["K and V"] == 131072 * 10 * 2 * 2 * 128 * 2
    assert answer["model"]["name"] == "MiniMax-M3, changed"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--context", "1G"), "--context must be a number of keys, such as 131072, 128K or 1M, got '1G'"),
        (("--gpu", "a100"), "--gpu must be one of h200, whose rates were measured, got 'a100'"),
        (("--model", "nowhere.json"), "--model must be a preset or a JSON config file, got 'nowhere.json'"),
        (("--heads", "64"), "--heads must be two numbers, such as 64/4, got '64'"),
        (("--heads", "6/4"), "KV heads of --heads must divide query heads (6), got 4"),
        (("--heads", "0/4"), "query heads of --heads must be at least 1, got 0"),
        (("--layers", "0/4"), "sparse layers of --layers must be at least 1, got 0"),
        (("--index", "fp5"), "--index must be one of bf16, e4m3, int8, nvfp4, mxfp4, certified, got 'fp5'"),
        (("--cache", "1.5"), "--cache must lie from 0 to 1, got 1.5"),
        (("--gpus", "0"), "--gpus must be at least 1, got 0"),
        (("--context", "3000M"), "--context must be from 1 to 2147483647, got 3145728000"),
        (("--head-dim", "100"), "--head-dim must be a multiple of 16 from 16 to 256, got 100"),
        (("--index-dim", "24"), "--index-dim must be a multiple of 16 from 16 to 256, got 24"),
        (("--weights", "-1"), "--weights must be at least 0 GiB and finite, got -1"),
    ],
)
def test_the_command_refuses_with_a_sentence(arguments, sentence):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
