# SPDX-License-Identifier: MIT
"""Converted models: a conversion without training selects as the group mean does, all blocks are dense attention, files keep
the branches, every cache gives what one prefill gives, the index loss trains the branches alone, and refusals leave a model as
it was."""

import copy
import inspect
import pickle
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

from openmsa.integrations.hugging_face import (  # noqa: E402
    ATTENTION,
    PagedCache,
    cache_argument,
    convert,
    load,
    prefill,
    stream,
)
from openmsa.integrations.transformers import register  # noqa: E402
from openmsa.modules import MSAConfig, collected_losses, index_branches, set_stage  # noqa: E402

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPARSE = {"index_topk_blocks": 3, "index_block_size": 16}
EVERY = {"index_topk_blocks": 64, "index_block_size": 16}
NAMED = ["Llama", "Mistral", "Qwen2", "Qwen3"]
NOT_NAMED = ["Granite", "Gemma", "Mixtral", "Qwen3Moe", "StableLm", "Arcee", "Nemotron"]


def plain(family="Llama", **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, **({"sliding_window": None} if "tral" in family else {}), **sizes}
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():  # a new model has norms of 1 and biases of 0
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, -0.3, 0.3)
            parameter.data += "norm" in name and "Gemma" not in family
    return model


def tokens(batch=2, length=90, seed=1):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


@pytest.mark.parametrize("family", NAMED + NOT_NAMED)
def test_conversion_without_training_is_the_group_mean(family):
    """The branches select as `group_mean_index` of the layer's own q and k does, but where queries are normed; with every block
    selected the model is the dense one, which "sdpa" gives again."""
    model, ids = plain(family), tokens()
    dense = logits(model, ids)
    register("openmsa-test", topk=3, block_size=16)
    model.set_attn_implementation("openmsa-test")
    wanted = logits(model, ids)
    model.set_attn_implementation("sdpa")
    assert convert(model, **SPARSE) is model
    assert type(model).__name__ == f"MSA{family}ForCausalLM"
    found = logits(model, ids)
    assert (found - dense).abs().max() > 1e-3
    if "Qwen3" not in family:
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(model, ids), dense, atol=0, rtol=0)
    torch.testing.assert_close(logits(convert(plain(family), **EVERY), ids), dense, atol=1e-5, rtol=0)


def test_dense_layers_stay_dense():
    model, ids = convert(plain(), dense_layers=[2, 0], **SPARSE), tokens()
    assert [hasattr(layer.self_attn, "index_branch") for layer in model.model.layers] == [False, True, False]
    some = logits(model, ids)
    all_three, none = logits(convert(plain(), **SPARSE), ids), logits(plain(), ids)
    for other in (all_three, none):
        assert (some - other).abs().max() > 1e-3


