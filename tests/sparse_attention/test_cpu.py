# SPDX-License-Identifier: MIT
"""On a CPU queries that read every block they see are left to dense attention, and few queries may read all keys in place."""

import pytest
import torch

from openmsa import E4M3, Sequences, sparse_attention
from openmsa.sparse_attention import cpu, cpu_masked, cpu_token
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import packed_order, paged, problem, random_blocks
from tests import instructions


def listed(q_lens, k_lens, topk, heads=2, block_size=16):
    """Returns every visible block where there are at most topk of them, else every other one."""
    rows = []
    for q_len, k_len in zip(q_lens, k_lens, strict=True):
        for token in range(k_len - q_len, k_len):
            visible = token // block_size + 1
            ids = list(range(visible)) if visible <= topk else list(range(visible % 2, visible, 2))[-topk:]
            rows.append([ids + [-1] * (topk - len(ids))] * heads)
    return torch.tensor(rows, dtype=torch.int32)


@pytest.fixture
def dense(monkeypatch):
    """Returns the queries of each call of dense attention, which serves where there are no C kernels."""
    instructions.use_none(monkeypatch)
    queries = []
    run = cpu.DENSE.run
    monkeypatch.setattr(cpu.DENSE, "run", lambda impl, call: queries.append(call.q.shape[0]) or run(impl, call))
    return queries


def close(ours, reference):
    for x, y in zip(ours, reference, strict=True):
        torch.testing.assert_close(x.double(), y.double(), atol=2e-5, rtol=2e-5, equal_nan=True)


def both(*args, **options):
    return (sparse_attention(*args, block_size=16, return_lse=True, impl=x, **options) for x in ("cpu", "reference"))


@pytest.mark.parametrize("stored", ["plain", "e4m3", "paged"])
def test_queries_that_read_all_they_see_run_dense(stored, dense):
    q_lens, k_lens = (40, 90, 0, 20, 3), (40, 100, 5, 20, 90)
    p = problem(q_lens, k_lens)
    k, v = {"plain": (p.k, p.v), "e4m3": (E4M3.quantize(p.k), E4M3.quantize(p.v)), "paged": (paged(p, 16)[0], None)}[stored]
    close(*both(p.q, k, v, listed(q_lens, k_lens, 4), p.seqs))
    assert dense == [40 + 54, 20]  # the second sequence begins at position 10 and has 4 blocks up to position 63


@pytest.mark.parametrize("bad", [None, torch.nan])
def test_neighbouring_sequences_change_nothing(bad):
    """Whether a query is left to dense attention depends on its own sequence: seven, which read all they see, beside some
    that do not and beside some that do, and a sequence with a value of NaN beside others."""
    lens = (149, 149, 7, 70)
    p = problem(lens, lens, head_dim=32, dtype=torch.bfloat16)
    if bad is not None:
        p.v[20] = bad
    results = []
    for order in ((0, 1, 3, 2), (0, 2, 1, 3), (3, 0, 2, 1)):
        moved, rows = p.permuted(order), packed_order(lens, order)
        blocks = listed([lens[i] for i in order], [lens[i] for i in order], 4)
        out, lse = sparse_attention(moved.q, moved.k, moved.v, blocks, moved.seqs, block_size=16, return_lse=True, impl="cpu")
        back = rows.argsort()
        results.append((out[back], lse[back]))
    for found in results[1:]:
        for name, x, y in zip(("out", "lse"), found, results[0], strict=True):
            assert_equal(name, x, y)


def test_a_list_in_another_order_or_with_a_block_left_out_is_followed(dense):
    p = problem((60,), (60,))
    blocks = listed((60,), (60,), 4)
    blocks[30] = blocks[30].flip(-1)
    blocks[40, 1, 1] = -1
    close(*both(p.q, p.k, p.v, blocks, p.seqs))
    assert dense == [30, 9, 19]


