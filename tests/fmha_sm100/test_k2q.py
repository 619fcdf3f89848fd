# SPDX-License-Identifier: MIT
"""`build_k2q_csr` agrees with plain Python, and the selection can be read back from its result."""

import pytest
import torch

from fmha_sm100 import k2q_rows
from fmha_sm100.k2q_rows import NOTHING, Rows, rebuilt, selection, sort_heads
from fmha_sm100.sparse import (
    SparseK2qCsrBuilderSm100,
    build_k2q_csr,
    build_k2q_csr_torch_reference,
    k2q_to_q2k,
    q2k_to_k2q,
)
from openmsa.testing.compare import assert_equal
from tests.contract import DEVICES
from tests.fmha_sm100.sparse_cases import case, csr

LENGTHS = [
    ((5,), (40,)),
    ((3, 0, 7, 1), (40, 0, 100, 17)),
    ((9, 4, 6), (64, 64, 64)),
    ((2, 2), (16, 0)),
    ((0, 0), (5, 33)),
    ((2, 1), (0, 0)),
    ((), ()),
    ((40,), (40,)),
]
BLOCK = 16


def level_major(k_lens, block_size=BLOCK):
    """Returns (sequence, block) of each row."""
    counts = [-(-n // block_size) for n in k_lens]
    return [(b, j) for j in range(max(counts, default=0)) for b in range(len(counts)) if j < counts[b]]


def oracle_csr(q2k, q_lens, k_lens, total_rows, block_size=BLOCK):
    """Returns row pointers, queries, and for each entry its slot."""
    heads, total_q, topk = q2k.shape
    rows = level_major(k_lens, block_size)
    row_ptr = torch.zeros(heads, total_rows + 1, dtype=torch.int32)
    queries, slots = (torch.full((heads, total_q * topk), -1, dtype=torch.int32) for _ in range(2))
    counts = [-(-n // block_size) for n in k_lens]
    for h in range(heads):
        n = 0
        for r in range(total_rows):
            b, j = rows[r] if r < len(rows) else (0, -2)
            for i in range(q_lens[b] if j >= 0 else 0):
                ids = q2k[h, sum(q_lens[:b]) + i].tolist()
                for place, block in enumerate(ids):
                    if block == j:
                        queries[h, n], n = i, n + 1
                        slots[h, n - 1] = sum(0 <= x < counts[b] for x in ids[:place])
            row_ptr[h, r + 1] = n
    return row_ptr, queries, slots


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("extra_rows", [None, 0, 3])
@pytest.mark.parametrize(("q_lens", "k_lens"), LENGTHS)
def test_against_plain_python(device, q_lens, k_lens, extra_rows):
    p, blocks = case(q_lens, k_lens, topk=5, block_size=BLOCK, kv_heads=3, head_dim=16)
    exact = len(level_major(k_lens))
    total_rows = None if extra_rows is None else exact + extra_rows
    options = {"max_seqlen_k": max(k_lens, default=0) + 40} if extra_rows else {}
    row_ptr, queries, schedule = csr(p, blocks, BLOCK, device, total_rows=total_rows, return_schedule=True, **options)
    if device == "cpu":
        assert row_ptr.shape[1] - 1 == (exact if total_rows is None else total_rows)
    expected = oracle_csr(blocks.transpose(0, 1), q_lens, k_lens, row_ptr.shape[1] - 1)
    assert_equal("k2q_row_ptr", row_ptr, expected[0])
    assert_equal("k2q_q_indices", queries, expected[1])
    packed = torch.where(expected[1] < 0, -1, expected[1] + (expected[2] << 24))
    assert_equal("qsplit_indices", schedule.qsplit_indices, packed)
    assert_equal("split_counts", schedule.split_counts, counts(blocks, q_lens, k_lens))
    assert schedule.enabled
    check_items(schedule, row_ptr, queries, level_major(k_lens))


def counts(blocks, q_lens, k_lens):
    limits = [-(-k_lens[b] // BLOCK) for b, n in enumerate(q_lens) for _ in range(n)]
    held = (blocks >= 0) & (blocks < torch.tensor(limits, dtype=torch.int32).view(-1, 1, 1))
    return held.sum(2, dtype=torch.int32)


def check_items(schedule, row_ptr, queries, rows):
    """The items cover each entry once; what lies behind them is zero."""
    work = int(schedule.work_count)
    items = schedule.scheduler_metadata.cpu()
    assert schedule.work_count.shape == (1,)
    assert work <= schedule.work_capacity == len(items)
    assert not items[work:].any()
    covered = torch.zeros_like(queries, dtype=torch.int32).cpu()
    for head, row, first, count, sequence, block in items[:work].tolist():
        assert rows[row] == (sequence, block)
        assert 0 < count <= schedule.target_q_per_cta
        start = int(row_ptr[head, row])
        assert start + first + count <= int(row_ptr[head, row + 1])
        covered[head, start + first : start + first + count] += 1
    assert_equal("covered", covered, (queries.cpu() >= 0).int())


def test_a_popular_block_is_shared_out():
    blocks = torch.zeros(700, 1, 1, dtype=torch.int32)
    p, _ = case((700,), (32,), kv_heads=1, head_dim=16)
    _, _, schedule = csr(p, blocks, BLOCK, return_schedule=True)
    items = schedule.scheduler_metadata[: int(schedule.work_count)]
    assert len(items) > 1
    assert items[:, 3].sum() == 700
    assert items[:, 3].max() <= 128


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("q_lens", "k_lens"), LENGTHS)
def test_the_selection_comes_back(device, q_lens, k_lens):
    """The selection comes back the same from what the builder left behind and from the CSR alone."""
    p, blocks = case(q_lens, k_lens, topk=5, block_size=BLOCK, kv_heads=2, head_dim=16)
    row_ptr, queries = csr(p, blocks, BLOCK, device)
    seqs = p.to(device).seqs
    rows = Rows.of(seqs.cu_seqlens_q, seqs.cu_seqlens_k, BLOCK, -(-max(k_lens, default=0) // BLOCK))
    limits = [-(-k_lens[b] // BLOCK) for b, n in enumerate(q_lens) for _ in range(n)]
    expected = torch.full_like(blocks, NOTHING)
    for t, limit in enumerate(limits):
        for h in range(2):
            ids = sorted(x for x in blocks[t, h].tolist() if 0 <= x < limit)
            expected[t, h, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    arguments = 5, sum(q_lens)
    assert_equal("remembered", selection(row_ptr, queries, *arguments, not_needed, BLOCK), expected)
    assert_equal("rebuilt", rebuilt(row_ptr, queries, *arguments, rows), expected)
    assert_equal("copied", selection(row_ptr.clone(), queries.clone(), *arguments, lambda: rows, BLOCK), expected)


def not_needed():
    raise AssertionError("the CSR was read")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("numpy", [False, True])
def test_a_written_csr_is_read_again(inference, numpy):
    """A CSR that was written to is read again, also under inference_mode, where most tensors do not count their versions, and
    where NumPy wrote to the memory of a tensor."""
    p, first = case((4, 3), (70, 40), topk=3, block_size=BLOCK, kv_heads=2, head_dim=16)
    second = first.flip(0).roll(1, 0)
    with torch.inference_mode(inference):
        row_ptr, queries = csr(p, first, BLOCK)
        other_ptr, other_queries = csr(p, second, BLOCK)
        rows = Rows.of(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, BLOCK, 5)
        expected = selection(other_ptr, other_queries, 3, 7, lambda: rows, BLOCK)
        for mine, other in ((row_ptr, other_ptr), (queries, other_queries)):
            if numpy:
                mine.numpy()[:] = other.numpy()
            else:
                mine.copy_(other)
        assert_equal("selection", selection(row_ptr, queries, 3, 7, lambda: rows, BLOCK), expected)


def test_a_csr_of_another_block_size_is_refused():
    p, blocks = case((4,), (70,), topk=3, block_size=BLOCK, kv_heads=1, head_dim=16)
    row_ptr, queries = csr(p, blocks, BLOCK)
    with pytest.raises(ValueError, match="blk_kv must be the block size that the CSR was built with"):
        selection(row_ptr, queries, 3, 4, not_needed, 32)


def test_many_entries_are_sorted_a_head_at_a_time(monkeypatch):
    p, blocks = case((6, 3), (400, 90), topk=4, block_size=BLOCK, kv_heads=3, head_dim=16)
    expected = [*csr(p, blocks, BLOCK), csr(p, blocks, BLOCK, return_schedule=True)[2].qsplit_indices]
    rows = Rows.of(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, BLOCK, 25)
    selected = selection(*expected[:2], 4, 9, not_needed, BLOCK)
    monkeypatch.setattr(k2q_rows, "LARGE", 5)
    *parts, schedule = csr(p, blocks, BLOCK, return_schedule=True)
    for name, a, b in zip(("row_ptr", "queries", "qsplit"), [*parts, schedule.qsplit_indices], expected, strict=True):
        assert_equal(name, a, b)
    assert_equal("remembered", selection(*parts, 4, 9, not_needed, BLOCK), selected)
    assert_equal("rebuilt", rebuilt(*parts, 4, 9, rows), selected)


def test_wild_csr_entries_are_skipped():
    p, blocks = case((4,), (70,), topk=3, block_size=BLOCK, kv_heads=1, head_dim=16)
    row_ptr, queries = (x.clone() for x in csr(p, blocks, BLOCK))
    queries[0, 0], queries[0, 1] = 2**31 - 1, -7
    rows = Rows.of(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, BLOCK, 5)
    found = rebuilt(row_ptr, queries, 3, 4, rows)
    found = found[found != NOTHING]
    assert (found < 5).all()
    assert len(found) == max(int(row_ptr[0, -1]) - 2, 0)


@pytest.mark.parametrize("topk", [1, 2, 16, 64])
def test_any_topk_and_strides(topk):
    p, blocks = case((6, 30), (400, 1400), topk=topk, block_size=BLOCK, kv_heads=2, head_dim=16)
    wide = torch.full((*blocks.shape[:2], 2 * topk), 7, dtype=torch.int32)
    wide[..., ::2] = blocks
    for name, a, b in zip(("row_ptr", "queries"), csr(p, wide[..., ::2], BLOCK), csr(p, blocks, BLOCK), strict=True):
        assert_equal(name, a, b)


def test_builder_and_reference_agree():
    p, blocks = case((6, 3), (400, 90), topk=4, block_size=128, kv_heads=2, head_dim=16)
    q2k, starts = blocks.transpose(0, 1), (p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k)
    expected = build_k2q_csr(q2k, *starts, 128, total_k=490)
    built = SparseK2qCsrBuilderSm100()(q2k, *starts, total_k=490)
    reference = build_k2q_csr_torch_reference(q2k, *starts, 128)
    for a, b, c in zip(expected, built, reference, strict=True):
        assert_equal("built", b, a)
        assert_equal("reference", c, a)
    wrong = blocks.clamp(max=0)
    wrong[6, 0, 2] = 1
    with pytest.raises(ValueError, match=r"one of the 1 blocks of its sequence .* got 1 at head 0, query 6"):
        build_k2q_csr_torch_reference(wrong.transpose(0, 1), *starts, 128)


def test_dense_form_there_and_back():
    generator = torch.Generator().manual_seed(0)
    q2k = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(2 * 3 * 5)]).view(2, 3, 5, 4).int()
    q2k[:, :, 2] = -1
    q2k[0, 0, 0, 1] = -1
    k2q, held = q2k_to_k2q(q2k, 9)
    assert k2q.shape == (2, 3, 9, 5)
    for b in range(2):
        for h in range(3):
            for j in range(9):
                readers = [i for i in range(5) if j in q2k[b, h, i].tolist()]
                assert k2q[b, h, j].tolist() == readers + [-1] * (5 - len(readers))
                assert held[b, h, j] == len(readers)
    back = k2q_to_q2k(k2q, held, 5, 4)
    far = torch.where(q2k < 0, 99, q2k).sort(-1).values
    assert_equal("back", back, torch.where(far == 99, -1, far))


ARGUMENTS = {
    "q2k_indices": torch.zeros(2, 3, 4, dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32),
    "cu_seqlens_k": torch.tensor([0, 200], dtype=torch.int32),
    "kv_block_size": 128,
    "total_k": 200,
}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"q2k_indices": torch.zeros(2, 3, 4)}, TypeError, "q2k_indices must have dtype torch.int32, got torch.float32"),
        ({"q2k_indices": torch.zeros(3, 4, dtype=torch.int32)}, ValueError, r"q2k_indices must have shape \[num_kv_heads"),
        ({"q2k_indices": torch.zeros(2, 3, 65, dtype=torch.int32)}, ValueError, r"topk\) must be from 1 to 64, got 65"),
        ({"q2k_indices": [0]}, TypeError, "q2k_indices must be a torch.Tensor"),
        ({"kv_block_size": 8}, ValueError, "kv_block_size must be from 16 to 256, got 8"),
        ({"kv_block_size": 128.0}, TypeError, "kv_block_size must be an int"),
        ({"total_k": None}, ValueError, "total_k must be the number of keys"),
        ({"total_k": -1}, ValueError, "total_k must be at least 0, got -1"),
        ({"qhead_per_kv": 0}, ValueError, "qhead_per_kv must be at least 1, got 0"),
        ({"cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32)}, ValueError, "cu_seqlens_q must end at the number of quer"),
        ({"cu_seqlens_q": torch.tensor([0, 3.0])}, TypeError, "cu_seqlens_q must have dtype torch.int32 or torch.int64"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 3], dtype=torch.int32)}, ValueError, "cu_seqlens_k must not decrease"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 9], dtype=torch.int32)}, ValueError, "as many entries as cu_seqlens_q"),
        ({"max_seqlen_k": 150}, ValueError, r"max_seqlen_k must be at least the longest sequence \(200\), got 150"),
        ({"max_seqlen_q": 2}, ValueError, r"max_seqlen_q must be at least the longest sequence \(3\), got 2"),
        ({"total_rows": 1}, ValueError, r"total_rows must be at least the blocks of all sequences \(2\), got 1"),
        ({"return_schedule": True}, ValueError, "max_seqlen_q must be given with return_schedule=True"),
        ({"return_schedule": True, "max_seqlen_q": 3}, ValueError, "max_seqlen_k must be given with return_schedule=True"),
        ({"return_schedule": "no"}, TypeError, "return_schedule must be a bool, got str"),
        ({"max_seqlen_k": "200"}, TypeError, r"max_seqlen_k must be an int, got str \('200'\)"),
        ({"max_seqlen_q": 3.5}, TypeError, r"max_seqlen_q must be an int, got float \(3.5\)"),
        ({"total_k": 1}, ValueError, r"total_k must be at least the keys of cu_seqlens_k \(\d+\) or 0, got 1"),
    ],
)
def test_misuse(change, error, match):
    with pytest.raises(error, match=match):
        build_k2q_csr(**(ARGUMENTS | change))


