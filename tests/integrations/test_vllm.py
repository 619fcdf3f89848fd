# SPDX-License-Identifier: MIT
"""The plug-in for vLLM serves a stand-in for vLLM, with its names and signatures, as a naive attention does; vLLM itself is not
installed."""

import importlib
import logging
import math
import sys
from importlib.metadata import entry_points

import pytest
import torch

from openmsa.integrations import vllm as plugin
from tests.integrations import vllm_stand_in as stand_in
from tests.integrations.vllm_stand_in import BLOCK, DIM, M3, Engine, configuration

OURS = ("model", "layers", "backend", "sizes")


@pytest.fixture
def vllm(monkeypatch):
    """Installs the stand-in of a version, and returns its modules."""

    def install(version):
        for name in [n for n in sys.modules if n.startswith("openmsa.integrations.vllm.")]:
            monkeypatch.delitem(sys.modules, name)
        made = stand_in.modules(version)
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
        return made

    yield install
    for name in OURS:
        sys.modules.pop(f"openmsa.integrations.vllm.{name}", None)


def started(vllm, version, architecture="MiniMaxM3SparseForCausalLM", *, layout="HND", **more):
    """Returns a registered model, constructed as vLLM does it, in an engine with caches."""
    made = vllm(version)
    plugin.register()
    module, _, name = made["vllm"].ModelRegistry.models[architecture].partition(":")
    config = configuration(version, **more)
    model = getattr(importlib.import_module(module), name)(vllm_config=config, prefix="")
    return Engine(version, made, model, config, layout=layout)


def numbers(pool, scale=1.0):
    """Reads bytes of E4M3, E4M3 or plain elements as float64."""
    pool = pool.view(torch.float8_e4m3fn) if pool.dtype == torch.uint8 else pool
    return pool.cpu().double() * scale


def naive(engine, layer, q, index_q, request, first):
    """Attends for the `q` ``[tokens, heads, dim]`` at the positions `first` (int ``[tokens]``) of a request, one by one."""
    sizes, pages = engine.config.sizes, engine.pages[request]
    main = numbers(layer.kv_cache)[pages].transpose(1, 2).flatten(0, 1)  # [keys, kv_heads, 2 * dim]
    k, v = main[..., :DIM] * float(layer._k_scale), main[..., DIM:] * float(layer._v_scale)
    index_k = numbers(layer.indexer.index_cache.kv_cache)[pages].reshape(-1, DIM)
    group, out = sizes["heads"] // sizes["kv_heads"], torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = int(first[i]) + 1
        for h in range(sizes["kv_heads"]):
            score = index_k[:seen] @ numbers(index_q[i, h])
            padded = torch.nn.functional.pad(score, (0, -seen % BLOCK), value=-math.inf)
            blocks = padded.view(-1, BLOCK).amax(1)
            blocks[-1] = math.inf  # its own block
            chosen = blocks.topk(min(sizes["topk"], blocks.numel())).indices
            keys = (chosen[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            keys = keys[keys < seen]
            heads = slice(h * group, (h + 1) * group)
            weight = (q[i, heads].cpu().double() @ k[keys, h].T * DIM**-0.5).softmax(-1)
            out[i, heads] = weight @ v[keys, h]
    return out


def run(engine, new, pad_to=None):
    """Runs a step, and compares every layer's outputs with `naive`."""
    before = {request: engine.lengths.get(request, 0) for request in new}
    for layer, (q, index_q, out) in zip(engine.model.layers, engine.step(new, pad_to), strict=True):
        at = 0
        for request, count in new.items():
            # Of many tokens some are compared, the first and the last among them.
            some = torch.linspace(0, count - 1, min(count, 24)).round().long()
            rows = at + some
            expected = naive(engine, layer, q[rows], index_q[rows], request, before[request] + some)
            torch.testing.assert_close(out[rows].cpu().double(), expected, atol=0.02, rtol=0.02)
            at += count
        if pad_to:
            assert (out[at:] == 0).all()


@pytest.mark.parametrize("version", [26, 33])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layout": "NHD", "cache_dtype": "fp8", "index_dtype": "fp8"},
        {"cache_dtype": "fp8_e4m3", "speculative": 3, "heads": 4, "kv_heads": 1},
        {"layout": "NHD", "index_dtype": "fp8_e4m3", "heads": 16, "kv_heads": 4, "layers": 1},
    ],
    ids=["bf16", "both e4m3", "e4m3, drafts, one KV head", "index e4m3, four KV heads"],
)
def test_steps_of_an_engine(vllm, version, more):
    """Chunked prefill, decode beside it, a shared prefix and decode again are right, eagerly and as a graph's padded batch."""
    engine = started(vllm, version, **more)
    if more.get("cache_dtype"):
        for layer in engine.model.layers:
            layer._k_scale.fill_(0.5)
            layer._v_scale.fill_(2.0)
    drafts = 1 + more.get("speculative", 0)
    run(engine, {"a": 300, "b": 37})
    run(engine, {"b": drafts, "a": 411})
    run(engine, {"b": drafts, "a": drafts, "c": 200})
    engine.share_prefix("d", "a", 640)
    run(engine, {"a": drafts, "b": drafts, "c": 129, "d": 70})
    run(engine, {"a": drafts, "d": drafts})
    run(engine, {"d": drafts, "a": drafts, "b": drafts}, pad_to=4)
    if drafts > 1:
        run(engine, {"a": drafts, "b": 1, "c": 2})