@pytest.mark.parametrize("family", [*NAMED, "Granite", "Mixtral", "Qwen3Moe"])
def test_files_keep_the_branches(family, tmp_path):
    model, ids = convert(plain(family), dense_layers=[1], initialise="random", **SPARSE), tokens()
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path / "inside")
    for read in (
        load(tmp_path),
        load(tmp_path, subfolder="inside"),
        load(str(tmp_path), dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert type(read) is type(model)
        assert index_branches(read)[0].config == index_branches(model)[0].config
        torch.testing.assert_close(logits(read, ids), logits(model, ids), atol=0, rtol=0)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    torch.testing.assert_close(logits(dense, ids), logits(plain(family), ids), atol=0, rtol=0)
    assert load(tmp_path, dtype=torch.bfloat16).model.layers[0].self_attn.index_branch.q_proj.weight.dtype == torch.bfloat16


def test_a_config_alone_makes_a_model():
    config = convert(plain(), **SPARSE).config
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    assert len(index_branches(model)) == 3
    assert type(pickle.loads(pickle.dumps(config))) is type(config)


def mask_of(ids, side, padded):
    mask = torch.ones_like(ids)
    mask[1] = (torch.arange(ids.shape[1]) >= padded) if side == "left" else (torch.arange(ids.shape[1]) < ids.shape[1] - padded)
    return mask


@pytest.mark.parametrize("kind", ["dynamic", "configured", "static", "paged"])
@pytest.mark.parametrize("padded", [0, 33])
def test_cached_steps_equal_one_prefill(kind, padded):
    """Prefill in chunks and decode give what one prefill gives, in a batch with a row of left padding, whose real tokens are as
    if they stood alone."""
    model, ids = convert(plain(), dense_layers=[1], **SPARSE), tokens()
    mask = mask_of(ids, "left", padded)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = {
        "dynamic": lambda: DynamicCache(),
        "configured": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=100),
        "paged": lambda: PagedCache(model),
    }[kind]()
    alone = [logits(model, ids[:1]), logits(model, ids[1:, padded:])]
    parts, start = [], 0
    for stop in (50, 51, 88, 89, 90):
        options = {"attention_mask": mask[:, :stop]} if padded else {}
        step = slice(start, stop)
        options |= {"position_ids": positions[:, step], "past_key_values": cache, "use_cache": True}
        parts.append(logits(model, ids[:, step], **options))
        start = stop
    found = torch.cat(parts, 1)
    torch.testing.assert_close(found[:1], alone[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1:, padded:], alone[1], atol=1e-5, rtol=0)
    if kind == "paged":
        assert cache.held.lengths == [90, 90 - padded]
        pages = 6 + -(-(90 - padded) // 16)
        assert cache.memory() >= pages * 16 * 16 * 2 * 4 * (3 * 2 + 2)


def test_the_documented_call_warns_of_nothing():
    """The line that docs/hugging-face.md shows names the cache as this version of transformers does."""
    text = (Path(__file__).parents[2] / "docs/hugging-face.md").read_text()
    (line,) = [line for line in text.splitlines() if line.startswith("model.generate(")]
    model, ids = convert(plain(), **SPARSE), tokens()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False}
    names = {"model": model, "inputs": inputs, "PagedCache": PagedCache, "cache_argument": cache_argument}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = eval(line, names)
    assert not [str(x.message) for x in said if "deprecated" in str(x.message) and "past_key_values" in str(x.message)]
    assert torch.equal(found, model.generate(**inputs))


def test_a_layer_may_call_its_cache_cache():
    """transformers 5.24 renamed past_key_values to cache."""
    model, ids = plain(), tokens()
    for layer in model.model.layers:
        layer = layer.self_attn
        if "past_key_values" in inspect.signature(layer.forward).parameters:

            def forward(hidden_states, cache=None, own=layer.forward, **kwargs):
                return own(hidden_states, past_key_values=cache, **kwargs)

            def rename(layer, args, kwargs):
                return args, {{"past_key_values": "cache"}.get(name, name): x for name, x in kwargs.items()}

            layer.forward = forward
            layer.register_forward_pre_hook(rename, with_kwargs=True)
    convert(model, **SPARSE)
    whole = logits(model, ids)
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=100), PagedCache(model)):
        steps = [logits(model, x, past_key_values=cache, use_cache=True) for x in ids.split((70, 1, 19), 1)]
        torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "static", "paged"])
@pytest.mark.parametrize("packed", ["in a row", "after a row", "after padding"])
def test_packed_positions_are_refused_with_a_cache(kind, packed):
    """Beside a cache transformers does not notice several documents in one row; the cache stays as it was."""
    model, ids = convert(plain(), **SPARSE), tokens()
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=100),
        "paged": lambda: PagedCache(model),
    }[kind]()
    options = {"past_key_values": cache, "use_cache": True}
    logits(model, ids[:, :40], **options)
    positions = torch.arange(40, 90).repeat(2, 1)
    if packed == "in a row":
        positions[1, 30:] -= positions[1, 30].item()
    elif packed == "after a row":
        positions -= 40
    else:
        options["attention_mask"] = mask = torch.ones(2, 90, dtype=torch.bool)
        mask[1, 40:50] = False
        positions[1, 10:] -= 20
    with pytest.raises(NotImplementedError, match=r"packed position_ids \(several documents in one row\) with a cache"):
        logits(model, ids[:, 40:], position_ids=positions, **options)
    assert int(cache.get_seq_length()) == 40


@pytest.mark.parametrize("padded", [0, 20])
def test_generate_gives_the_same_tokens_over_every_cache(padded):
    model, ids = convert(plain(), **SPARSE), tokens(length=70)
    options = {"attention_mask": mask_of(ids, "left", padded), "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    wanted = model.generate(ids, use_cache=False, **options)
    assert wanted.shape == (2, 82)
    for more in (
        {},
        {"past_key_values": PagedCache(model)},
        {"past_key_values": PagedCache(model, tokens=100, page_size=32), "prefill_chunk_size": 32},
        {"cache_implementation": "static", "disable_compile": True},
    ):
        assert torch.equal(model.generate(ids, **options, **more), wanted), more
    beams = model.generate(ids, num_beams=3, **options)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **options))