@pytest.mark.gpu
def test_building_is_captured_and_does_not_wait():
    p, first = case((40, 30), (700, 300), topk=4, kv_heads=2, head_dim=16)
    _, second = case((40, 30), (700, 300), topk=4, kv_heads=2, head_dim=16, seed=1)
    second = first.flip(0).roll(3, 2) if torch.equal(first, second) else second
    device, q2k = "cuda", first.cuda()
    options = {"return_schedule": True, "total_rows": 9, "qhead_per_kv": 2}
    own = p.to(device).seqs
    starts = own.cu_seqlens_q, own.cu_seqlens_k
    options |= {"total_k": 1000, "max_seqlen_q": 40, "max_seqlen_k": 700}

    def build():
        return build_k2q_csr(q2k.transpose(0, 1), *starts, 128, **options)

    build()
    torch.cuda.set_sync_debug_mode("error")
    try:
        build()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row_ptr, queries, schedule = build()
    for blocks in (first, second):
        q2k.copy_(blocks)
        graph.replay()
        expected = csr(p, blocks, 128, **{"return_schedule": True, "total_rows": 9, "qhead_per_kv": 2})
        assert_equal("row_ptr", row_ptr, expected[0])
        assert_equal("queries", queries, expected[1])
        assert_equal("split_counts", schedule.split_counts, expected[2].split_counts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("most", [5, 2**14 - 1, 2**14, 2**15 - 1, 2**15, 2**30 - 1, 2**31 - 1])
@pytest.mark.parametrize("heads", [1, 2])
def test_sorting_whole_heads(device, heads, most):
    """Equal values keep their order at the limits of each kind of key, and all values above the limit count as the limit."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randint(0, 2**31 - 1, (2, 300), generator=generator).int() % torch.tensor([[9], [most]], dtype=torch.int32)
    value[:, ::7], value[:, 1::7] = 2**31 - 1, max(most - 1, 0)
    value = value[:heads]
    ordered, entry = sort_heads(value.to(device), most)
    expected = value.clamp(max=most).sort(dim=1, stable=True)
    assert_equal("ordered", ordered.int(), expected.values)
    assert_equal("entry", entry, expected.indices)


def test_counts_must_fit_the_lists():
    k2q, counts = torch.zeros(1, 2, 3, 5, dtype=torch.int32), torch.ones(1, 2, 3, dtype=torch.int32)
    for wrong, rule in (
        (counts[:, :1], r"k2q_counts\.shape\[1\] must be 2"),
        (counts[..., :1], r"k2q_counts\.shape\[2\] must be 3"),
        (counts.to("meta"), "k2q_counts must be on the device of k2q_indices"),
        (counts + 5, "k2q_counts must lie from 0 to 5, got 6"),
        (counts - 2, "k2q_counts must lie from 0 to 5, got -1"),
    ):
        with pytest.raises(ValueError, match=rule):
            k2q_to_q2k(k2q, wrong, 5, 3)


def test_lists_of_queries_in_a_traced_graph():
    k2q, counts = torch.tensor([[[[0, 2], [1, 2]]]], dtype=torch.int32), torch.tensor([[[2, 1]]], dtype=torch.int32)
    traced = torch.compile(k2q_to_q2k, fullgraph=True, backend="eager")
    assert_equal("blocks", traced(k2q, counts, 3, 2), k2q_to_q2k(k2q, counts, 3, 2))
