# SPDX-License-Identifier: MIT
"""Products of few rows on a CPU are compared with float64 for each type and order in memory of keys."""

import pytest
import torch

from openmsa.runtime.matmul import CONVERTED_ELEMENTS, products_few, room_for, sums_few
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
@pytest.mark.parametrize("block_size", [1, 100, 128])
def test_products_and_sums(n, block_size, order, dtype):
    k, q = keys(order, n, dtype), torch.randn(HEADS, 4, DIM)
    k[:, -1] = k[:, 0]
    found = products_few(q, k, block_size)
    honest, exact = (a @ b.transpose(1, 2) for a, b in ((q, k.float()), (q.double(), k.double())))
    assert found.shape == (HEADS, 4, -(-n // block_size) * block_size)
    assert bool((found[..., n:] == -torch.inf).all())
    assert_close("products", found[..., :n], honest, exact)
    assert torch.equal(found[..., 0], found[..., n - 1])  # Equal keys are ties.
    weights = torch.softmax(torch.randn(HEADS, 4, n), 2)
    assert_close("sums", sums_few(weights, k), weights @ k.float(), weights.double() @ k.double())


@pytest.mark.parametrize("order", ["tokens first", "heads first"])
def test_converted_keys_keep_their_order(order):
    k = keys(order, 40, torch.bfloat16)
    room = room_for(k, 40, torch.float32)
    assert room.shape == k.shape
    assert room.dtype == torch.float32
    assert room.stride() == k.stride()