def test_new_tokens_of_decode_steps_are_prepared_here(vllm):
    """Steps with prompts, and layers whose heads the kernel does not prepare, stay with vLLM's own code."""
    engine = started(vllm, 26)
    layer = engine.model.layers[0]
    run(engine, {"a": 300})
    assert layer.prepared_by_vllm == 1
    run(engine, {"a": 1, "b": 2})
    assert layer.prepared_by_vllm == 2
    run(engine, {"a": 1, "b": 1})
    assert layer.prepared_by_vllm == 2
    layer.rotary_emb.rotary_dim = 63
    layer.__class__ = vllm_layer = type(layer).__mro__[1]
    sys.modules["openmsa.integrations.vllm.model"]._give(layer, "bf16")
    assert type(layer) is vllm_layer


def test_the_drafter_is_served(vllm):
    engine = started(vllm, 33, "MiniMaxM3MTP", layers=1)
    run(engine, {"a": 200, "b": 3})
    run(engine, {"a": 1, "b": 1})


def test_layers_have_our_classes_and_vllms_caches(vllm):
    engine = started(vllm, 26, index_dtype="fp8")
    layer = engine.model.layers[0]
    backend = sys.modules["openmsa.integrations.vllm.backend"]
    assert layer.get_attn_backend() is backend.OpenMSABackend
    assert layer.get_attn_backend().get_builder_cls() is backend.OpenMSAMetadataBuilder
    assert layer.indexer.index_cache.get_attn_backend() is backend.OpenMSAIndexBackend
    assert layer.indexer.index_cache.dtype == torch.float8_e4m3fn
    assert engine.config.attention_config.indexer_kv_dtype == "fp8"
    assert engine.config.compilation_config.cudagraph_num_of_warmups == 1
    assert len(engine.config.compilation_config.static_forward_context) == 2 * len(engine.model.layers)


def test_a_profiling_run_has_no_caches(vllm):
    engine = started(vllm, 33)
    layer, context = engine.model.layers[0], engine.made["vllm.forward_context"].get_forward_context()
    context.attn_metadata = None
    query, output = torch.zeros(4, 8 * DIM), torch.full((4, 8 * DIM), 3.0)
    assert layer.indexer(torch.zeros(4, 2 * DIM)) == (None, None)
    assert layer.impl.forward(layer, query, layer.kv_cache, output) is output
    assert (output == 3).all()


def test_queries_in_e4m3_are_refused(vllm):
    engine = started(vllm, 33)
    layer, query = engine.model.layers[0], torch.zeros(4, 8 * DIM)
    with pytest.raises(NotImplementedError, match="query_fp8 must be None"):
        layer.impl.forward(layer, query, layer.kv_cache, query, query_fp8=query)


def test_attention_needs_its_indexer_first(vllm):
    engine = started(vllm, 33)
    layer = engine.model.layers[0]
    engine.step({"a": 5})
    with pytest.raises(RuntimeError, match="must run before its attention"):
        layer.indexer.impl.take()


