# SPDX-License-Identifier: MIT
"""transformers' MiniMax-M3 text model agrees, on our kernels and through its own hook, with its eager path; float64 is the
truth."""

import unittest.mock

import pytest
import torch

transformers = pytest.importorskip("transformers")
m3 = pytest.importorskip(
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl", reason="this transformers has no MiniMax-M3 model"
)

from openmsa.integrations.minimax_m3 import register_minimax_m3  # noqa: E402
from openmsa.integrations.minimax_m3_indexer import replace_indexers  # noqa: E402
from openmsa.testing.compare import assert_close  # noqa: E402
from tests.exact import DEVICES  # noqa: E402

OURS = "openmsa-m3-test"
LENGTH, VOCABULARY = 150, 64
PADDINGS = {"none": None, "left": (37, 0), "left of whole blocks": (48, 0), "right": (0, 29)}


def config(full_layers=1, head_dim=32, block_size=16, topk=3):
    return m3.MiniMaxM3VLTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        dense_intermediate_size=64,
        intermediate_size=32,
        shared_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_local_experts=4,
        num_experts_per_tok=2,
        mlp_layer_types=["dense", "dense", "sparse", "dense"],
        layer_types=["full_attention"] * full_layers + ["minimax_m3_sparse"] * (4 - full_layers),
        index_n_heads=2,
        index_head_dim=head_dim,
        index_block_size=block_size,
        index_topk_blocks=topk,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def build(**settings):
    register_minimax_m3(OURS)
    torch.manual_seed(0)
    made = m3.MiniMaxM3VLForCausalLM(config(**settings)).eval()
    made.set_experts_implementation("eager")  # the grouped product takes no float64
    return made


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture
def ids():
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def mask_of(padding):
    """Returns int64 [2, LENGTH]: the second row is padded."""
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding is not None:
        mask[1, : padding[0]] = 0
        mask[1, LENGTH - padding[1] :] = 0
    return mask


def logits(model, attention, ids, dtype=torch.float32, device="cpu", **kwargs):
    """In float64 eager attention weighs in float64 too. It masks by the lowest number of its dtype, and in float32 that of
    float64 is -inf: rows of padding would be NaN and, through their values, all rows of their sequence."""
    model = model.to(device, dtype)
    model.set_attn_implementation(attention)
    softmax = torch.nn.functional.softmax
    weigh = (lambda x, dim, dtype=None: softmax(x, dim)) if dtype == torch.float64 else softmax
    with torch.no_grad(), unittest.mock.patch("torch.nn.functional.softmax", weigh):
        return model(ids.to(device), **{k: v.to(device) if torch.is_tensor(v) else v for k, v in kwargs.items()})


