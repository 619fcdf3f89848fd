# SPDX-License-Identifier: MIT
"""The plug-in for SGLang serves a stand-in for SGLang, with its names and signatures, as a naive attention does; SGLang itself
is not installed."""

import logging
import math
import sys
import types
from importlib.metadata import entry_points

import pytest
import torch

from openmsa.integrations import sglang as plugin
from tests.integrations import sglang_stand_in as stand_in
from tests.integrations.sglang_stand_in import BLOCK, DIM, Engine, ForwardMode

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def sglang(monkeypatch):
    """Installs the stand-in of a version with the plug-in, on what looks like a GPU, and returns its modules."""

    def install(version):
        for name in [n for n in sys.modules if n.startswith("openmsa.integrations.sglang.")]:
            monkeypatch.delitem(sys.modules, name)
        made = stand_in.modules(version)
        for name, module in made.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        plugin.register()
        made["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
        return made

    yield install
    for name in ("backend", "caches", "sizes"):
        sys.modules.pop(f"openmsa.integrations.sglang.{name}", None)


def started(sglang, version, **more):
    return Engine(version, sglang(version), **more).start()


def naive(engine, layer, q, index_q, request, first):
    """Attends for the `q` ``[tokens, heads, dim]`` at the positions `first` (int ``[tokens]``) of a request, one by one."""
    slots = engine.slots[engine.rows[request], : engine.lengths[request]].long()
    k, v = (x[slots].double().cpu() for x in engine.pool.get_kv_buffer(layer.layer_id))
    k, v = k * (layer.k_scale_float or 1.0), v * (layer.v_scale_float or 1.0)
    index_k = engine.pool.get_index_k_buffer(layer.layer_id)[slots, 0].double().cpu()
    q, index_q = q.cpu(), index_q.cpu()
    group, out = engine.heads // engine.kv_heads, torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        seen = int(first[i]) + 1
        for h in range(engine.kv_heads):
            score = index_k[:seen] @ index_q[i, h].double()
            padded = torch.nn.functional.pad(score, (0, -seen % BLOCK), value=-math.inf)
            blocks = padded.view(-1, BLOCK).amax(1)
            blocks[-1] = math.inf  # its own block
            chosen = blocks.topk(min(4, blocks.numel())).indices
            keys = (chosen[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            keys = keys[keys < seen]
            heads = slice(h * group, (h + 1) * group)
            weight = (q[i, heads].double() @ k[keys, h].T * DIM**-0.5).softmax(-1)
            out[i, heads] = weight @ v[keys, h]
    return out


def run(engine, new, mode, **more):
    """Runs a step, and compares every layer's outputs with `naive`."""
    before = {request: engine.lengths.get(request, 0) for request in new}
    for layer, (q, index_q, out) in zip(engine.layers, engine.step(new, mode, **more), strict=True):
        at = 0
        for request, count in new.items():
            # Of many tokens some are compared, the first and the last among them.
            some = torch.linspace(0, count - 1, min(count, 24)).round().long()
            rows = at + some
            expected = naive(engine, layer, q[rows], index_q[rows], request, before[request] + some)
            torch.testing.assert_close(out[rows].double().cpu(), expected, atol=0.02, rtol=0.02)
            at += count
        if more.get("padding"):
            assert (out[at:] == 0).all()
        assert out.isfinite().all()


@pytest.mark.parametrize("version", [16, 23])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dtype": E4M3, "index_dtype": E4M3, "page": 64},
        {"dtype": E4M3, "drafts": 4, "heads": 4, "kv_heads": 1},
        {"page": 256, "heads": 16, "kv_heads": 4, "layers": (0,), "context": 2000},
    ],
    ids=["bf16", "both e4m3, pages of 64", "e4m3, drafts, one KV head", "pages of 256, four KV heads"],
)
def test_steps_of_an_engine(sglang, version, more):
    """Chunked prefill, a shared prefix, mixed batches, decode and verified drafts are right, eagerly and as a graph's padded
    batch."""
    engine = started(sglang, version, **more)
    if version == 23 and more.get("dtype"):
        for layer in engine.layers:
            layer.k_scale_float, layer.v_scale_float, layer.idx_k_scale_float = 0.5, 2.0, 0.25
    run(engine, {"a": 300, "b": 37}, EXTEND, padding=3)
    run(engine, {"b": 1, "a": 411}, ForwardMode.MIXED)
    engine.share_prefix("c", "a", 512)
    run(engine, {"c": 70}, EXTEND)
    engine.backend.init_cuda_graph_state(4, 16)
    run(engine, {"a": 1, "c": 1}, DECODE)
    run(engine, {"c": 1, "a": 1, "b": 1}, DECODE, pad_to=4)
    run(engine, {letter: 1 for letter in "abcdef"}, DECODE)  # more than the graphs hold
    if drafts := more.get("drafts"):
        run(engine, {"b": drafts, "c": drafts}, VERIFY)
        run(engine, {"c": drafts, "a": drafts, "b": drafts}, VERIFY, pad_to=4)
        run(engine, {"a": 1, "b": 1, "c": 1}, DECODE, pad_to=4)


def test_decode_buffers_stay_where_they_are(sglang):
    """A graph holds their addresses, also when a larger batch comes later."""
    engine = started(sglang, 23)
    sparse = engine.backend.sparse
    engine.backend.init_cuda_graph_state(2, 2)
    run(engine, {"a": 200, "b": 3}, EXTEND)
    run(engine, {"a": 1, "b": 1}, DECODE, pad_to=2)
    table, plan = sparse._step.page_table, sparse._step.plan
    run(engine, {"a": 1, "b": 1, "c": 1}, DECODE)
    assert sparse._step.plan is not plan
    run(engine, {"a": 130}, EXTEND)
    assert any(held.data_ptr() == table.data_ptr() for held, _ in sparse._tables)
    assert plan in sparse._plans.values()
    assert not plan.certified_keys


def test_a_known_decode_step_reads_no_lengths_on_the_host(sglang):
    engine = started(sglang, 16)
    run(engine, {"a": 5}, EXTEND)
    view = types.SimpleNamespace(forward_mode=DECODE, seq_lens=torch.empty(2, device="meta"), spec_info=None)
    engine.backend.init_forward_metadata_out_graph(view, in_capture=True)
    assert engine.backend.sparse._step.rows == 2


def test_idle_ranks_get_zeros(sglang):
    engine = started(sglang, 16)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.IDLE, seq_lens=torch.zeros(0))
    engine.backend.init_forward_metadata(batch)
    for rows in (0, 2):
        q = torch.ones(rows, 8, DIM)
        none, out = engine.backend.forward(q, None, None, engine.layers[0], batch, idx_q=q, idx_k=q)
        assert none is None
        assert out.shape == (rows, 8 * DIM)
        assert not out.any()