def test_an_offset_beyond_the_keys_and_before_the_first(dense):
    p = problem((30, 30), (20, 40))
    seqs = Sequences(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, 30, 40, torch.tensor([-15, 25], dtype=torch.int32))
    seen = [max(0, min(t, 19) // 16 + 1) for t in range(-15, 15)] + [min(t, 39) // 16 + 1 for t in range(25, 55)]
    blocks = torch.tensor([[[i if i < n else -1 for i in range(4)]] * 2 for n in seen], dtype=torch.int32)
    close(*both(p.q, p.k, p.v, blocks, seqs))
    assert dense == [60]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_behind_a_block_are_not_let_in(name, bad, dense):
    """A query of the first block does not read the third one, where dense attention multiplies values by weights of 0."""
    p = problem((60,), (60,))
    {"k": p.k, "v": p.v}[name][45] = bad
    out = sparse_attention(p.q, p.k, p.v, listed((60,), (60,), 4), p.seqs, block_size=16)
    assert dense == [60]
    assert bool(out[:32].isfinite().all())
    reference = sparse_attention(p.q, p.k, p.v, listed((60,), (60,), 4), p.seqs, block_size=16, impl="reference")
    close((out[:32], out[45:]), (reference[:32], reference[45:]))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("length", [33, 64, 100, 128, 129])
def test_few_queries_read_in_place_or_copies(heads, length, monkeypatch):
    """Keys are copied where less than half of the blocks that a query sees are selected."""
    instructions.use_none(monkeypatch)
    p = problem((2,), (length,))
    blocks = listed((2,), (length,), 4, heads)
    used = []
    for way in ("attend_all", "_gather_keys"):
        function = getattr(cpu_token, way)
        monkeypatch.setattr(cpu_token, way, lambda *a, way=way, function=function: used.append(way) or function(*a))
    close(*both(p.q, p.k, p.v, blocks, p.seqs))
    copied = {100: (True, True), 129: (False, True)}.get(length, (False, False))  # 3 of 7 blocks, and 4 of 9
    assert used == ["_gather_keys" if copy else "attend_all" for copy in copied]
    monkeypatch.setattr(cpu_token, "READ_ANYWAY", 0)
    close(*both(p.q, p.k, p.v, blocks, p.seqs))
    assert used[2:] == ["_gather_keys"] * 2


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_few_queries_do_not_let_in_keys_and_values_that_are_not_selected(name, bad):
    p = problem((1,), (100,))
    {"k": p.k, "v": p.v}[name][20] = bad  # of block 1
    blocks = torch.tensor([[[0, 2, 4, 6], [0, 2, 3, 6]]], dtype=torch.int32)
    ours, reference = both(p.q, p.k, p.v, blocks, p.seqs)
    assert bool(ours[0].isfinite().all())
    close(ours, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lens", [(1, 40), (3, 40), (40, 100)])
def test_logits_of_a_block_that_are_all_infinite(lens, dtype):
    """-inf in every logit of a block counts for nothing beside other blocks, and alone gives 0; one of inf gives NaN."""
    p = problem((lens[0],), (lens[1],), dtype=dtype)
    p.q[..., 0] = 1
    p.k[:16, 0, 0], p.k[20, 1, 0] = -torch.inf, torch.inf
    for ids in ([0], [0, 1], [1]):
        blocks = torch.tensor(ids, dtype=torch.int32).expand(lens[0], 2, -1)
        found, reference = both(p.q, p.k, p.v, blocks, p.seqs)
        tolerance = 2e-5 if dtype == torch.float32 else 1.6e-2
        torch.testing.assert_close(found, reference, atol=tolerance, rtol=tolerance, equal_nan=True)
        assert bool((found[0][:, :2] == 0).all()) == (ids == [0])
        assert bool(found[0][:, 2:].isnan().all()) == (1 in ids)


def test_heads_that_select_nothing():
    p = problem((1,), (100,))
    blocks = torch.tensor([[[-1, -1, -1, -1], [0, 2, 3, 6]]], dtype=torch.int32)
    close(*both(p.q, p.k, p.v, blocks, p.seqs))


@pytest.fixture
def masked(monkeypatch):
    """Says whether each call of masked attention was of use, on a CPU that claims to multiply bfloat16 tiles."""
    used = []
    function = cpu.attend_masked
    monkeypatch.setattr(cpu, "attend_masked", lambda *a: used.append(function(*a)) or used[-1])
    instructions.use_none(monkeypatch)
    monkeypatch.setattr(cpu_masked, "has_tiles", lambda: True)
    monkeypatch.setattr(cpu_masked, "QUERIES", 37)
    return used


@pytest.mark.parametrize("length", [10, 16, 17, 40])
def test_masks_of_one_block(length, masked, monkeypatch):
    monkeypatch.setattr(cpu_masked, "QUERIES", 7)
    p = problem((length,), (length,), dtype=torch.bfloat16)
    blocks = (torch.arange(length)[:, None, None] // 16).int().expand(-1, 2, 1).contiguous()
    monkeypatch.setattr(cpu, "_runs", lambda *_: [(slice(0, length), False)])
    found, reference = both(p.q, p.k, p.v, blocks, p.seqs)
    assert masked == [True]
    torch.testing.assert_close(found[0].float(), reference[0].float(), atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("stored", ["plain", "paged", "interleaved"])
def test_masks_serve_short_contexts_in_bfloat16(stored, heads, masked):
    q_lens, k_lens = (40, 90, 0, 200, 3, 100), (40, 100, 5, 260, 90, 150)
    p = problem(q_lens, k_lens, dtype=torch.bfloat16)
    k, v = (p.k, p.v) if stored == "plain" else (paged(p, 16, interleaved=stored == "interleaved")[0], None)
    found, reference = both(p.q, k, v, listed(q_lens, k_lens, 4, heads), p.seqs)
    assert masked
    assert all(masked)
    torch.testing.assert_close(found[0].float(), reference[0].float(), atol=1.6e-2, rtol=1.6e-2)
    torch.testing.assert_close(found[1], reference[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("heads", [1, 2])
def test_masks_leave_what_is_not_finite_to_gathered_blocks(heads, masked):
    p = problem((100, 60), (150, 60), dtype=torch.bfloat16)
    blocks = random_blocks(p, 4, 16, heads)  # Some rows select nothing, which gives lse -inf.
    p.v[20, 0, 3] = torch.nan
    found, reference = both(p.q, p.k, p.v, blocks, p.seqs)
    assert masked == [False, True]  # A value of the first sequence is NaN.
    torch.testing.assert_close(found[0].float(), reference[0].float(), atol=1.6e-2, rtol=1.6e-2, equal_nan=True)
    torch.testing.assert_close(found[1], reference[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf])
def test_masks_leave_infinite_logits_to_gathered_blocks(bad, masked):
    """PyTorch's fused kernel says 0 for the lse of a row whose logits are all -inf, and may give a finite result for inf."""
    p = problem((40,), (40,), dtype=torch.bfloat16)
    p.q[..., 0] = 0.5 + p.q[..., 0].abs()
    p.k[:16, :, 0] = bad
    blocks = torch.zeros(40, 1, 1, dtype=torch.int32)
    found, reference = both(p.q, p.k, p.v, blocks, p.seqs)
    assert masked
    assert not any(masked)
    close(found, reference)
    assert bool((found[0].isnan() if bad > 0 else found[0] == 0).all())


def test_masks_are_for_bfloat16_and_few_blocks(masked):
    for dtype, length, scale in ((torch.float32, 150, 0.1), (torch.float16, 150, 0.1), (torch.bfloat16, 150, -0.1)):
        p = problem((length,), (length,), dtype=dtype)
        sparse_attention(p.q, p.k, p.v, listed((length,), (length,), 4), p.seqs, block_size=16, softmax_scale=scale)
    assert masked == []
    p = problem((400,), (400,), dtype=torch.bfloat16)
    found, reference = both(p.q, p.k, p.v, listed((400,), (400,), 4), p.seqs)
    assert masked == [True]  # The queries from the 193rd on see more than 12 blocks.
    torch.testing.assert_close(found[0].float(), reference[0].float(), atol=1.6e-2, rtol=1.6e-2)