@pytest.mark.parametrize(("kv_format", "index_format"), [("e4m3", "int8"), ("nvfp4", "e4m3"), ("plain", "certified")])
def test_formats_of_the_paged_cache(kv_format, index_format):
    model, ids = convert(plain(), **SPARSE).bfloat16(), tokens()
    exact, stored = PagedCache(model), PagedCache(model, kv_format=kv_format, index_format=index_format)
    near, found = (logits(model, ids, past_key_values=cache, use_cache=True) for cache in (exact, stored))
    assert torch.nn.functional.cosine_similarity(near.flatten().float(), found.flatten().float(), 0) > 0.97
    assert (stored.memory() < exact.memory()) == (kv_format != "plain")


def test_stream_continues_what_prefill_read():
    model, ids = convert(plain(), **SPARSE), tokens(batch=1, length=70)
    wanted = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0, 70:].tolist()
    for chunk in (7, 4096):
        cache = PagedCache(model)
        *_, last = prefill(model, ids, cache, chunk=chunk)
        assert list(stream(model, last, cache, max_new_tokens=12)) == wanted
    cache = PagedCache(model)
    *_, last = prefill(model, ids, cache)
    at = next(i for i, token in enumerate(wanted) if token not in wanted[:i] and i > 0)
    assert list(stream(model, last, cache, max_new_tokens=12, stop=frozenset([wanted[at]]))) == wanted[:at]
    draws = [
        list(stream(model, *_start(model, ids), max_new_tokens=9, temperature=2.0, generator=torch.Generator().manual_seed(s)))
        for s in (0, 0, 1)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert list(stream(model, *_start(model, ids), max_new_tokens=12, temperature=1e-45)) == wanted


def _start(model, ids):
    cache = PagedCache(model)
    *_, last = prefill(model, ids, cache)
    return last, cache


def test_a_prefilled_cache_serves_generate_and_is_used_again():
    model, ids = convert(plain(), **SPARSE), tokens(batch=1, length=70)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    wanted, cache = model.generate(ids, **options), PagedCache(model)
    for _ in range(2):
        list(prefill(model, ids[:, :60], cache))
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
        cache.reset()
        assert cache.get_seq_length() == 0


def test_a_cache_lacks_no_index_key():
    """A paged cache takes the index keys of tokens that are read in the stage "dense"; others are refused afterwards."""
    model, ids = convert(plain(), **SPARSE), tokens()

    def read(stage, part, cache):
        set_stage(model, stage)
        logits(model, part, past_key_values=cache, use_cache=True)

    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=100)):
        read("dense", ids[:, :50], cache)
        with pytest.raises(ValueError, match="past_key_values must hold the index keys of its 50 tokens, got 0"):
            read("sparse", ids[:, 50:], cache)
    cache = PagedCache(model)
    for stage, part in zip(("sparse", "dense", "sparse"), ids.split(30, 1), strict=True):
        read(stage, part, cache)
    assert [layer.index.seq_lens.tolist() for layer in cache.held.layers] == [[90, 90]] * 3
    set_stage(model, "dense")
    without = PagedCache(model)
    with pytest.raises(ValueError, match=r"must hold index keys .*, got a PagedCache that was made in the stage 'dense'"):
        read("sparse", ids, without)


def test_a_dense_stage_holds_no_index_keys():
    model, ids = convert(plain(), **SPARSE), tokens()
    with_keys = PagedCache(model)
    logits(model, ids, past_key_values=with_keys, use_cache=True)
    set_stage(model, "dense")
    without = PagedCache(model)
    found = logits(model, ids, past_key_values=without, use_cache=True)
    torch.testing.assert_close(found, logits(plain(), ids), atol=1e-5, rtol=0)
    assert without.memory() < with_keys.memory() * 0.7


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_backward_trains_branches_and_model(stage, checkpointing):
    """The branches' gradients are those of their losses alone, the model's those of the language model's loss alone."""
    model, ids = convert(plain(), initialise="random", **SPARSE).train(), tokens()
    set_stage(model, stage, loss_coefficient=0.5)
    with collected_losses(model) as losses:
        out = model(ids, labels=ids)
    assert len(losses) == 3
    torch.stack(losses).sum().backward(retain_graph=True)
    of_branches = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    assert set(of_branches) == {name for name, _ in model.named_parameters() if "index_branch" in name}
    model.zero_grad()
    out.loss.backward()
    of_model = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    assert not any("index_branch" in name for name in of_model)
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, (of_branches | of_model)[name], atol=1e-6, rtol=1e-4, msg=name)