def test_both_caches_may_have_tables_of_their_own(vllm):
    """Prompts are then selected behind the index cache's own table."""
    engine = started(vllm, 33, layers=1)
    for builder in engine.builders.values():
        build = builder.build

        def own(prefix, common, build=build):
            common.block_table_tensor = common.block_table_tensor.clone()
            return build(prefix, common)

        builder.build = own
    run(engine, {"a": 300})
    run(engine, {"a": 1, "b": 130})


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of .* got 'fp8_e5m2'"),
        ({"index_dtype": "nvfp4"}, "indexer_kv_dtype"),
        ({"score_type": "mean"}, "sparse_score_type must be 'max'"),
        ({"speculative": 16}, "num_speculative_tokens must be at most 15 with 2 index heads a rank, got 16"),
        ({"speculative": 8, "heads": 16, "kv_heads": 8}, "num_speculative_tokens must be at most 7 with 8"),
    ],
)
def test_what_cannot_be_served_is_refused(vllm, more, message):
    with pytest.raises(NotImplementedError, match=message):
        started(vllm, 33, **more)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallel_ranks_are_refused(vllm, name):
    engine = started(vllm, 33)
    model = sys.modules["openmsa.integrations.vllm.model"]
    setattr(engine.config.parallel_config, name, 2)
    with pytest.raises(NotImplementedError, match=f"cannot serve layers.0.self_attn.attn: {name} must be 1"):
        model.serve(engine.model, engine.config, "bf16")


@pytest.mark.parametrize("names", [{"is_cuda": lambda: False}, {"has_device_capability": lambda capability: False}])
def test_other_devices_are_refused(vllm, names):
    engine = started(vllm, 33)
    vars(engine.made["vllm.platforms"].current_platform).update(names)
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0"):
        sys.modules["openmsa.integrations.vllm.model"].serve(engine.model, engine.config, "bf16")


def test_the_configuration_is_restored_when_a_constructor_fails(vllm):
    made = vllm(26)
    plugin.register()
    model = importlib.import_module("openmsa.integrations.vllm.model")
    config = configuration(26, index_dtype="fp8")
    config.compilation_config.static_forward_context["layers.0.self_attn.attn.index_cache"] = "taken"
    with pytest.raises(AssertionError):
        model.MiniMaxM3ForCausalLM(vllm_config=config)
    assert config.attention_config.indexer_kv_dtype == "fp8"
    assert set(made["vllm"].ModelRegistry.models) == set(plugin.MODELS)


def test_the_log_says_who_serves(vllm, caplog):
    with caplog.at_level(logging.INFO, "vllm.openmsa"):
        started(vllm, 26, cache_dtype="fp8")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "vllm.openmsa"]
    assert line.startswith("OpenMSA serves the 2 sparse layers of MiniMaxM3ForCausalLM")
    assert "8 query and 2 KV heads a rank, KV cache fp8, index cache bf16" in line


@pytest.mark.parametrize(
    ("lengths", "total", "expected"),
    [
        ([1, 1, 1], 3, (3, 1)),
        ([4, 4, 9], 17, (2, 4)),
        ([4, 4, 1], 9, (2, 4)),
        ([5, 1], 6, (0, 0)),
        ([2, 2, 0, 0], 8, (4, 2)),  # a graph's padded batch counts tokens for its padding
        ([2, 2, 0, 0], 4, (2, 2)),
        ([0, 0], 0, (0, 0)),
        ([0, 3], 3, (0, 0)),
        ([], 0, (0, 0)),
    ],
)
def test_leading_requests_of_one_length_are_decode_rows(vllm, lengths, total, expected):
    vllm(33)
    backend = importlib.import_module("openmsa.integrations.vllm.backend")
    assert backend.decode_requests(torch.tensor(lengths, dtype=torch.int32), 4, total) == expected


@pytest.mark.parametrize("asked", [None, "other", *plugin.PLUGINS, "other, openmsa"])
def test_it_registers_only_when_named(vllm, monkeypatch, asked):
    made = vllm(33)
    registry = made["vllm"].ModelRegistry
    registry.models.clear()
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked)
    monkeypatch.delitem(sys.modules, f"{M3}.nvidia.model")  # the model may not be imported yet
    plugin.plugin()
    assert registry.models == (plugin.MODELS if asked and "openmsa" in asked else {})
    assert f"{M3}.nvidia.model" not in sys.modules


def test_entry_points_are_declared():
    found = {p.name: p for p in entry_points(group="vllm.general_plugins") if p.name.startswith("openmsa")}
    if set(found) != set(plugin.PLUGINS):
        pytest.skip("installed without the entry points (not installed, or before they were declared)")
    assert {p.load() for p in found.values()} == {plugin.plugin}
