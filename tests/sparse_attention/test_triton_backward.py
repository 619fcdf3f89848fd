# SPDX-License-Identifier: MIT
"""The gradients of sparse attention in Triton are right, in the interpreter without a GPU, and repeat bit for bit."""

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from openmsa.primitives.readers import readers
from openmsa.sparse_attention import STAGE, reference, triton_backward
from openmsa.sparse_attention.triton_backward import backward_config
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, random_blocks, strided
from tests import gradients, oracle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def arguments(p, blocks, block_size, grad_out, grad_lse, change=lambda x: x, scale=0.2):
    """Returns the checked call, its results by the reference, and their gradients."""
    p, blocks = p.to(DEVICE).map(change), blocks.to(DEVICE)
    call = STAGE.check(p.q, p.k, p.v, blocks, p.seqs, block_size=block_size, softmax_scale=scale, return_lse=True)
    out, lse = reference.sparse_attention(*call)
    return (*call._replace(out=out, lse=lse), grad_out.to(DEVICE), None if grad_lse is None else grad_lse.to(DEVICE))


def run(given, **options):
    with PoisonedOutputs():
        return triton_backward.sparse_attention_backward(*given, **options)


CASES = [  # head_dim, group, kv_heads, selection heads, block_size, topk, dtype
    (128, 16, 1, 1, 128, 3, torch.bfloat16),
    (64, 3, 2, 2, 64, 5, torch.float16),
    (96, 1, 2, 1, 48, 3, torch.float32),
    (32, 2, 2, 2, 16, 6, torch.float32),
    (16, 80, 1, 1, 256, 2, torch.bfloat16),
    (64, 4, 2, 1, 32, 64, torch.bfloat16),
]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "chunks"])
@pytest.mark.parametrize(("head_dim", "group", "kv_heads", "heads", "block", "topk", "dtype"), CASES)
def test_against_autograd(head_dim, group, kv_heads, heads, block, topk, dtype, whole):
    """Gradients are those of autograd for ragged and empty sequences, queries before position 0 and past the keys, wild ids and
    empty rows, in one chunk of queries or several with more items than lists."""
    p = problem(
        (11, 0, 3, 1),
        (2 * block + 5, 0, block, 1),
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        dtype=dtype,
        offsets=(2 * block - 4, 0, -1, 0),
    )
    blocks = random_blocks(p, topk, block, heads)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    grad_lse = None if dtype == torch.float32 else grad_lse
    expected = p, oracle.reads_of_blocks(blocks.clone(), block), 0.2, grad_out, grad_lse
    gaps = blocks < 0
    blocks[gaps] = torch.tensor([-1, 2**31 - 1, 2**26, -(2**31)], dtype=torch.int32)[torch.arange(int(gaps.sum())) % 4]
    given = arguments(p, blocks, block, grad_out, grad_lse, strided if block == 48 else lambda x: x)
    options = {}
    if not whole:
        config = backward_config(head_dim, group, block, 9, p.q.element_size())
        options = {"config": dataclasses.replace(config, item=2, rows=16), "workspace_bytes": 4 * given[0][0].numel() * topk}
    gradients.check(run(given, **options), *expected)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales(scale):
    p = problem((20, 10), (60, 33), dtype=torch.bfloat16)
    blocks = random_blocks(p, 3, 16, 2)
    grad_out, grad_lse = gradients.inputs_and_gradients(p)
    result = run(arguments(p, blocks, 16, grad_out, grad_lse, scale=scale))
    gradients.check(result, p, oracle.reads_of_blocks(blocks, 16), scale, grad_out, grad_lse)


def test_repeats_are_bitwise_equal():
    p = problem((70, 33), (150, 133), dtype=torch.bfloat16)
    blocks = random_blocks(p, 4, 16, 2)
    given = arguments(p, blocks, 16, *gradients.inputs_and_gradients(p))
    config = dataclasses.replace(backward_config(64, 2, 16, 9, 2), item=8)
    for name, a, b in zip(("dq", "dk", "dv"), run(given, config=config), run(given, config=config), strict=True):
        assert_equal(name, a, b)


@pytest.mark.parametrize("lens", [((0,), (40,)), ((3,), (0,)), ((), ()), ((0, 2), (0, 1))])
def test_little_to_do(lens):
    p = problem(*lens, dtype=torch.bfloat16)
    blocks = random_blocks(p, 3, 16, 2)
    grad_out, _ = gradients.inputs_and_gradients(p)
    result = run(arguments(p, blocks, 16, grad_out, None))
    gradients.check(result, p, oracle.reads_of_blocks(blocks, 16), 0.2, grad_out, None)


def test_lists_are_sorted():
    """Each list holds its readers, ascending, and items cover every list once."""
    p = problem((40, 9), (100, 20))
    blocks = random_blocks(p, 3, 16, 2)
    seqs = STAGE.check(p.q, p.k, p.v, blocks, p.seqs, block_size=16).seqs
    found = readers(blocks, seqs, 120, 16, 4)
    num_buckets = 120 // 16 + 1 + 1
    lists = [[] for _ in range(2 * num_buckets)]
    for row, b, last in oracle.rows(p):
        for head in range(2):
            for slot, block in enumerate(blocks[row, head].tolist()):
                if 0 <= block * 16 <= last:
                    lists[head * num_buckets + (0, 100 // 16 + 1)[b] + block].append(row * 3 + slot)
    starts = found.starts.tolist()
    assert lists == [found.entries[a:b].tolist() for a, b in itertools.pairwise(starts)]
    of_items = [i for i, entries in enumerate(lists) for _ in range(-(-len(entries) // 4))]
    assert found.lists.tolist()[: len(of_items)] == of_items
    assert set(found.lists.tolist()[len(of_items) :]) <= {len(lists)}
