# SPDX-License-Identifier: MIT
"""The merge of Hopper's KV-outer runs beside the union kernel, which leaves multiprocessors to it by what both have to do."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmsa.sparse_attention import STAGE, gluon_sm90_attend, gluon_sm90_merge, gluon_sm90_outer
from openmsa.sparse_attention.gluon_sm90_merge import MOST_LEFT, ROW_COST, SHARES, shared_out
from openmsa.sparse_attention.triton_lists import HOME_BIT
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from tests import oracle
from tests.hopper.launch import run as interpret
from tests.hopper.marks import CUDA, DEVICE, on_hopper
from tests.sparse_attention.test_triton import check, run, take_any_size

BLOCK = 128


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Few queries go to these kernels, too, and tiles whose unions have more than ten blocks to KV-outer."""
    take_any_size(monkeypatch, limit=10)


@pytest.fixture
def calls(monkeypatch):
    """A list of the launches, by name, with the lists of their calls."""
    done = []
    for module, name in (
        (gluon_sm90_attend, "launch_sm90_attend"),
        (gluon_sm90_outer, "launch_sm90_outer"),
        (gluon_sm90_merge, "launch_sm90_merge"),
    ):
        launch = getattr(module, name)

        def spied(*given, launch=launch, name=name, **options):
            call = given[1]
            done.append((name.removeprefix("launch_sm90_"), call))
            launch(*given, **options)

        monkeypatch.setattr(module, name, spied)
    return done


def mixed_call(group=16, page_size=0, topk=9):
    """Returns a checked call, half of whose queries select alike, and the truth."""
    p = problem((70 if group <= 16 else 45, 3), (2000, 300), kv_heads=2, group=group, head_dim=BLOCK, dtype=torch.bfloat16)
    blocks = random_blocks(p, topk, BLOCK, 2)
    blocks[:32] = blocks[:1]
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    here = p.to(DEVICE)
    k, v = (paged(here, page_size)[0], None) if page_size else (here.k, here.v)
    given = here.q, k, v, blocks.to(DEVICE), here.seqs
    return STAGE.check(*given, block_size=BLOCK, softmax_scale=0.2, return_lse=True), expected


@on_hopper
@pytest.mark.parametrize(
    ("group", "page_size", "topk", "programs"),
    [(16, 0, 9, 1), (16, 0, 6, 5), (16, 128, 10, 5), (8, 128, 5, 5), (32, 0, 7, 20), (64, 0, 9, 3)],
)
def test_unions_beside_merges(group, page_size, topk, programs, calls, monkeypatch):
    """Whatever the union kernel leaves, results are right, and the same in chunks, each of which has its share in front."""
    facts = gluon_sm90_attend.facts
    monkeypatch.setattr(gluon_sm90_attend, "facts", lambda device: facts(device)._replace(num_sms=programs))
    checked, expected = mixed_call(group, page_size, topk)
    result = run(checked)
    assert [name for name, _ in calls] == ["outer", "attend", "merge"]
    check(result, expected)
    calls.clear()
    again = run(checked, workspace_bytes=checked.q[:40].numel() * topk * 2)  # partials of 40 queries
    names = [name for name, _ in calls]
    assert names == ["outer", "attend", "merge"] * names.count("outer")
    assert names.count("outer") == calls[0][1].plan.num_chunks > 1
    assert_equal("out", again[0], result[0].cpu())
    assert_equal("lse", again[1], result[1].cpu())


@on_hopper
@pytest.mark.parametrize("workspace", [1, 1 << 30])
def test_what_lists_say_of_the_work(workspace, calls):
    checked, _ = mixed_call()
    run(checked, workspace_bytes=workspace)
    plan, lists = calls[0][1].plan, calls[0][1].lists
    sizes = lists.union.sizes.view(-1, 2)[: 2 * plan.num_tiles, 0].view(-1, 2).cpu()
    tiles = lists.union.tiles.view(-1, 4)[: plan.num_tiles].cpu().tolist()
    slots = lists.outer.slots.view(-1, 2).cpu()
    for chunk in range(plan.num_chunks):
        here = range(chunk * plan.chunk.tiles, min((chunk + 1) * plan.chunk.tiles, plan.num_tiles))
        for head in range(2):
            segment = chunk * 2 + head
            assert int(lists.outer.num_visits[segment]) == sum(max(int(sizes[i, head]), 0) for i in here)
            apart = [i for i in here if sizes[i, head] < 0]
            tokens = [token for i in apart for token in range(tiles[i][0], tiles[i][0] + tiles[i][1])]
            entries = sum(bin(int(slots[token, head]) & (1 << HOME_BIT.value) - 1).count("1") for token in tokens)
            assert int(lists.outer.num_entries[segment]) == entries
    assert lists.outer.num_visits[: 2 * plan.num_chunks].sum() > 0
    assert lists.outer.num_entries[: 2 * plan.num_chunks].sum() > 0


@gluon.jit
def share_kernel(shares, visits, entries, i_chunk, num_segments, num_kv_heads, GROUP: gl.constexpr, ROWS: gl.constexpr):
    outer = Amounts(visits, entries)
    first, width, left = shared_out(outer, i_chunk, num_segments, num_kv_heads, GROUP, ROWS)
    gl.store(shares, first)
    gl.store(shares + 1, width)
    gl.store(shares + 2, left)


def Amounts(visits, entries):
    return SimpleNamespace(num_visits=visits, num_entries=entries)


@pytest.mark.skipif(CUDA, reason="it is asked of the interpreter")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("heads", "visits", "entries"),
    [
        (4, 8569, [65024]), (4, 2000, [10, 131072, 131072]), (2, 500, list(range(0, 70 * 9, 9))), (1, 0, [77, 5]),
        (1, 77, [0]), (2, 3, [0, 0, 0]), (2, 30, [0, 99, 0]), (8, 999, [131072, 65536]),
    ],
)  # fmt: skip
def test_shares_of_chunks(heads, visits, entries):
    """Chunks share tiles as they share partials, none is left over, and the merge gets what its part of the work is."""
    of_visits = torch.full((len(entries) * heads + 3,), visits, dtype=torch.int32)
    of_entries = torch.full((len(entries) * heads + 3,), 1 << 20, dtype=torch.int32)
    of_entries[:-3] = torch.tensor(entries, dtype=torch.int32).repeat_interleave(heads)
    begin, total = 0, max(sum(entries) * heads, 1)
    for i_chunk, mine in enumerate(entries):
        shares = torch.full((3,), -1, dtype=torch.int32)
        given = shares, of_visits, of_entries, i_chunk, len(entries) * heads, heads
        interpret(share_kernel, *given, grid=(132,), GROUP=16, ROWS=128)
        first, width, left = shares.tolist()
        assert first == begin <= SHARES.value
        begin += width
        if i_chunk < len(entries) - 1:
            assert begin == pytest.approx(SHARES.value * sum(entries[: i_chunk + 1]) * heads / total, abs=1.001)
        merged = heads * mine * 16
        attended = len(entries) * heads * visits * width / SHARES.value * 128 * ROW_COST.value
        assert left == int(132 * min(merged / max(merged + attended, 1), MOST_LEFT.value) + 1e-4)
    assert begin == SHARES.value
