# SPDX-License-Identifier: MIT
"""The merge of Hopper's KV-outer runs beside the union kernel, which leaves multiprocessors to it by what both have to do."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmsa.sparse_attention import STAGE, gluon_sm90_attend, gluon_sm90_merge, gluon_sm90_outer
from openmsa.sparse_attention.gluon_sm90_merge import MOST_LEFT, ROW_COST, left_to_merge
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from tests import oracle
from tests.hopper.launch import run as interpret
from tests.hopper.marks import CUDA, DEVICE, on_hopper
from tests.sparse_attention.test_triton import check, run, take_any_size

BLOCK = 128


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Few queries go to these kernels, too, and tiles whose unions have more than eight blocks to KV-outer."""
    take_any_size(monkeypatch, limit=8)


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
            call = given[0] if name == "launch_sm90_merge" else given[1]
            done.append((name.removeprefix("launch_sm90_"), call))
            launch(*given, **options)

        monkeypatch.setattr(module, name, spied)
    return done


def mixed_call(group=16, page_size=0, topk=6):
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
    ("group", "page_size", "topk", "programs"), [(16, 0, 6, 1), (16, 0, 6, 5), (8, 128, 5, 5), (32, 0, 7, 20), (64, 0, 5, 3)]
)
def test_unions_beside_the_last_merge(group, page_size, topk, programs, calls, monkeypatch):
    """Whatever the union kernel leaves, results are right, and the same in chunks, of which the last alone has it in front."""
    facts = gluon_sm90_attend.facts
    monkeypatch.setattr(gluon_sm90_attend, "facts", lambda device: facts(device)._replace(num_sms=programs))
    checked, expected = mixed_call(group, page_size, topk)
    result = run(checked)
    assert [name for name, _ in calls] == ["outer", "attend", "merge"]
    check(result, expected)
    calls.clear()
    again = run(checked, workspace_bytes=checked.q[:40].numel() * topk * 2)  # partials of 40 queries
    names = [name for name, _ in calls]
    assert names == ["outer", "merge"] * (names.count("outer") - 1) + ["outer", "attend", "merge"]
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
            entries = sum(bin(int(slots[token, head])).count("1") for token in tokens)
            assert int(lists.outer.num_entries[segment]) == entries
    assert lists.outer.num_visits[: 2 * plan.num_chunks].sum() > 0
    assert lists.outer.num_entries[: 2 * plan.num_chunks].sum() > 0


@gluon.jit
def left_kernel(left, visits, entries, num_segments, num_kv_heads, GROUP: gl.constexpr, ROWS: gl.constexpr):
    outer = Amounts(visits, entries)
    gl.store(left + gl.program_id(0), left_to_merge(outer, num_segments, num_kv_heads, GROUP, ROWS))


def Amounts(visits, entries):
    return SimpleNamespace(num_visits=visits, num_entries=entries)


@pytest.mark.skipif(CUDA, reason="it is asked of the interpreter")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("chunks", "heads", "visits", "entries"),
    [(1, 4, 8569, 65024), (3, 4, 2000, 131072), (70, 2, 500, 9), (1, 1, 0, 77), (1, 1, 77, 0), (2, 3, 0, 0)],
)
def test_what_is_left_to_the_merge(chunks, heads, visits, entries):
    """All union lists count, and the partials of the last chunk."""
    of_visits = torch.full((chunks * heads + 3,), visits, dtype=torch.int32)
    of_entries = torch.full((chunks * heads + 3,), 1 << 20, dtype=torch.int32)
    of_entries[(chunks - 1) * heads : chunks * heads] = entries
    left = torch.full((132,), -1, dtype=torch.int32)
    interpret(left_kernel, left, of_visits, of_entries, chunks * heads, heads, grid=(132,), GROUP=16, ROWS=128)
    merged, attended = heads * entries * 16, chunks * heads * visits * 128 * ROW_COST.value
    expected = int(132 * min(merged / max(merged + attended, 1), MOST_LEFT.value) + 1e-4)
    assert set(left.tolist()) == {expected}
