# SPDX-License-Identifier: MIT
"""Paged caches append and gather, with shared and shuffled pages, and errors change nothing."""

import pytest
import torch

from openmsa import PagedIndexKeys, PagedKV
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, strided
from tests import oracle
from tests.contract import DEVICES

devices = pytest.mark.parametrize("device", DEVICES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)


def table(device, *rows):
    return torch.tensor(rows, dtype=torch.int32, device=device)


def lens(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(device, *lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


@devices
@DTYPES
@pytest.mark.parametrize("page_size", [1, 5, 16, 100])
def test_gather_reads_what_pages_hold(device, dtype, page_size):
    """Keys are read from shuffled pages and a shared prefix, with wild ids past the end, NaN in every unused slot, and pools of
    any strides."""
    p = problem((1, 1, 1, 1), (0, 17, 40, 33), dtype=dtype, shared_prefix=16).to(device)
    for interleaved in (False, True):
        kv, index_keys = paged(p, page_size, interleaved=interleaved)
        k, v, cu = kv.gather()
        assert_equal("k", k, p.k)
        assert_equal("v", v, p.v)
        assert_equal("cu_seqlens", cu, starts(device, 0, 17, 40, 33))
        assert_equal("keys", index_keys.gather()[0], p.index_k)
        fewer, cu = index_keys.gather(lens(device, 0, 3, 16, 33))
        assert_equal("cu_seqlens", cu, starts(device, 0, 3, 16, 33))
        pieces = p.index_k.split([0, 17, 40, 33])
        assert_equal("fewer", fewer, torch.cat([piece[:n] for piece, n in zip(pieces, (0, 3, 16, 33), strict=True)]))


@devices
def test_shared_pages_are_stored_once(device):
    p = problem((1, 1, 1), (40, 40, 20), shared_prefix=32).to(device)
    kv, _ = paged(p, 16)
    assert kv.page_table[:, 0].unique().numel() == 1
    assert kv.page_table[:2, 1].unique().numel() == 1
    assert kv.page_table[2, 1] != kv.page_table[0, 1]


@devices
@DTYPES
def test_append_in_pieces(device, dtype):
    """Ragged pieces, also empty ones, from strided tensors of another dtype: the keys come back rounded once, in order."""
    p = problem((1, 1, 1), (21, 0, 9)).to(device)
    page_table = table(device, [6, 1, 4, 9], [0, -1, -1, -1], [2, 8, -1, 99])
    kv = PagedKV.allocate(page_table, 10, 2, 8, 64, dtype)
    index_keys = PagedIndexKeys.allocate(page_table, 10, 1, 8, 64, dtype)
    done = [0, 0, 0]
    for piece in ([8, 0, 0], [1, 0, 3], [0, 0, 0], [12, 0, 6]):
        rows = torch.cat(
            [torch.arange(first + n, first + n + m) for first, n, m in zip((0, 21, 21), done, piece, strict=True)]
        ).to(device)
        kv.append(strided(p.k[rows]), strided(p.v[rows], 2), starts(device, *piece))
        index_keys.append(strided(p.index_k[rows]), starts(device, *piece))
        done = [a + b for a, b in zip(done, piece, strict=True)]
        assert kv.seq_lens.tolist() == index_keys.seq_lens.tolist() == done
    for name, tested, given in zip("kv", kv.gather(), (p.k, p.v), strict=False):
        assert_equal(name, tested, given.to(dtype))
    assert_equal("keys", index_keys.gather()[0], p.index_k.to(dtype))
    assert_equal("k", oracle.from_pages(kv.k.cpu(), page_table.cpu(), kv.seq_lens.cpu()), p.k.to(dtype).cpu())


@devices
def test_append_touches_nothing_else(device):
    """Other slots, pages of others and the page table stay as they are, whatever they hold."""
    p = problem((1, 1), (21, 9)).to(device)
    kv, _ = paged(p, 8, interleaved=True)
    before, page_table = kv.k.clone(), kv.page_table.clone()
    new = torch.ones(2, 2, 64, device=device)
    kv.append(new, new)  # one token each
    written = torch.zeros_like(before, dtype=torch.bool)
    for b, position in enumerate((21, 9)):
        written[page_table[b, position // 8], :, position % 8] = True
    assert_equal("k", kv.k, before.masked_fill(written, 1))
    assert_equal("page_table", kv.page_table, page_table)
    assert kv.seq_lens.tolist() == [22, 10]


@devices
def test_append_up_to_capacity(device):
    kv = PagedKV.allocate(table(device, [1, 0]), 2, 1, 4, 16)
    assert kv.capacity == 8
    new = torch.arange(8.0, device=device)[:, None, None].repeat(1, 1, 16)
    kv.append(new, -new)
    k, v, _ = kv.gather()
    assert_equal("k", k, new)
    assert_equal("v", v, -new)
    kv.append(new[:0], new[:0])
    assert kv.seq_lens.tolist() == [8]


@devices
def test_sequences_go_apart_behind_a_shared_page(device):
    kv = PagedKV.allocate(table(device, [0, 1], [0, 2]), 3, 1, 4, 16)
    new = torch.arange(6.0, device=device)[:, None, None].repeat(1, 1, 16)
    kv.append(new, new, starts(device, 6, 0))
    kv.seq_lens[1] = 4  # the prefix in page 0
    kv.append(-new[:2], -new[:2], starts(device, 0, 2))
    assert_equal("k", kv.gather()[0], torch.cat([new, new[:4], -new[:2]]))


@devices
def test_empty_batch(device):
    kv = PagedKV.allocate(torch.empty(0, 4, dtype=torch.int32, device=device), 2, 1, 4, 16)
    k, v, cu = kv.gather()
    assert k.shape == v.shape == (0, 1, 16)
    assert cu.tolist() == [0]
    new = torch.empty(0, 1, 16, device=device)
    kv.append(new, new, starts(device))
    assert kv.seq_lens.numel() == 0


def full_cache(device):
    """Returns a cache of two sequences with 5 and 8 keys in pages of 4, the second of which is full."""
    page_table = table(device, [3, 0], [1, 4])
    pools = [torch.randn(6, 2, 4, 16, device=device) for _ in range(2)]
    return PagedKV(*pools, page_table, lens(device, 5, 8))


def rows(n, heads=2, dim=16, dtype=torch.float32, device="cpu"):
    return torch.zeros(n, heads, dim, dtype=dtype, device=device)


BAD_APPENDS = {
    "rank": (ValueError, ("k ", "[total_new, heads, dim]", "(1, 16)"), lambda c, d: c.append(rows(1, device=d)[:, 0], rows(1))),
    "not a tensor": (TypeError, ("v ", "torch.Tensor", "list"), lambda c, d: c.append(rows(1, device=d), [1.0])),
    "integers": (TypeError, ("k ", "dtype", "int64"), lambda c, d: c.append(rows(1, dtype=torch.int64, device=d), rows(1))),
    "heads": (ValueError, ("k.shape[1]", "2", "got 3"), lambda c, d: c.append(rows(1, 3, device=d), rows(1, 3, device=d))),
    "dim": (
        ValueError,
        ("v.shape[2]", "16", "got 32"),
        lambda c, d: c.append(rows(1, device=d), rows(1, dim=32, device=d), starts(d, 1, 0)),
    ),
    "tokens of v": (
        ValueError,
        ("v.shape[0]", "1", "got 2"),
        lambda c, d: c.append(rows(1, device=d), rows(2, device=d), starts(d, 1, 0)),
    ),
    "device": (
        ValueError,
        ("k ", "device", "meta"),
        lambda c, d: c.append(rows(1, device="meta"), rows(1, device=d), starts(d, 1, 0)),
    ),
    "not a multiple of the batch": (
        ValueError,
        ("k.shape[0]", "multiple of the batch (2)", "got 3"),
        lambda c, d: c.append(rows(3, device=d), rows(3, device=d)),
    ),
    "batch": (
        ValueError,
        ("cu_seqlens ", "3", "got 2"),
        lambda c, d: c.append(rows(1, device=d), rows(1, device=d), starts(d, 1), check=True),
    ),
    "decreasing": (
        ValueError,
        ("cu_seqlens ", "decrease", "2 then 1"),
        lambda c, d: c.append(rows(1, device=d), rows(1, device=d), lens(d, 0, 2, 1), check=True),
    ),
    "end": (
        ValueError,
        ("cu_seqlens ", "1", "got 2"),
        lambda c, d: c.append(rows(1, device=d), rows(1, device=d), starts(d, 1, 1), check=True),
    ),
    "capacity": (
        ValueError,
        ("page_table must have the capacity", "8", "got 9 for sequence 1"),
        lambda c, d: c.append(rows(1, device=d), rows(1, device=d), starts(d, 0, 1), check=True),
    ),
    "capacity of one of two": (
        ValueError,
        ("page_table must have the capacity", "8", "got 9 for sequence 1"),
        lambda c, d: c.append(rows(2, device=d), rows(2, device=d), check=True),
    ),
    "NaN": (
        ValueError,
        ("v ", "no NaN", "(0, 0, 0)"),
        lambda c, d: c.append(rows(1, device=d), rows(1, device=d) * float("nan"), starts(d, 1, 0), check=True),
    ),
}


@devices
@pytest.mark.parametrize("case", BAD_APPENDS)
def test_a_refused_append_changes_nothing(device, case):
    error, words, call = BAD_APPENDS[case]
    cache = full_cache(device)
    before = {name: x.clone() for name, x in vars(cache).items()}
    with pytest.raises(error) as caught:
        call(cache, device)
    for word in words:
        assert word in str(caught.value)
    for name, x in vars(cache).items():
        assert_equal(name, x, before[name])


@devices
@pytest.mark.parametrize("page", [-1, 6, 2**31 - 1])
def test_append_needs_pages(device, page):
    cache = full_cache(device)
    cache.page_table[0, 1] = page
    before = cache.k.clone()
    with pytest.raises(ValueError, match=rf"page_table\[0, 1\] must be a page from 0 to 5.*got {page}"):
        cache.append(rows(1, device=device), rows(1, device=device), starts(device, 1, 0), check=True)
    assert_equal("k", cache.k, before)
    assert cache.seq_lens.tolist() == [5, 8]


@devices
def test_two_sequences_must_not_write_one_place(device):
    cache = full_cache(device)
    cache.page_table[1] = cache.page_table[0]
    cache.seq_lens.fill_(5)
    before = cache.k.clone()
    with pytest.raises(ValueError, match=r"page_table must .*same place"):
        cache.append(rows(2, device=device), rows(2, device=device), check=True)
    assert_equal("k", cache.k, before)


BAD_CACHES = {
    "rank of k": (ValueError, ("k ", "[num_pages, heads, page_size, dim]", "(2, 4, 16)"), {"k": torch.zeros(2, 4, 16)}),
    "dtype of k": (TypeError, ("k ", "dtype", "int8"), {"k": torch.zeros(6, 2, 4, 16, dtype=torch.int8)}),
    "dtype of v": (TypeError, ("v ", "dtype of k", "float16"), {"v": torch.zeros(6, 2, 4, 16, dtype=torch.float16)}),
    "shape of v": (ValueError, ("v ", "(6, 2, 4, 16)", "(5, 2, 4, 16)"), {"v": torch.zeros(5, 2, 4, 16)}),
    "device of v": (ValueError, ("v ", "device of k", "meta"), {"v": torch.zeros(6, 2, 4, 16, device="meta")}),
    "head dim": (
        ValueError,
        ("k.shape[3]", "multiple of 16", "got 24"),
        {"k": torch.zeros(6, 2, 4, 24), "v": torch.zeros(6, 2, 4, 24)},
    ),
    "page size": (
        ValueError,
        ("page_size", "at least 1", "got 0"),
        {"k": torch.zeros(6, 2, 0, 16), "v": torch.zeros(6, 2, 0, 16)},
    ),
    "dtype of page_table": (TypeError, ("page_table ", "int32", "int64"), {"page_table": torch.zeros(2, 2, dtype=torch.int64)}),
    "rank of page_table": (
        ValueError,
        ("page_table ", "[batch, max_pages]", "(2,)"),
        {"page_table": torch.zeros(2, dtype=torch.int32)},
    ),
    "batch of seq_lens": (ValueError, ("seq_lens.shape[0]", "2", "got 3"), {"seq_lens": lens("cpu", 1, 2, 3)}),
    "dtype of seq_lens": (TypeError, ("seq_lens ", "int32", "float32"), {"seq_lens": torch.zeros(2)}),
    "device of page_table": (
        ValueError,
        ("page_table ", "device of k", "meta"),
        {"page_table": torch.zeros(2, 2, dtype=torch.int32, device="meta")},
    ),
    "gaps in page_table": (
        ValueError,
        ("page_table ", "stride 1 in its last dimension", "(1, 2)"),
        {"page_table": torch.zeros(2, 2, dtype=torch.int32).t()},
    ),
    "gaps in seq_lens": (ValueError, ("seq_lens ", "stride 1", "(2,)"), {"seq_lens": lens("cpu", 1, 2, 3, 4)[::2]}),
    "not a tensor": (TypeError, ("seq_lens ", "torch.Tensor", "list"), {"seq_lens": [5, 8]}),
}


@pytest.mark.parametrize("case", BAD_CACHES)
def test_bad_caches(case):
    error, words, change = BAD_CACHES[case]
    with pytest.raises(error) as caught:
        PagedKV(**(vars(full_cache("cpu")) | change))
    for word in words:
        assert word in str(caught.value)


def test_bad_sizes():
    good = (torch.zeros(2, 2, dtype=torch.int32), 6, 2, 4, 16)
    for at, value, error, words in (
        (0, None, TypeError, "page_table must be a torch.Tensor .* got NoneType"),
        (1, -1, ValueError, "num_pages must be at least 0, got -1"),
        (2, 0, ValueError, "heads must be at least 1, got 0"),
        (3, 1.5, TypeError, r"page_size must be an int, got float \(1.5\)"),
        (4, -16, ValueError, "dim must be at least 1, got -16"),
    ):
        for cache in (PagedKV, PagedIndexKeys):
            with pytest.raises(error, match=words):
                cache.allocate(*good[:at], value, *good[at + 1 :], format="e4m3")


def test_flags_lengths_and_dtypes_are_checked():
    cache = full_cache("cpu")
    for bad, error, words in (
        ([5, 8], TypeError, "lens must be a torch.Tensor"),
        (lens("cpu", 5), ValueError, r"lens.shape\[0\] must be 2"),
        (lens("cpu", 5, -1), ValueError, "lens must lie from 0 to 8, got -1"),
        (lens("cpu", 5, 9), ValueError, "lens must lie from 0 to 8, got 9"),
    ):
        with pytest.raises(error, match=words):
            cache.gather(bad)
    with pytest.raises(TypeError, match="check must be True or False, got str"):
        cache.append(rows(0), rows(0), check="no")
    with pytest.raises(TypeError, match=r"dtype must be torch.float32 or .*, got None"):
        PagedKV.allocate(cache.page_table, 6, 2, 4, 16, dtype=None)


def test_a_page_with_keys_of_another_sequence_is_not_written():
    """Sequence 0 ends inside page 2, which sequence 1 shares and fills further."""
    table = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    cache = PagedKV.allocate(table, 4, 1, 4, 16)
    cache.seq_lens.copy_(torch.tensor([5, 7]))
    before = [x.clone() for x in (cache.k, cache.v, cache.seq_lens)]
    new = torch.ones(1, 1, 16)
    with pytest.raises(ValueError, match="page 2 of sequence 0 holds keys of sequence 1 at row 1"):
        cache.append(new, new, torch.tensor([0, 1, 1]))
    for old, now in zip(before, (cache.k, cache.v, cache.seq_lens), strict=True):
        assert_equal("cache", now, old)
    cache.append(new, new, torch.tensor([0, 0, 1]))  # behind every key of that page
    assert cache.seq_lens.tolist() == [5, 8]


def test_slots_in_a_traced_graph():
    cache = PagedKV.allocate(table("cpu", [3, 1, 0], [2, 4, 5]), 6, 2, 32, 64)
    traced = torch.compile(lambda sequence, position: cache.slots(sequence, position), fullgraph=True, backend="eager")
    assert traced(lens("cpu", 0, 1), lens("cpu", 33, 95)).tolist() == [33, 5 * 32 + 31]


def test_slots_and_pages_outside_the_table_are_refused():
    cache = PagedKV.allocate(table("cpu", [3, 1, 0], [2, 4, 5]), 6, 2, 32, 64)
    assert cache.slots(lens("cpu", 0, 1), lens("cpu", 33, 95)).tolist() == [33, 5 * 32 + 31]
    for sequence, position, rule in (
        (2, 0, "sequence must lie from 0 to 1, got 2"),
        (-1, 0, "sequence must lie from 0 to 1, got -1"),
        (0, 96, "position must lie from 0 to 95, got 96"),
        (0, -1, "position must lie from 0 to 95, got -1"),
    ):
        with pytest.raises(ValueError, match=rule):
            cache.slots(lens("cpu", sequence), lens("cpu", position))
    with pytest.raises(TypeError, match=r"position must be a tensor of torch\.int32 or torch\.int64, got torch\.float32"):
        cache.slots(lens("cpu", 0), torch.zeros(1))
    with pytest.raises(TypeError, match=r"sequence must be a tensor .*got int"):
        cache.slots(0, lens("cpu", 0))
    with pytest.raises(TypeError, match=r"lens must be a torch\.Tensor of shape \[batch\], got list"):
        cache.check_pages([1, 2])
    with pytest.raises(ValueError, match=r"lens\.shape\[0\] must be 2 \(the batch of page_table\), got 1"):
        cache.check_pages(lens("cpu", 1))
