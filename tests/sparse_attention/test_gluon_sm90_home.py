# SPDX-License-Identifier: MIT
"""The merge of Hopper's KV-outer attends to the home blocks of tiles, of which memory holds no partials."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa.sparse_attention import gluon_sm90_merge, triton_prefill
from openmsa.sparse_attention.triton_lists import HOME_BIT, OUTER_BUT_HOME
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, random_blocks
from tests import oracle
from tests.hopper.marks import in_turn, on_hopper
from tests.sparse_attention.test_gluon_sm90_outer import CASES, case, check_a_query_of_nan, checked_call
from tests.sparse_attention.test_triton import check, run, take_any_size

BLOCK = 128
AT_HOME = [name for name, (_, _, _, group, _, topk, _, _) in CASES.items() if group == 16 and topk >= 5]


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """No tile stays together, however few there are."""
    take_any_size(monkeypatch, limit=0)


@pytest.fixture
def merged(monkeypatch):
    """A list of the calls whose partials were merged."""
    done, launch = [], gluon_sm90_merge.launch_sm90_merge

    def spied(read, call, *given, **options):
        done.append(call)
        launch(read, call, *given, **options)

    monkeypatch.setattr(gluon_sm90_merge, "launch_sm90_merge", spied)
    return done


def padded(blocks, topk=6):
    """Returns a selection with empty slots behind its own."""
    return torch.nn.functional.pad(blocks, (0, topk - blocks.shape[2]), value=-1)


@on_hopper
@pytest.mark.parametrize(("name", "dtype"), in_turn(AT_HOME, [torch.bfloat16, torch.float16]))
def test_against_the_truth(name, dtype, merged):
    checked, expected = case(name, dtype)
    result = run(checked)
    assert [call.plan.rest for call in merged] == [OUTER_BUT_HOME.value]
    check(result, expected)
    again = run(checked, workspace_bytes=1)  # This makes a chunk of each tile.
    assert_equal("out", again[0], result[0].cpu())
    assert_equal("lse", again[1], result[1].cpu())


@on_hopper
@pytest.mark.parametrize(
    ("topk", "group", "expected"), [(4, 16, False), (5, 16, True), (62, 16, True), (63, 16, False), (9, 8, False)]
)
def test_where_it_does(topk, group, expected, merged):
    p = problem((20,), (9000,), kv_heads=1, group=group, head_dim=BLOCK, dtype=torch.bfloat16)
    blocks = random_blocks(p, topk, BLOCK, 1)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    result = run(checked_call(p, blocks))
    assert [call.plan.rest == OUTER_BUT_HOME.value for call in merged] == [expected]
    check(result, (oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)))


@on_hopper
def test_what_lists_say(merged):
    """The last block that a tile's first query sees is no entry, and a bit says who reads it."""
    p = problem((37,), (1000,), kv_heads=2, group=16, head_dim=BLOCK, dtype=torch.bfloat16, offsets=(909,))
    blocks = random_blocks(p, 7, BLOCK, 2)
    blocks[::3] = torch.where(blocks[::3] == 7, -1, blocks[::3])  # A third does not read the block of the last keys.
    run(checked_call(p, blocks))
    lists = merged[0].lists.outer
    position = 909 + torch.arange(37)
    home = ((909 + torch.arange(37) // 8 * 8).clamp(max=999) // BLOCK)[:, None, None]
    there = (blocks >= 0) & (blocks * BLOCK <= position.clamp(max=999)[:, None, None])
    apart = there & (blocks != home)
    words = (apart.long() << torch.arange(7)).sum(-1) + ((there & (blocks == home)).any(-1).long() << HOME_BIT.value)
    assert_equal("slots", lists.slots.view(-1, 2)[:37].cpu(), words)
    assert set((words >> HOME_BIT.value).flatten().tolist()) == {0, 1}
    assert lists.num_entries[:2].tolist() == apart.sum((0, 2)).tolist()


@on_hopper
def test_rows_that_nobody_reads_may_hold_nan(merged):
    """Neither keys of a home block behind the last query, nor a home block that no query selected."""
    p = problem((8, 8, 8), (512, 400, 512), kv_heads=1, group=16, head_dim=BLOCK, dtype=torch.bfloat16, offsets=(260, 300, 300))
    blocks = torch.tensor([[[1, 2, -1]]], dtype=torch.int32).repeat(24, 1, 1)
    blocks[8:16] = torch.tensor([2, 0, 9], dtype=torch.int32)
    blocks[16:] = torch.tensor([1, 0, -1], dtype=torch.int32)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    for x in (p.k, p.v):
        x[:128] = x[268:512] = x[512 + 128 : 512 + 256] = x[512 + 308 : 912] = x[912 + 256 :] = torch.nan
    check(run(checked_call(p, padded(blocks))), expected)
    assert merged[0].plan.rest == OUTER_BUT_HOME.value


@on_hopper
@pytest.mark.parametrize("home", [0, 1])
def test_a_block_whose_logits_are_all_minus_infinity_has_no_weight(home):
    p = problem((3,), (256,), kv_heads=1, group=16, head_dim=BLOCK, dtype=torch.bfloat16)
    p.q[1, 0, 0], p.k[:, 0, 0] = 3e20, 0
    p.k[home * 128 : home * 128 + 128, 0, 0] = -3e20
    blocks = padded(torch.tensor([[[0, 1]]], dtype=torch.int32).repeat(3, 1, 1))
    out, lse = triton_prefill.sparse_attention(*checked_call(p, blocks))
    alone = padded(torch.full((3, 1, 1), 1 - home, dtype=torch.int32))
    alone, alone_lse = triton_prefill.sparse_attention(*checked_call(p, alone))
    assert_equal("out", out[1, 0], alone[1, 0].cpu())
    torch.testing.assert_close(lse[1, 0], alone_lse[1, 0])


@on_hopper
def test_a_query_of_nan_has_an_lse_of_nan():
    check_a_query_of_nan(padded(torch.tensor([[[0, 1]], [[1, 0]], [[-1, -1]]], dtype=torch.int32)))
