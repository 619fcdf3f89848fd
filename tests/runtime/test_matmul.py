# SPDX-License-Identifier: MIT
"""Products of few rows on a CPU are compared with float64 for each type and order in memory of keys."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openmsa.runtime import matmul
from openmsa.runtime.matmul import CONVERTED_ELEMENTS, converted, products_few, sums_few
from openmsa.testing.compare import assert_close

HEADS, DIM = 3, 64
ORDERS = {
    "tokens first": lambda n: torch.randn(n, HEADS, DIM).transpose(0, 1),
    "heads first": lambda n: torch.randn(HEADS, n, DIM),
    "some of more heads": lambda n: torch.randn(n, HEADS + 2, DIM)[:, 1:-1].transpose(0, 1),
}
MANY = 2 * CONVERTED_ELEMENTS // (HEADS * DIM) + 5  # keys that are converted in tiles, the last of them cut short


def keys(order: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    return ORDERS[order](n).to(dtype)  # The conversion keeps the order.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [5, 96, MANY])
def test_products_and_sums(n, order, dtype):
    k, q = keys(order, n, dtype), torch.randn(HEADS, 4, DIM)
    k[:, -1] = k[:, 0]
    found = products_few(q, k)
    honest, exact = (a @ b.transpose(1, 2) for a, b in ((q, k.float()), (q.double(), k.double())))
    assert found.shape == (HEADS, 4, n)
    assert_close("products", found, honest, exact)
    assert torch.equal(found[..., 0], found[..., n - 1])  # Equal keys are ties.
    weights = torch.softmax(torch.randn(HEADS, 4, n), 2)
    assert_close("sums", sums_few(weights, k), weights @ k.float(), weights.double() @ k.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [5, 128, 300, CONVERTED_ELEMENTS // 128 + 200])
@pytest.mark.parametrize("ties", [None, 0])
@pytest.mark.parametrize("gaps", [False, True])
def test_many_rows_of_one_head(n, gaps, ties, dtype):
    k, q = torch.randn(1, n, 256 if gaps else 128)[..., :128].to(dtype), torch.randn(1, 16, 128)
    k[:, -1] = k[:, 0]
    found = products_few(q, k, ties=ties)
    assert found.shape == (1, 16, n)
    honest, exact = (a @ b.transpose(1, 2) for a, b in ((q, k.float()), (q.double(), k.double())))
    assert_close("products", found, honest, exact)
    assert ties == 0 or torch.equal(found[..., 0], found[..., n - 1])
    weights = torch.softmax(torch.randn(1, 16, n), 2)
    assert_close("sums", sums_few(weights, k), weights @ k.float(), weights.double() @ k.double())


@pytest.fixture
def threads():
    """Returns a function that sets how many threads PyTorch uses."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


PADDED = st.sampled_from([1, 4, 8, 12, 16, 20])
"""Rows as `pad_few` leaves them: MKL's products of 5 rows depend on the number of keys."""


@given(st.integers(1, 4), PADDED, st.integers(1, 1500), st.floats(0, 1), st.sampled_from([16, 64, 80, 128, 256]), st.booleans())
def test_equal_keys_are_ties_among_the_first(heads, rows, n, part, dim, tokens_first):
    ties = round(part * n)
    k = torch.randn(heads, 1, dim).expand(-1, n, -1).contiguous()
    k = k.transpose(0, 1).contiguous().transpose(0, 1) if tokens_first else k
    found = products_few(torch.randn(heads, rows, dim), k, ties=ties)[..., :ties]
    assert torch.equal(found, found[..., :1].expand_as(found))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize(("heads", "n", "parts"), [(1, 4096, 2), (1, 96 * 40 + 20, 3), (2, 4096 * 3, 3), (3, 4096, 3)])
def test_parts_of_a_head_change_no_bit(heads, n, parts, rows, gaps, threads, monkeypatch):
    k, q = torch.randn(n, heads, 256 if gaps else 128)[..., :128].transpose(0, 1), torch.randn(heads, rows, 128)
    threads(1)
    monkeypatch.setattr(matmul, "has_onednn_linear", lambda: False)  # which multiplies 8 rows of one head
    wanted = products_few(q, k)
    threads(3)
    shapes = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: shapes.append(a.shape[0]) or bmm(a, b))
    assert torch.equal(products_few(q, k), wanted)
    assert parts in shapes


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("gaps", [False, True])
def test_products_do_not_depend_on_the_number_of_keys_or_their_gaps(gaps, rows):
    k, q = torch.randn(1, 300, 512 if gaps else 256)[..., :256], torch.randn(1, rows, 256)
    found = products_few(q, k)
    for n in (5, 40, 128, 200):
        assert torch.equal(products_few(q, k[:, :n]), found[..., :n])
        assert torch.equal(products_few(q, k[:, :n].contiguous()), found[..., :n])


@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_converted_keys_keep_their_order(order):
    k = keys(order, 40, torch.bfloat16)
    wide = converted(k, torch.float32)
    assert wide.dtype == torch.float32
    assert wide.stride() == k.stride()
    assert torch.equal(wide, k.float())
    padded = converted(k, torch.float32, 64)
    assert torch.equal(padded, torch.nn.functional.pad(k.float(), (0, 0, 0, 24)))


def test_conversion_takes_the_same_memory_again_but_not_that_of_another_thread():
    k = torch.randn(HEADS, 40, DIM).bfloat16()
    with torch.inference_mode():
        first = converted(k, torch.float32).data_ptr()
    assert converted(k, torch.float32).data_ptr() == first
    with ThreadPoolExecutor(1) as other:
        assert other.submit(converted, k, torch.float32).result().data_ptr() != first
    assert converted(torch.randn(1, CONVERTED_ELEMENTS + 1, 1).bfloat16(), torch.float32).data_ptr() != first


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_conversion_does_not_depend_on_the_default_dtype(default):
    def of_a_new_thread():
        try:
            torch.set_default_dtype(default)
            first = converted(k, torch.float32).clone()
        finally:
            torch.set_default_dtype(torch.float32)
        return first, converted(k, torch.float32).clone()

    k = torch.randn(HEADS, 40, DIM).bfloat16()
    with ThreadPoolExecutor(1) as other:
        for found in other.submit(of_a_new_thread).result():
            assert found.dtype == torch.float32
            assert torch.equal(found, k.float())
