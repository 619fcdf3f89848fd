# SPDX-License-Identifier: MIT
"""The index loss in Triton is right, in the interpreter without a GPU, and repeats bit for bit."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from openmsa.index_loss import STAGE, recording, triton_loss
from openmsa.index_loss.triton_loss import loss_config
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.runtime.dispatch import Implementation
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, random_blocks, strided
from tests import oracle
from tests.index_loss import truth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = COMPILE_TARGETS[90]
ROW = Implementation("triton", "openmsa.index_loss.triton_loss:index_loss", lambda call: None, backward=STAGE.table[0].backward)


def run(p, blocks=None, change=lambda x: x, kernel=None, **options):
    """Returns the loss and the gradients of index_q and index_k. kernel: options of the kernels' host function."""
    p, blocks = p.to(DEVICE).map(change), None if blocks is None else blocks.to(DEVICE)
    leaves = [x.detach().requires_grad_() for x in (p.index_q, p.index_k)]
    call = STAGE.check(p.q, p.k, *leaves, blocks, p.seqs, **options)
    with PoisonedOutputs():
        if kernel is None:
            loss = recording.recorded(ROW, call)
            return truth.Result(loss.detach(), *torch.autograd.grad(loss, leaves))
        with torch.no_grad():
            return triton_loss.loss_and_gradients(*call, **kernel)


CASES = [  # head_dim, index_dim, group, kv_heads, index heads, index key heads, selection heads, block_size, topk, dtype
    (128, 128, 16, 1, 1, 1, 1, 128, 3, torch.bfloat16),
    (64, 32, 3, 2, 2, 1, 2, 64, 5, torch.float16),
    (96, 48, 1, 2, 2, 2, 1, 48, 3, torch.float32),
    (32, 64, 2, 2, 1, 1, 1, 16, 6, torch.float32),
    (16, 96, 20, 1, 1, 1, 1, 256, 2, torch.bfloat16),
    (64, 64, 2, 4, 4, 2, 4, 32, 64, torch.bfloat16),
]
LAYOUTS = ("head_dim", "index_dim", "group", "kv_heads", "heads", "key_heads", "lists", "block", "topk", "dtype")


@pytest.mark.parametrize("selected", [True, False], ids=["selected", "visible"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "chunks"])
@pytest.mark.parametrize(LAYOUTS, CASES)
def test_against_autograd(head_dim, index_dim, group, kv_heads, heads, key_heads, lists, block, topk, dtype, whole, selected):
    """Loss and gradients are those of autograd for ragged and empty sequences, queries before position 0 and past the keys,
    wild ids and empty rows, in one chunk of queries or several with more items than lists."""
    p = problem(
        (11, 0, 3, 1),
        (2 * block + 5, 0, block, 1),
        kv_heads=kv_heads,
        group=group,
        index_heads=heads,
        index_key_heads=key_heads,
        head_dim=head_dim,
        index_dim=index_dim,
        dtype=dtype,
        offsets=(2 * block - 4, 0, -1, 0),
    )
    blocks, reads = None, oracle.reads_everything(p)
    if selected:
        blocks = random_blocks(p, topk, block, lists)
        reads = oracle.reads_of_blocks(blocks.clone(), block)
        gaps = blocks < 0
        blocks[gaps] = torch.tensor([-1, 2**31 - 1, 2**26, -(2**31)], dtype=torch.int32)[torch.arange(int(gaps.sum())) % 4]
    options = {"block_size": block, "softmax_scale": 0.2, "index_scale": -0.15}
    if whole:
        found = run(p, blocks, strided if block == 48 else lambda x: x, coefficient=3.0, **options)
        truth.check(found, p, reads, 0.2, -0.15, 3.0)
        return
    config = loss_config(max(head_dim, index_dim), kv_heads // heads, block, p.q.element_size(), HOPPER)
    query_bytes = heads * (topk if selected else 3) * (index_dim * p.q.element_size() + 40)
    kernel = {"config": dataclasses.replace(config, item=4, rows=16), "workspace_bytes": query_bytes * 6}
    loss, dq, dk = run(p, blocks, kernel=kernel, **options)
    share = 1 / (15 * heads)
    found = loss, (dq * share).to(dtype), (dk * share).to(dtype)
    truth.check(found, p, reads, 0.2, -0.15)


@pytest.mark.parametrize("selected", [True, False])
def test_the_lse_of_the_main_attention_serves(selected):
    """A given lse with any strides gives the same results up to rounding; gradients are bit for bit the same without the value
    of the loss, and the value without gradients."""
    p = problem((20, 10), (60, 33), dtype=torch.bfloat16)
    blocks = random_blocks(p, 3, 16, 2) if selected else None
    options = {"block_size": 16, "kernel": {}}
    own = run(p, blocks, **options)
    logits = truth.main_lse(p, oracle.reads_of_blocks(blocks, 16) if selected else oracle.reads_everything(p), 64**-0.5)
    given = run(p, blocks, lse=logits.float().T.contiguous().T.to(DEVICE), **options)
    for name, a, b in zip(("loss", "dq", "dk"), given, own, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3, msg=name)
    silent = run(p, blocks, return_loss=False, **options)
    assert silent[0] == 0
    for name, a, b in zip(("dq", "dk"), silent[1:], own[1:], strict=True):
        assert_equal(name, a, b)
    p, blocks = p.to(DEVICE), None if blocks is None else blocks.to(DEVICE)
    call = STAGE.check(p.q, p.k, p.index_q, p.index_k, blocks, p.seqs, block_size=16)
    assert_equal("loss", triton_loss.index_loss(*call), own[0])
    assert triton_loss.index_loss(*call._replace(return_loss=False)) == 0


def test_repeats_are_bitwise_equal():
    p = problem((30, 13), (60, 33), dtype=torch.bfloat16)
    blocks = random_blocks(p, 4, 16, 2)
    kernel = {"config": dataclasses.replace(loss_config(64, 1, 16, 2, HOPPER), item=4)}
    for some in (blocks, None):
        first, second = (run(p, some, block_size=16, kernel=kernel) for _ in range(2))
        for name, a, b in zip(("loss", "dq", "dk"), first, second, strict=True):
            assert_equal(name, a, b)


def test_all_blocks_selected_is_everything_visible():
    """Both give the same bits, as one program computes them."""
    p = problem((20, 3), (290, 64), dtype=torch.bfloat16)
    blocks = torch.arange(3, dtype=torch.int32).expand(23, 1, 3)
    for name, a, b in zip(("loss", "dq", "dk"), run(p, blocks), run(p), strict=True):
        assert_equal(name, a, b)


@pytest.mark.parametrize("lens", [((0,), (40,)), ((3,), (0,)), ((), ()), ((0, 2), (0, 1))])
@pytest.mark.parametrize("selected", [True, False])
def test_little_to_do(lens, selected):
    p = problem(*lens, dtype=torch.bfloat16)
    blocks = random_blocks(p, 3, 16, 2) if selected else None
    reads = oracle.reads_of_blocks(blocks, 16) if selected else oracle.reads_everything(p)
    truth.check(run(p, blocks, block_size=16), p, reads, 0.125, 0.125)


def test_tiles_are_chosen_for_every_device():
    for device in COMPILE_TARGETS.values():
        for dim in (64, 128, 256):
            for block in (16, 48, 128, 256):
                for size in (2, 4):
                    config = loss_config(dim, 1, block, size, device)
                    assert min(config.keys, config.rows) >= 16
