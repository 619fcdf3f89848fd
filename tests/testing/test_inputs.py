# SPDX-License-Identifier: MIT
"""The nasty inputs are as nasty as they say, and hold the values that they should."""

import pytest
import torch

from openmsa.testing.allocations import PoisonedOutputs, peak_memory
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import oracle


@pytest.mark.parametrize("step", [1, 2])
def test_strided_views_stand_amid_nan(step):
    x = torch.randn(5, 3, 16)
    view = strided(x, step)
    assert_equal("view", view, x)
    assert not view.is_contiguous()
    assert view.stride(-1) == step
    around = view.as_strided(view.shape, view.stride(), view.storage_offset() - 1)
    assert around[:, :, 0].isnan().all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_pages_hold_the_keys_and_nan_elsewhere(page_size, interleaved):
    p = problem((2, 2, 2), (40, 17, 0), shared_prefix=16)
    kv, index_keys = paged(p, page_size, interleaved=interleaved)
    for pool, x in ((kv.k, p.k), (kv.v, p.v), (index_keys.keys, p.index_k)):
        assert_equal("keys", oracle.from_pages(pool, kv.page_table, kv.seq_lens), x)
        once = 57 - 16 // page_size * page_size
        assert int((~pool.isnan()).sum()) == once * x.shape[1] * x.shape[2]
    assert kv.page_table[0, : 16 // page_size].tolist() == kv.page_table[1, : 16 // page_size].tolist()
    assert kv.k.is_contiguous() != interleaved


def test_a_permuted_problem_is_the_same_problem():
    p = problem((2, 0, 3), (5, 7, 3), offsets=(0, 1, 2))
    moved = p.permuted([2, 0, 1])
    assert (moved.q_lens, moved.k_lens, moved.offsets) == ((3, 2, 0), (3, 5, 7), (2, 0, 1))
    assert_equal("q", moved.q, torch.cat([p.q[2:], p.q[:2]]))
    assert_equal("k", moved.k, torch.cat([p.k[12:], p.k[:12]]))


def test_random_blocks_are_distinct_and_have_gaps():
    p = problem((50,), (160,))
    blocks = random_blocks(p, 5, 16, 2)
    rows = blocks.flatten(0, 1).tolist()
    assert all(len(set(ids) - {-1}) == sum(b >= 0 for b in ids) for ids in rows)
    assert any(ids[2] == -1 and ids[0] >= 0 and ids[4] >= 0 for ids in rows)
    assert any(set(ids) == {-1} for ids in rows)
    assert any(sorted(ids) != ids for ids in rows)


def test_poison():
    with PoisonedOutputs():
        floats, ints = torch.empty(3), torch.empty(3, dtype=torch.int32)
        more = torch.ones(2).new_empty(2), torch.empty_like(floats), torch.empty_strided((2, 2), (2, 1))
        assert torch.zeros(3).sum() == 0
    assert all(x.isnan().all() for x in (floats, *more))
    assert (ints == -(2**31)).all()


def test_peak_memory():
    x = torch.ones(1024)

    def work():
        a = x + 1
        b = torch.cat([a, a])
        del a
        return (b[:10] + x[:10]).sum()

    memory = peak_memory(work)
    assert (memory.peak, memory.largest) == (3 * 4096, 2 * 4096)