def test_batches_without_metadata_and_index_values_are_refused(sglang):
    engine = started(sglang, 23)
    batch = types.SimpleNamespace(forward_mode=ForwardMode.DRAFT_EXTEND_V2, seq_lens=torch.ones(1))
    engine.backend.init_forward_metadata(batch)
    q, layer = torch.ones(1, 8, DIM), engine.layers[0]
    with pytest.raises(NotImplementedError, match="without metadata"):
        engine.backend.forward(q, q, q, layer, batch, idx_q=q, idx_k=q)
    with pytest.raises(NotImplementedError, match="idx_v must be None"):
        engine.backend.forward(q, q, q, layer, batch, idx_q=q, idx_k=q, idx_v=q)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"page": 1}, "--page-size must divide 128 .* got 1; 128 is best"),
        ({"page": 96}, "--page-size must divide 128"),
        ({"dtype": torch.float8_e5m2}, "the KV cache must be of .* got torch.float8_e5m2"),
        ({"index_dtype": torch.float32}, "the index cache must be of .* got torch.float32"),
        ({"sparse_score_type": "lse"}, "sparse_score_type must be 'max'"),
        ({"sparse_disable_index_value": [0, 1, 0]}, r"sparse_disable_index_value must be set .* not for \[2\]"),
        ({"sparse_num_index_heads": 8}, "index heads must be 1 or its 2 KV heads, got 8"),
        ({"drafts": 4, "eagle_topk": 2}, "drafts must be chains"),
        ({"drafts": 4, "algorithm": "NGRAM"}, "drafts must be chains"),
        ({"drafts": 17}, "--speculative-num-draft-tokens must be at most 16 with 2 index heads a rank, got 17"),
        ({"drafts": 9, "heads": 16, "kv_heads": 8}, "--speculative-num-draft-tokens must be at most 8 with 8"),
    ],
)
@pytest.mark.parametrize("version", [16, 23])
def test_what_cannot_be_served_is_refused(sglang, version, more, message):
    with pytest.raises(NotImplementedError, match=message):
        started(sglang, version, **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: setattr(e.runner, "hisparse_coordinator", object()), "HiSparse must be off"),
        (lambda e: setattr(e.pool.main_pool, "kv_cache_layout", "hnd"), "layout of the KV cache must be 'nhd', got 'hnd'"),
        (lambda e: setattr(e.pool.main_pool, "is_quantized_kv_cache", True), "plain or E4M3 with one scale"),
        (lambda e: setattr(e.runner, "token_to_kv_pool", object()), "must be SGLang's MiniMaxSparseKVPool, got object"),
        (lambda e: setattr(e.made["sglang.srt.runtime_context"].parallel, "attn_cp_size", 2), "attn_cp_size must be 1.* got 2"),
        (
            lambda e: setattr(e.made["sglang.srt.runtime_context"].parallel, "attn_dcp_size", 2),
            "attn_dcp_size must be 1.* got 2",
        ),
        (
            lambda e: setattr(sys.modules["openmsa.integrations.sglang.sizes"], "is_tbo_enabled", lambda: True),
            "two-batch-overlap",
        ),
    ],
)
def test_other_servers_are_refused(sglang, change, message):
    engine = started(sglang, 23)
    change(engine)
    with pytest.raises(NotImplementedError, match=message):
        engine.start()


