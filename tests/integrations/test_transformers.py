# SPDX-License-Identifier: MIT
"""MSA works inside a tiny random Llama: all blocks equal dense, padding and batching change nothing, decode equals prefill, and
refusals are clear."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

from openmsa.integrations.transformers import register  # noqa: E402

SPARSE = {"topk": 2, "block_size": 16}
EVERY = {"topk": 64, "block_size": 16}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def ids():
    return torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(1))


def logits(model, ids, settings=None, **kwargs):
    if settings is None and isinstance(model, LlamaForCausalLM):
        model.set_attn_implementation("sdpa")
    elif settings is None:
        pass  # a compiled model stays as it is
    else:
        register("openmsa-test", **settings)
        model.set_attn_implementation("openmsa-test")
    with torch.no_grad():
        return model(ids, **kwargs)


def test_all_blocks_is_dense(model, ids):
    torch.testing.assert_close(logits(model, ids, EVERY).logits, logits(model, ids).logits, atol=1e-5, rtol=0)


def test_few_blocks_is_not_dense(model, ids):
    assert (logits(model, ids, SPARSE).logits - logits(model, ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, ids, side):
    short = ids[1:, :57]
    pad = torch.zeros(1, 33, dtype=torch.long)
    row = torch.cat([pad, short] if side == "left" else [short, pad], dim=1)
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1] = torch.arange(90) >= 33 if side == "left" else torch.arange(90) < 57
    position = (mask.cumsum(1) - 1).clamp(min=0)
    out = logits(model, torch.cat([ids[:1], row]), SPARSE, attention_mask=mask, position_ids=position).logits
    torch.testing.assert_close(out[0], logits(model, ids[:1], SPARSE).logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(out[1][mask[1].bool()], logits(model, short, SPARSE).logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_steps_equal_one_prefill(model, ids, static, padded):
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, : 20 if padded else 0] = 0
    whole = logits(model, ids, SPARSE, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=128) if static else None
    steps, start = [], 0
    for stop in (70, 75, 76, 77, 90):
        out = logits(model, ids[:, start:stop], SPARSE, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        steps.append(out.logits)
        cache, start = out.past_key_values, stop
    torch.testing.assert_close(torch.cat(steps, 1)[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=0)


def test_generate(model, ids):
    register("openmsa-test", **EVERY)
    tokens = {}
    for name in ("sdpa", "openmsa-test"):
        model.set_attn_implementation(name)
        tokens[name] = model.generate(
            ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0
        )
    assert torch.equal(tokens["sdpa"], tokens["openmsa-test"])


@pytest.mark.parametrize("cached", ["no", "static"])
def test_a_compiled_model(model, ids, cached):
    """A model compiles to one graph, without and with padding; with a static cache the prefill and each step do."""
    torch._dynamo.reset()
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[1, :20] = 0
    whole = logits(model, ids, SPARSE, attention_mask=mask).logits
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=128) if cached == "static" else None
    steps = [(0, 70), (70, 75)] if cache else [(0, 90)]
    for start, stop in steps:
        out = logits(
            graph, ids[:, start:stop], None, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=cache is not None
        )
        found, expected = (x[mask[:, start:stop].bool()] for x in (out.logits, whole[:, start:stop]))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_an_index_branch_of_ones_own(model, ids):
    seen = []

    def shared(module, q, k):
        seen.append(module.layer_idx)
        return q.mean(1, keepdim=True), k.mean(1, keepdim=True)

    logits(model, ids, SPARSE | {"index": shared})
    assert seen == [0, 1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"attention_mask": torch.ones(2, 1, 90, 90, dtype=torch.bool)}, "only 2D padding masks"),
        ({"position_ids": torch.arange(45).repeat(2)[None], "use_cache": False}, "packed position_ids"),
        ({"position_ids": torch.arange(45).repeat(2)[None], "use_cache": True}, "packed position_ids"),
        ({"position_ids": torch.arange(45).repeat(2)[None], "attention_mask": torch.ones(2, 90)}, "packed position_ids"),
        (
            {"position_ids": torch.arange(45).repeat(2)[None], "attention_mask": (torch.arange(90) != 45).int().repeat(2, 1)},
            "packed position_ids",
        ),
        ({"sliding_window": 8}, "sliding_window"),
        ({"is_causal": False}, "bidirectional"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_refusals_name_what_they_refuse(model, ids, kwargs, message):
    with pytest.raises(NotImplementedError, match=message):
        logits(model, ids, SPARSE, **kwargs)


@pytest.mark.parametrize("settings", [{"topk": 0}, {"topk": 65}, {"block_size": 8}, {"topk": 1, "init_blocks": 1}])
def test_bad_settings_fail_when_registered(settings):
    with pytest.raises(ValueError, match="must be"):
        register("openmsa-bad", **settings)
    assert "openmsa-bad" not in transformers.AttentionInterface()


def test_what_no_model_could_call_fails_when_registered():
    with pytest.raises(TypeError, match=r"index must be a function of \(module, q, k\), got str"):
        register("openmsa-bad", index="mean")
    with pytest.raises(TypeError, match="name must be a str, as attn_implementation= takes it, got int"):
        register(5)
    assert not {"openmsa-bad", 5} & set(transformers.AttentionInterface())


def test_autocast(model, ids):
    """Position embedding leaves queries and keys in float32; attention takes all in bfloat16, with a cache or without."""
    with torch.autocast("cpu", torch.bfloat16):
        found = [logits(model, ids, EVERY, use_cache=use_cache).logits for use_cache in (True, False)]
        dense = logits(model, ids).logits
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)
    torch.testing.assert_close(found[0], dense, atol=2e-2, rtol=0)
