# SPDX-License-Identifier: MIT
"""Hopper's own kernel for gradients is chosen where it should be, and on such a GPU its gradients are right and repeat."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention import STAGE
from openmsa.sparse_attention.gluon_sm90_gradients import GROUPS, OPTIONS, Cut, why_not
from openmsa.sparse_attention.triton_backward import backward_config
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, random_blocks, strided
from tests import gradients, oracle
from tests.hopper.marks import HOPPER, in_turn, on_a_hopper_gpu, on_hopper
from tests.sparse_attention.test_triton_backward import arguments, run

BLOCK = 128


def reason(heads=32, dim=128, dtype=torch.bfloat16, block=BLOCK, topk=4, keys=128):
    q, k = (torch.empty(8, h, dim, dtype=dtype, device="meta") for h in (heads, 2))
    return why_not(q, k, torch.empty(8, 2, topk, device="meta"), block, keys)


def test_what_it_serves():
    assert reason() is None
    assert reason(dtype=torch.float16) is None
    assert all(reason(heads=2 * group) is None for group in GROUPS)
    assert "16-bit" in reason(dtype=torch.float32)
    assert "head_dim 128" in reason(dim=64)
    assert "blocks of 128" in reason(block=64)
    assert "groups" in reason(heads=8)
    assert "holds 128 keys" in reason(keys=64)
    many = torch.empty(1 << 21, 64, 128, dtype=torch.bfloat16, device="meta")
    assert "int32" in why_not(many, many[:, :4], torch.empty(1 << 21, 4, 16, device="meta"), BLOCK, 128)


def test_tiles_fit():
    config, stages = backward_config(128, 16, BLOCK, 9, 2), OPTIONS["STAGES"]
    assert (config.keys, config.rows) == (128, 64)
    bytes_of_tiles = 2 * (2 * BLOCK * 128 + stages * 2 * 64 * 128 + 2 * BLOCK * 64) + stages * 64 * 16
    assert bytes_of_tiles + 1024 <= COMPILE_TARGETS[90].shared_bytes
    others, loader = OPTIONS["MULTIPLY_REGISTERS"], OPTIONS["LOAD_REGISTERS"]
    assert 504 - others - loader >= 232  # what Triton leaves to the first four warps
    assert Cut._fields == ("group", "lists", "topk", "item")


def test_elsewhere_it_is_refused():
    p = problem((5,), (130,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    given = arguments(p, random_blocks(p, 2, BLOCK, 1), BLOCK, *gradients.inputs_and_gradients(p))
    if not HOPPER:
        with pytest.raises(NotImplementedError, match="Hopper's own kernel does not serve this call"):
            run(given, tuned=True)
    config = backward_config(128, 16, BLOCK, 9, 4)
    with pytest.raises(NotImplementedError, match="tuned must be False or None"):
        run(given, tuned=True, config=config)


# name: query lengths, key lengths, kv heads, group, selection heads, topk, offsets
CASES = {
    "one row": ((1,), (1,), 1, 16, 1, 1, None),
    "one block": ((4,), (128,), 1, 16, 1, 1, None),
    "two items": ((70,), (300,), 1, 16, 1, 3, None),
    "ragged": ((11, 0, 3, 1, 150), (901, 0, 128, 1, 333), 2, 16, 2, 5, None),
    "before and behind": ((30, 9, 5), (300, 500, 200), 2, 16, 2, 3, (-10, 600, 0)),
    "one selection": ((90,), (700,), 4, 16, 1, 4, None),
    "groups of 8": ((70, 5), (900, 64), 2, 8, 2, 5, None),
    "groups of 32": ((33,), (500,), 2, 32, 2, 3, None),
    "groups of 64": ((17,), (500,), 1, 64, 1, 3, None),
}


@functools.cache
def case(name, dtype):
    q_lens, k_lens, heads, group, lists, topk, offsets = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=heads, group=group, head_dim=128, dtype=dtype, offsets=offsets)
    blocks = random_blocks(p, topk, BLOCK, lists)
    return p, blocks, oracle.reads_of_blocks(blocks.clone(), BLOCK)


@on_hopper
@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [torch.bfloat16, torch.float16]))
def test_against_autograd(name, dtype):
    """Gradients are those of autograd for odd and empty sequences, queries before position 0 and past the keys, wild ids, empty
    rows, and several items a block."""
    p, blocks, reads = case(name, dtype)
    grads = gradients.inputs_and_gradients(p)
    gaps = blocks < 0
    wild = blocks.clone()
    wild[gaps] = torch.tensor([-1, 2**31 - 1, 2**26, -(2**31)], dtype=torch.int32)[torch.arange(int(gaps.sum())) % 4]
    given = arguments(p, wild, BLOCK, *grads)
    first, second = (run(given, tuned=True) for _ in range(2))
    gradients.check(first, p, reads, 0.2, *grads)
    for what, a, b in zip(("dq", "dk", "dv"), first, second, strict=True):
        assert_equal(what, a, b.cpu())


@on_hopper
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_items_chunks_and_stages(stages):
    """Small items leave extra sums, chunks of queries add to what is there; strides may be any."""
    p, blocks, reads = case("ragged", torch.bfloat16)
    grads = gradients.inputs_and_gradients(p)
    given = arguments(p, blocks, BLOCK, *grads, change=strided)
    config = dataclasses.replace(backward_config(128, 16, BLOCK, 9, 2), item=6)
    result = run(given, tuned=True, config=config, options={"STAGES": stages}, workspace_bytes=60 * 32 * 5 * 128 * 2)
    gradients.check(result, p, reads, 0.2, *grads)


@on_hopper
@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales(scale):
    p, blocks, reads = case("two items", torch.bfloat16)
    grads = gradients.inputs_and_gradients(p)
    gradients.check(run(arguments(p, blocks, BLOCK, *grads, scale=scale), tuned=True), p, reads, scale, *grads)


@on_a_hopper_gpu
def test_it_agrees_with_triton():
    """Both kernels give the same numbers up to rounding, and the same bits twice, on thousands of queries, where programs are
    as many as a GPU runs at a time and more."""
    generator = torch.Generator("cuda").manual_seed(5)
    tokens, heads, group, topk = 6000, 4, 16, 16

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    q, k, v = normal(tokens, heads * group, 128), normal(tokens, heads, 128), normal(tokens, heads, 128)
    last = torch.arange(tokens, device="cuda") // BLOCK
    chance = torch.rand(tokens, heads, 47, device="cuda", generator=generator)
    chance.masked_fill_(torch.arange(47, device="cuda") > last[:, None, None], -1)
    best, ids = chance.topk(topk, -1)
    blocks = ids.masked_fill(best < 0, -1).int()
    call = STAGE.check(q, k, v, blocks, return_lse=True)
    out, lse = STAGE.run("auto", call)
    given = (*call._replace(out=out, lse=lse), normal(*q.shape), None)
    plain = run(given, tuned=False)
    first, second = (run(given, **options) for options in ({}, {"tuned": True}))
    for name, a, b, c in zip(("dq", "dk", "dv"), first, second, plain, strict=True):
        assert_equal(name, a, b.cpu())
        assert (a.double() - c.double()).norm() <= 2**-8 * c.double().norm(), name


@on_hopper
def test_keys_behind_the_last_sequence_may_hold_nan():
    """The last block's keys end before its tile does, and what lies behind them in memory is never read."""
    p, blocks, reads = case("two items", torch.bfloat16)
    grads = gradients.inputs_and_gradients(p)
    given = list(arguments(p, blocks, BLOCK, *grads))
    given[1:3] = (torch.cat((x, torch.full_like(x[:200], torch.nan)))[: len(x)] for x in given[1:3])
    gradients.check(run(given, tuned=True), p, reads, 0.2, *grads)