def in_steps(model, attention, ids, stops, dtype, device, mask, static=False):
    """Returns the logits of tokens that come part after part, up to each of `stops`. With left padding these are not those of
    all tokens at once: a query that sees no key gives the mean of the values that its cache holds."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 20) if static else None
    steps, start = [], 0
    for stop in stops:
        more = {"attention_mask": mask[:, :stop], "past_key_values": cache, "use_cache": True}
        out = logits(model, attention, ids[:, start:stop], dtype, device, **more)
        steps.append(out.logits)
        cache, start = out.past_key_values, stop
    return torch.cat(steps, 1)


@pytest.fixture(autouse=True)
def restore(model):
    """Casting to bfloat16 and back would round the weights for the tests that follow."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    yield
    model.to("cpu", torch.float32).load_state_dict(weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_equal_the_eager_path(model, ids, padding, dtype, device):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("the kernels for GPUs take 16-bit inputs and float32; float32 matrix products of the model use TF32 there")
    mask = mask_of(PADDINGS[padding])
    model.to(dtype)  # the truth reads the same rounded weights
    tested = logits(model, OURS, ids, dtype, device, attention_mask=mask).logits
    honest = logits(model, "eager", ids, dtype, device, attention_mask=mask).logits
    truth = logits(model, "eager", ids, torch.float64, device, attention_mask=mask).logits
    real = mask.bool()
    assert_close("logits", *(x.cpu()[real] for x in (tested, honest, truth)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("static", [False, True])
def test_prefill_then_single_tokens_equal_one_prefill(model, ids, padding, static, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    mask = mask_of(PADDINGS[padding])
    model.to(dtype)
    whole = logits(model, OURS, ids, dtype, device, attention_mask=mask).logits
    honest = logits(model, "eager", ids, dtype, device, attention_mask=mask).logits
    truth = logits(model, "eager", ids, torch.float64, device, attention_mask=mask).logits
    stops, real = (120, *range(121, LENGTH + 1)), mask.bool()
    tested = in_steps(model, OURS, ids, stops, dtype, device, mask, static)
    honest_steps = in_steps(model, "eager", ids, stops, dtype, device, mask, static)
    true_steps = in_steps(model, "eager", ids, stops, torch.float64, device, mask, static)
    for found in ((tested, honest_steps, true_steps), (whole, honest, truth)):
        assert_close("logits", *(x.cpu()[real] for x in found))


@pytest.mark.parametrize("hole", [(90, 119), (64, 96), (3, 9), (70, 140)])
def test_right_padding_then_more_tokens(ids, hole):
    """A row with a hole is right: real tokens, padding, then what was generated."""
    model, mask = build(full_layers=0), mask_of(None)
    mask[1, hole[0] : hole[1]] = 0
    tested = logits(model, OURS, ids, attention_mask=mask).logits
    honest = logits(model, "eager", ids, attention_mask=mask).logits
    truth = logits(model, "eager", ids, torch.float64, attention_mask=mask).logits
    real = mask.bool()
    assert_close("logits", *(x[real] for x in (tested, honest, truth)))


@pytest.mark.parametrize("padding", ["none", "left of less than a block"])
def test_generate_says_what_the_eager_path_says(model, ids, padding):
    mask = mask_of(None if padding == "none" else (9, 0))
    tokens = []
    for attention in ("eager", OURS):
        model.set_attn_implementation(attention)
        tokens.append(model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    assert torch.equal(*tokens)


def test_few_blocks_matter(model, ids):
    """Otherwise the tests would not notice attention to all keys."""
    sparse = logits(model, OURS, ids).logits
    every = logits(build(topk=64), OURS, ids).logits
    assert (sparse - every).abs().max() > 1e-2


def test_batch_order_changes_nothing(model, ids):
    mask = mask_of(PADDINGS["left"])
    one = logits(model, OURS, ids, attention_mask=mask).logits
    other = logits(model, OURS, ids.flip(0), attention_mask=mask.flip(0)).logits.flip(0)
    real = mask.bool()
    torch.testing.assert_close(one[real], other[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"position_ids": torch.arange(75).repeat(2)[None], "use_cache": False}, "packed position_ids"),
        ({"attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)}, "only 2D padding masks"),
    ],
)
def test_refusals_name_what_they_refuse(model, ids, kwargs, message):
    with pytest.raises(NotImplementedError, match=message):
        logits(model, OURS, ids, **kwargs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("static", [False, True])
def test_our_selection_is_the_models(ids, padding, static, device):
    """The model with our scores, top-k and attention, prefilled in two parts and by single tokens, agrees with its eager
    path."""
    model, dtype = build(), torch.float32 if device == "cpu" else torch.bfloat16
    model.to(dtype)
    mask = mask_of(PADDINGS[padding])
    stops, real = (70, 140, *range(141, LENGTH + 1)), mask.bool()
    honest = in_steps(model, "eager", ids, stops, dtype, device, mask, static)
    truth = in_steps(model, "eager", ids, stops, torch.float64, device, mask, static)
    model.to(dtype)
    assert replace_indexers(model) == 3
    tested = in_steps(model, OURS, ids, stops, dtype, device, mask, static)
    assert_close("logits", *(x.cpu()[real] for x in (tested, honest, truth)))


@pytest.mark.parametrize("positions", ["counting", "from the first real token"])
def test_ids_are_the_models(ids, positions):
    mine, theirs = build(), build()
    replace_indexers(mine)
    taken = {}
    for name, m in (("mine", mine), ("theirs", theirs)):
        hook = m.model.layers[1].self_attn.indexer.register_forward_hook(
            lambda module, args, out, name=name: taken.update({name: out})
        )
        mask = mask_of((9, 0))
        given = (mask.cumsum(1) - 1).clamp(min=0) if positions != "counting" else None
        logits(m, "eager", ids, attention_mask=mask, position_ids=given)
        hook.remove()
    assert torch.equal(*(taken[name].sort(-1).values for name in ("mine", "theirs")))


@pytest.mark.parametrize("device", DEVICES)
def test_the_models_own_head_and_block_size(device):
    """With a head_dim and blocks of 128, one row padded on the left and everything ours, results are the model's."""
    model, dtype = build(head_dim=128, block_size=128, topk=2), torch.float32 if device == "cpu" else torch.bfloat16
    model.to(dtype)
    ids = torch.randint(3, VOCABULARY, (2, 700), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :200] = 0
    honest = logits(model, "eager", ids, dtype, device, attention_mask=mask).logits
    truth = logits(model, "eager", ids, torch.float64, device, attention_mask=mask).logits
    replace_indexers(model)
    tested = logits(model, OURS, ids, dtype, device, attention_mask=mask).logits
    real = mask.bool()
    assert_close("logits", *(x.cpu()[real] for x in (tested, honest, truth)))


def test_the_vision_towers_attention_is_pytorchs():
    """The vision tower attends bidirectionally, without blocks and without a mask, image by image."""
    register_minimax_m3(OURS)
    attend = transformers.AttentionInterface()[OURS]
    q, k, v = torch.randn(3, 1, 4, 30, 16, generator=torch.Generator().manual_seed(0)).unbind()
    tower = torch.nn.Module()
    out, _ = attend(tower, q, k, v, None, scaling=0.2, dropout=0.0, is_causal=False)
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2).transpose(1, 2)
    torch.testing.assert_close(out, truth)


def test_models_without_sparse_layers_are_refused():
    with pytest.raises(ValueError, match="sparse layers"):
        replace_indexers(torch.nn.Linear(2, 2))
