# SPDX-License-Identifier: MIT
"""An MSAttention layer computes what plain PyTorch in float64 does, in every stage, with its gradients, however sequences are
handed over and whatever recomputes or compiles it."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from openmsa import Sequences
from openmsa.modules import STAGES, IndexBranch, MSACache, MSAConfig, MSAttention, Rotary, collected_losses, rotate, set_stage
from tests.modules import truth

ROOT = Path(__file__).parents[2]
HIDDEN, HEADS, KV_HEADS, DIM, BASE = 40, 6, 2, 32, 500.0
# 24 of a head's 32 elements turn, and 8 or all of an index vector's.
CONFIG = MSAConfig(2, index_head_dim=16, index_block_size=16, index_topk_blocks=3, index_rotary_dim=8)
CONFIGS = {
    "M3's": CONFIG,
    "one index head": dataclasses.replace(CONFIG, index_n_heads=1, index_local_blocks=2),
    "own keys": dataclasses.replace(
        CONFIG, index_n_key_heads=2, index_head_dim=48, index_norm=False, index_init_blocks=1, index_rotary_dim=None
    ),
    "another norm": dataclasses.replace(CONFIG, index_rotary_dim=2, index_norm_eps=1e-3),
}


def made(config=CONFIG, **options):
    torch.manual_seed(0)
    layer = MSAttention(HIDDEN, HEADS, KV_HEADS, DIM, config, dtype=torch.float64, **options)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.4)
    return layer


def embedded(positions, dim=24):
    """Returns what `Rotary` gives, in float64."""
    angles = positions[:, None].double() * BASE ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return tuple(torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))


def test_rotary_gives_both_halves_alike():
    positions = torch.tensor([[0, 1, 7], [100, 2000, 5]])
    for mine, other in zip(Rotary(24, BASE)(positions), embedded(positions.flatten()), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.flatten(0, 1).double(), other, rtol=0, atol=3e-4)


def tokens(total, seed=1):
    return torch.randn(total, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def expected(layer, lens, hidden, grad, stage, coefficient):
    """Returns output, index loss, and gradients by hidden and by each parameter."""
    config = layer.index_branch.config
    weights = {name: x.detach().clone().requires_grad_() for name, x in layer.state_dict().items()}
    hidden = hidden.detach().clone().requires_grad_()
    width = 24  # of cos
    index_rotary = config.index_rotary_dim or min(width, config.index_head_dim)
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "rotary_dim": width, "index_rotary_dim": index_rotary}
    results = [truth.layer(weights, config, part, **sizes, base=BASE, stage=stage) for part in hidden.split(lens)]
    out = torch.cat([out for out, _ in results])
    total, loss = (out * grad).sum(), None
    if stage != "dense":
        loss = sum(divergence for _, divergence in results) * coefficient / (sum(lens) * config.index_n_heads)
        total = total + loss
    grads = torch.autograd.grad(total, [hidden, *weights.values()], allow_unused=True)
    return out.detach(), loss, grads


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("stage", STAGES)
def test_values_and_gradients(config, stage):
    layer, lens = made(config, stage=stage, loss_coefficient=0.3), [77, 1, 40]
    hidden, grad = tokens(sum(lens)).requires_grad_(), tokens(sum(lens), seed=2)
    positions = torch.cat([torch.arange(n) for n in lens])
    out = layer(hidden, *embedded(positions), Sequences.from_lengths(lens, lens))
    names, parameters = zip(*layer.named_parameters(), strict=True)
    found = torch.autograd.grad((out * grad).sum(), [hidden, *parameters], allow_unused=True)
    wanted, loss, grads = expected(layer, lens, hidden, grad, stage, 0.3)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    if loss is None:
        assert layer.index_loss is None
    else:
        torch.testing.assert_close(layer.index_loss, loss.detach(), rtol=1e-10, atol=1e-10)
        assert not layer.index_loss.requires_grad
    for name, mine, other in zip(("hidden", *names), found, grads, strict=True):
        assert (mine is None) == (other is None), name
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_a_batch_is_packed_sequences():
    layer, hidden = made(), tokens(3 * 50).view(3, 50, HIDDEN)
    cos, sin = embedded(torch.arange(50))
    batch = layer(hidden, cos, sin)
    packed = layer(hidden.flatten(0, 1), cos.repeat(3, 1), sin.repeat(3, 1), Sequences.from_lengths([50] * 3, [50] * 3))
    torch.testing.assert_close(batch.flatten(0, 1), packed, rtol=0, atol=0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_steps_over_a_cache_equal_one_forward(stage, config):
    """Prefill in chunks and decode give what one forward gives, for sequences of different lengths, some of which pause, over a
    cache that grows."""
    layer, lens, steps = made(config, stage=stage), [83, 0, 37], [(40, 0, 1), (0, 0, 33), (41, 0, 1), (1, 0, 1), (1, 0, 1)]
    hidden = tokens(sum(lens))
    cache = MSACache(1, 3, KV_HEADS, DIM, config, page_size=16, dtype=torch.float64)
    with torch.no_grad():
        whole = layer(hidden, *embedded(torch.cat([torch.arange(n) for n in lens])), Sequences.from_lengths(lens, lens))
        rows, at = [x.split(1) for x in hidden.split(lens)], [0, 0, 0]
        parts = [[], [], []]
        for step in steps:
            cache.extend(step)
            new = [rows[b][at[b] + i] for b in range(3) for i in range(step[b])]
            out = layer(torch.cat(new), *embedded(cache.positions), cache=cache.layers[0])
            for b, part in enumerate(out.split(step)):
                parts[b].append(part)
                at[b] += step[b]
    assert cache.lengths == lens
    torch.testing.assert_close(torch.cat([x for part in parts for x in part]), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_the_loss_survives_activation_checkpointing(stage):
    """A loss that is attached to the output is found again by the recomputation, once."""
    layer, hidden = made(stage=stage), tokens(60).requires_grad_()
    position = embedded(torch.arange(60))

    def gradients(run):
        out = run(lambda x: layer(x, *position), hidden)
        return torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()])

    plain = gradients(lambda function, x: function(x))
    again = gradients(lambda function, x: checkpoint(function, x, use_reentrant=False))
    for mine, other in zip(again, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_collected_losses_reach_the_index_branch_alone():
    layer, hidden = made(loss_coefficient=0.7), tokens(60)
    position = embedded(torch.arange(60))
    names = [name for name, _ in layer.named_parameters()]
    with collected_losses(layer) as losses:
        layer(hidden, *position)
        layer(hidden, *position)
    first = torch.autograd.grad(losses[0], list(layer.parameters()), allow_unused=True)
    assert len(losses) == 2
    assert [name for name, x in zip(names, first, strict=True) if x is not None] == [
        name for name in names if name.startswith("index_branch")
    ]
    attached = torch.autograd.grad(layer(hidden, *position).sum(), list(layer.parameters()))
    for name, mine, other in zip(names, first, attached, strict=True):
        if name.startswith("index_branch"):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_no_loss_without_gradients_or_coefficient():
    layer, hidden = made(), tokens(60)
    position = embedded(torch.arange(60))
    with torch.no_grad():
        quiet = layer(hidden, *position)
    assert layer.index_loss is None
    loud = layer(hidden, *position)
    assert layer.index_loss > 0
    torch.testing.assert_close(quiet, loud, rtol=1e-12, atol=1e-12)
    layer.loss_coefficient = 0.0
    out = layer(hidden, *position)
    assert layer.index_loss is None
    out.sum().backward()
    assert all(x.grad is None for x in layer.index_branch.parameters())
    assert layer.q_proj.weight.grad is not None


def test_few_steps_lower_the_index_loss():
    layer, hidden = made(stage="warmup"), tokens(96)
    position = embedded(torch.arange(96))
    optimizer = torch.optim.Adam(layer.index_branch.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        layer(hidden, *position).sum().backward()
        optimizer.step()
        losses.append(float(layer.index_loss))
    assert losses[-1] < losses[0] / 2


def test_it_compiles_without_a_break():
    layer, hidden = made(loss_coefficient=0.5), tokens(64).view(1, 64, HIDDEN).requires_grad_()
    position = embedded(torch.arange(64))
    wanted = torch.autograd.grad(layer(hidden, *position).square().sum(), [hidden, *layer.parameters()])
    loss = layer.index_loss
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(hidden, *position).square().sum(), [hidden, *layer.parameters()])
    torch.testing.assert_close(layer.index_loss, loss)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_stages_are_set_for_a_whole_model():
    model = torch.nn.ModuleList([made(), made(stage="dense")])
    set_stage(model, "warmup", loss_coefficient=0.25)
    assert [(x.stage, x.loss_coefficient) for x in model] == [("warmup", 0.25)] * 2
    set_stage(model, loss_coefficient=2)
    assert [(x.stage, x.loss_coefficient) for x in model] == [("warmup", 2.0)] * 2
    with pytest.raises(ValueError, match=r"stage must be one of 'dense', 'warmup', 'sparse', got 'wet'"):
        set_stage(model, "wet")
    with pytest.raises(ValueError, match=r"model must have layers with an IndexBranch, got Linear without any"):
        set_stage(torch.nn.Linear(2, 2), "dense")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "hot"}, "stage must be one of 'dense', 'warmup', 'sparse', got 'hot'"),
        ({"loss_coefficient": -1.0}, r"loss_coefficient must be at least 0, got -1.0"),
        ({"rotary_dim": 7}, "rotary_dim must be even, got 7"),
        ({"config": dataclasses.replace(CONFIG, index_n_heads=3)}, r"index_n_heads must be num_kv_heads \(2\) or 1, got 3"),
        ({"norm_eps": -1.0}, "norm_eps must be at least 0, got -1.0"),
        ({"config": None}, "config must be an openmsa.modules.MSAConfig, got NoneType"),
    ],
)
def test_refused_layers(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MSAttention(HIDDEN, HEADS, KV_HEADS, DIM, **({"config": CONFIG} | options))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lead", [(0,), (0, 7), (3, 0)])
def test_no_token_gives_no_row(stage, lead):
    layer, hidden = made(stage=stage), torch.empty(*lead, HIDDEN, dtype=torch.float64)
    out = layer(hidden, *embedded(torch.arange(lead[-1])))
    assert out.shape == hidden.shape
    out.sum().backward()


@torch.no_grad()
def test_a_step_may_bring_no_token():
    layer, cache, hidden = made(), MSACache(1, 2, KV_HEADS, DIM, CONFIG, dtype=torch.float64), tokens(20)
    found = []
    for part, new in zip(hidden.split([19, 0, 1]), ([19, 0], [0, 0], [1, 0]), strict=True):
        cache.extend(new)
        found.append(layer(part, *embedded(cache.positions), cache=cache.layers[0]))
    torch.testing.assert_close(torch.cat(found), layer(hidden, *embedded(torch.arange(20))))


def test_frequencies_stay_float32():
    """In 16 bits a far position would be turned by quite another angle."""
    far = torch.tensor([100_001])
    for mine, wanted in zip(Rotary(64).bfloat16()(far), Rotary(64)(far), strict=True):
        assert torch.equal(mine, wanted)
    with torch.device("meta"):
        empty = Rotary(64)
    assert torch.equal(empty.to_empty(device="cpu")(far)[0], Rotary(64)(far)[0])


def test_refused_forwards():
    layer, hidden = made(), tokens(20)
    cos, sin = embedded(torch.arange(20))
    with pytest.raises(ValueError, match=r"cos must spread over hidden's tokens \(19,\), got shape \(20, "):
        layer(hidden[1:], cos, sin)
    with pytest.raises(ValueError, match=r"seqs must be None with \[batch, length, hidden\]"):
        layer(hidden[None], cos, sin, Sequences.from_lengths([20], [20]))
    with pytest.raises(ValueError, match="hidden must have shape"):
        layer(hidden[0, 0], cos, sin)
    cache = MSACache(1, 1, KV_HEADS, DIM, CONFIG, dtype=torch.float64)
    cache.extend([20])
    with pytest.raises(ValueError, match="cache must be None where gradients are recorded"):
        layer(hidden.requires_grad_(), cos, sin, cache=cache.layers[0])
    with pytest.raises(ValueError, match="cache must be None where gradients are recorded"):
        layer(hidden.detach(), cos, sin, cache=cache.layers[0])  # its weights record them
    assert cache.layers[0].kv.seq_lens.tolist() == [0]


def test_angles_that_fit_no_token_are_refused():
    """Each token has its own angles: those of one token would turn all by the same position."""
    x, (cos, sin) = torch.randn(2, 5, 3, 16), Rotary(8)(torch.arange(5))
    wanted = rotate(x, cos, sin)
    for lead in ((1, 5), (2, 5)):
        assert torch.equal(wanted, rotate(x, *(angle.expand(*lead, 8) for angle in (cos, sin))))
    wrong = [
        ((cos[:1], sin[:1]), "cos must spread over x's tokens (2, 5), got shape (1, 8)"),
        ((cos.expand(3, 5, 8), sin), "cos must spread over x's tokens (2, 5), got shape (3, 5, 8)"),
        ((cos[:, :7], sin[:, :7]), "cos.shape[1] must be even and at least 2, got 7"),
        ((cos, sin[:, :1]), "sin must have the shape of cos (5, 8), got (5, 1)"),
        ((cos.int(), sin), "cos must be a float tensor [..., tokens, width], got torch.int32"),
        ((cos, sin, 0), "rotary_dim must be at least 2, got 0"),
        (
            (cos[:, :6], sin[:, :6], 3),
            "rotary_dim must divide the last dimension of cos (6) and be even and at most head_dim (16)",
        ),
    ]
    for angles, sentence in wrong:
        with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
            rotate(x, *angles)
    with pytest.raises(
        TypeError, match=r"x must be a float tensor \[..., tokens, heads, head_dim\], got torch.int32 \(2, 5, 3, 16\)"
    ):
        rotate(x.int(), cos, sin)
    with pytest.raises(TypeError, match=r"positions must be a tensor of torch.int32 or torch.int64, got torch.float32"):
        Rotary(8)(torch.zeros(5))
    layer = made()
    with pytest.raises(ValueError, match=r"cos must spread over hidden's tokens \(20,\), got shape \(1, 24\)"):
        layer(tokens(20), *embedded(torch.arange(1)))


@pytest.mark.parametrize("stage", STAGES)
def test_autocast_trains_float32_weights_in_bfloat16(stage):
    layer, hidden = made(stage=stage).float(), tokens(80).float()
    position = [x.float() for x in embedded(torch.arange(80))]
    wanted = torch.autograd.grad(layer(hidden, *position).square().mean(), list(layer.parameters()), allow_unused=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(hidden, *position)
    assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.float().square().mean(), list(layer.parameters()), allow_unused=True)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(mine.flatten(), other.flatten(), 0) > 0.9


SHARDED = """
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from tests.modules.test_attention import embedded, made, tokens

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
position, grads = embedded(torch.arange(60)), []
for sharded in (False, True):
    layer = made(loss_coefficient=0.5)
    if sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    checkpoint(lambda x: layer(x, *position), tokens(60).requires_grad_(), use_reentrant=False).square().sum().backward()
    grads.append([x.grad.full_tensor() if sharded else x.grad for x in layer.parameters()])
for mine, other in zip(*grads, strict=True):
    torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
dist.destroy_process_group()
"""


def test_the_loss_survives_sharding():
    """The loss stays the same under FSDP2 over one process, with activation checkpointing."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_an_index_that_does_not_divide_the_position_embedding_is_refused_by_its_own_name():
    config = MSAConfig(2, index_head_dim=48)
    branch = IndexBranch(32, config)
    words = (
        r"index_rotary_dim must divide the last dimension of cos \(64\) .* got 48 \(of index_head_dim, as index_rotary_dim is"
    )
    with pytest.raises(ValueError, match=words):
        branch(torch.zeros(3, 32), torch.ones(3, 64), torch.ones(3, 64))