def test_autocast():
    """Autocast runs float32 weights in bfloat16 products, over a cache and in training."""
    model, ids = convert(plain(), **SPARSE).train(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
        assert model(ids, labels=ids, use_cache=False).loss == loss
        cached = logits(model, ids, past_key_values=PagedCache(model), use_cache=True)
        whole = logits(model, ids)
    torch.testing.assert_close(cached, whole, atol=2e-2, rtol=0)
    loss.backward()
    branch = index_branches(model)[0]
    assert branch.q_proj.weight.grad.dtype == torch.float32
    assert branch.q_proj.weight.grad.abs().max() > 0


def test_it_compiles():
    model, ids = convert(plain(), dense_layers=[0], **SPARSE), tokens()
    wanted = logits(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, attention_mask=torch.ones_like(ids), use_cache=False), wanted)


def test_static_decode_compiles():
    model, ids = convert(plain(), **SPARSE), tokens()
    wanted = logits(model, ids)
    cache = StaticCache(config=model.config, max_cache_len=100)
    mask = torch.ones_like(ids)
    logits(model, ids[:, :-1], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    options = {"attention_mask": mask, "position_ids": torch.full((2, 1), ids.shape[1] - 1)}
    found = logits(compiled, ids[:, -1:], past_key_values=cache, use_cache=True, **options)
    torch.testing.assert_close(found[:, 0], wanted[:, -1], atol=1e-5, rtol=0)


def test_a_model_that_cannot_be_run_is_refused():
    model = plain()
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(3, 4)
    with pytest.raises(NotImplementedError, match="LlamaForCausalLM could not be run to find its attention: RuntimeError: "):
        convert(model, **SPARSE)
    assert type(model) is transformers.LlamaForCausalLM


def test_a_model_whose_weights_are_not_finite_is_refused():
    model = plain()
    model.model.layers[0].self_attn.q_proj.weight.data[3] = float("nan")
    with pytest.raises(
        ValueError, match=r"layer 0 \(LlamaAttention\) must compute finite queries, keys and values, got others"
    ):
        convert(model, **SPARSE)


@pytest.mark.parametrize(
    ("family", "options", "error", "message"),
    [
        ("Llama", {"initialise": "zeros"}, ValueError, "initialise must be one of 'group_mean', 'random', got 'zeros'"),
        ("Llama", {"dense_layers": 1}, TypeError, r"dense_layers must be numbers of layers, such as \[0, 1\], got int"),
        ("Llama", {"dense_layers": [3]}, ValueError, "dense_layers must name layers from 0 to 2, got 3"),
        ("Llama", {"dense_layers": [0, 1, 2]}, ValueError, "dense_layers must leave a layer to convert, got all 3"),
        ("Llama", {"index_head_dim": 32}, ValueError, r"index_head_dim must be that of layer 0 \(LlamaAttention\) \(16\)"),
        ("Llama", {"index_n_key_heads": 1}, ValueError, r"index_n_key_heads must be that of .* \(2\) .*, got 1: use init"),
        ("Llama", {"index_topk_blocks": 99}, ValueError, "index_topk_blocks must be from 1 to 64, got 99"),
        ("Llama", {"index_norm": True}, ValueError, "index_norm must be False, as .* has no q_norm, got True"),
        ("Qwen2", {"index_bias": False}, ValueError, "index_bias must be True, as q_proj of .* has a bias, got False"),
        ("Llama", {"config": MSAConfig(3), "initialise": "random"}, ValueError, r"index_n_heads must be the KV heads of"),
        ("Llama", {"config": MSAConfig(2), "index_topk_blocks": 3}, ValueError, "config must be None where fields are given"),
        ("Olmo2", {}, NotImplementedError, r"q_norm of layer 0 .* must norm each head alone \(16 weights\), got \(96,\): use"),
        ("Phi3", {}, NotImplementedError, "must have a Linear q_proj, got NoneType: use initialise='random'"),
        ("Cohere", {}, NotImplementedError, "must turn the halves of its heads, got cos and sin whose halves differ"),
        ("Helium", {}, NotImplementedError, "index keys of layer 0 .* must be those of its own projection, .* got others"),
        ("Gemma2", {}, NotImplementedError, "cannot serve a mask other than causal"),
        ("GPTNeo", {}, (NotImplementedError, TypeError), "model must read its attention from transformers' AttentionInterface"),
        (
            "GPTNeoX",
            {"initialise": "random"},
            NotImplementedError,
            "must take its cache as past_key_values or cache, as index keys",
        ),
        ("Lfm2", {"initialise": "random"}, NotImplementedError, "attention in each of its 3 layers, got it in 1, 2 alone"),
        (
            "DiffLlama",
            {},
            NotImplementedError,
            r"layer 0 \(DiffLlamaAttention\) must attend, once, to the keys and values that",
        ),
        (
            "JetMoe",
            {"initialise": "random"},
            NotImplementedError,
            r"layer 0 \(JetMoeAttention\) must attend, once, to the keys",
        ),
        ("Llama", {"config": 3}, TypeError, "config must be an openmsa.modules.MSAConfig or None, got int"),
        ("Llama", {"index_topk": 3}, ValueError, "an MSAConfig must have no fields but .*, got index_topk"),
        ("OPT", {}, NotImplementedError, "must be given position_embeddings, cos and sin, got NoneType"),
    ],
)
def test_refusals_leave_the_model_as_it_was(family, options, error, message):
    sizes = {
        "GPTNeo": {"attention_types": [[["global"], 3]]},
        "Lfm2": {"layer_types": ["conv", "full_attention", "full_attention"]},
    }.get(family, {})
    model, ids = plain(family, **sizes), tokens()
    before, kind, names = logits(model, ids), type(model), [name for name, _ in model.named_parameters()]
    with pytest.raises(error, match=message):
        convert(model, **options)
    assert type(model) is kind
    assert [name for name, _ in model.named_parameters()] == names
    assert not hasattr(model.config, "msa")
    assert not any(module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(logits(model, ids), before, atol=0, rtol=0)


def test_other_refusals(tmp_path):
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        convert(torch.nn.Linear(2, 2))
    model = convert(plain(), **SPARSE)
    with pytest.raises(ValueError, match="model must have no index branches yet, got MSALlamaForCausalLM"):
        convert(model)
    with pytest.raises(NotImplementedError, match="model must be what AutoModelForCausalLM makes of its configuration, got Ll"):
        convert(plain().model)
    plain().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must hold a converted model, got one of type 'llama': convert it first"):
        load(tmp_path)
    ids = tokens()
    with pytest.raises(NotImplementedError, match="PagedCache must be given to a converted model that runs its own attention"):
        logits(plain(), ids, past_key_values=PagedCache(model), use_cache=True)
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotImplementedError, match="PagedCache must be given to a converted model that runs its own attention"):
        logits(model, ids, past_key_values=PagedCache(model), use_cache=True)
    model.set_attn_implementation(ATTENTION)
    logits(model, ids, past_key_values=(cache := PagedCache(model)), use_cache=True)
    with pytest.raises(
        NotImplementedError, match="must be given to a model on one device, got layer 1 on meta and layer 0 on cpu"
    ):
        cache.step(1, torch.empty(2, 1, 64, device="meta"), None)
    with pytest.raises(NotImplementedError, match="cannot reorder sequences"):
        model.generate(ids, num_beams=2, max_new_tokens=4, past_key_values=PagedCache(model))
    with pytest.raises(ValueError, match="temperature must be at least 0, got -1"):
        next(stream(model, torch.zeros(1, 64), PagedCache(model), max_new_tokens=1, temperature=-1.0))
    with pytest.raises(ValueError, match="format must be 'plain' or one of"):
        PagedCache(model, kv_format="int8")
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        PagedCache(model, page_size=0)
    cache = PagedCache(model)
    mask = torch.ones(2, 1, 90, 90, dtype=torch.bool).tril()
    with pytest.raises(NotImplementedError, match=r"cannot serve an attention_mask of shape \(2, 1, 90, 90\)"):
        logits(model, ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=r"ids must have shape \[batch, length\] with a token at least, got \(2, 0\)"):
        list(prefill(model, ids[:, :0], cache))
    with pytest.raises(ValueError, match=r"logits must have shape \[1, vocabulary\], of one sequence, got \(2, 64\)"):
        list(stream(model, torch.zeros(2, 64), cache, max_new_tokens=1))


def test_padding_changes_no_index_loss():
    sizes = {"vocab_size": 64, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}
    model = convert(LlamaForCausalLM(LlamaConfig(**sizes, **heads)), index_topk_blocks=2, index_block_size=16)
    branch, ids, found = index_branches(model)[0], torch.randint(3, 64, (1, 50)), []
    for padding in (0, 50, 450):
        nothing = torch.zeros(1, padding, dtype=torch.long)
        model.zero_grad()
        mask = torch.cat((nothing, torch.ones_like(ids)), 1)
        model(torch.cat((nothing, ids), 1), attention_mask=mask, logits_to_keep=1).logits.sum().backward()
        found.append((branch.index_loss, branch.q_proj.weight.grad.clone()))
    for loss, grad in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-4, atol=0)
        torch.testing.assert_close(grad, found[0][1], rtol=1e-3, atol=1e-5)