@pytest.mark.parametrize(("capability", "served"), [(None, False), ((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_gpus_that_are_served(sglang, monkeypatch, capability, served):
    engine = started(sglang, 23)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if served:
        engine.start()
    else:
        with pytest.raises(NotImplementedError, match=r"compute capability 8\.0"):
            engine.start()


def test_a_ranks_share_of_heads(sglang):
    engine = Engine(23, sglang(23), heads=64, kv_heads=1, sparse_num_index_heads=4)
    engine.made["sglang.srt.runtime_context"].parallel.attn_tp_size = 8
    sizes = engine.start().backend.sparse.sizes
    assert (sizes.num_q_heads, sizes.num_kv_heads, sizes.index_heads) == (8, 1, 1)


def test_forced_blocks_may_be_given_in_tokens(sglang):
    engine = Engine(16, sglang(16), sparse_init_tokens=130, sparse_local_tokens=128)
    config = engine.runner.model_config.hf_config.sparse_attention_config
    del config["sparse_init_block"], config["sparse_local_block"]
    sizes = engine.start().backend.sparse.sizes
    assert (sizes.init_blocks, sizes.local_blocks) == (2, 2)


def test_other_models_stay_sglangs(sglang):
    made = sglang(23)
    runner = types.SimpleNamespace(model_config=types.SimpleNamespace(hf_config=object()))
    assert made["sglang.srt.layers.attention.attention_registry"].attn_backend_wrapper(runner, "dense")[1] == "dense"


def test_the_log_says_who_serves(sglang, caplog):
    with caplog.at_level(logging.INFO, "sglang.srt.openmsa"):
        started(sglang, 16, dtype=E4M3)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "sglang.srt.openmsa"]
    assert line.startswith("OpenMSA serves the 2 sparse layers")
    assert "8 query and 2 KV heads a rank, KV cache torch.float8_e4m3fn, index cache torch.bfloat16, pages of 128" in line


@pytest.mark.parametrize(("asked", "hooks"), [(None, 0), ("other", 0), ("other, openmsa", 1)])
def test_the_plugin_acts_only_when_named(sglang, monkeypatch, asked, hooks):
    registered = sglang(23)["sglang.srt.plugins.hook_registry"].hooks
    registered.clear()
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", asked)
    plugin.plugin()
    assert [target for target, _, _ in registered] == [plugin.WRAPPER] * hooks


def test_the_entry_point_is_declared():
    found = {point.name: point.load() for point in entry_points(group="sglang.srt.plugins") if point.name == "openmsa"}
    if not found:
        pytest.skip("installed without the entry points (not installed, or before they were declared)")
    assert found == {"openmsa": plugin.plugin}
