# SPDX-License-Identifier: MIT
"""An engine's new tokens are normalised, rotated and stored as in float64, and nothing else is written."""

import pytest
import torch

from openmsa.integrations.new_tokens import Caches, Norms, Places, prepare, serves
from openmsa.integrations.sizes import LayerSizes

E4M3 = torch.float8_e4m3fn
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def sizes(heads, kv_heads, index_heads, dim, index_dim=None):
    return LayerSizes(
        num_q_heads=heads, num_kv_heads=kv_heads, head_dim=dim, index_heads=index_heads, index_dim=index_dim or dim, topk=16,
        block_size=128, init_blocks=0, local_blocks=1, softmax_scale=dim**-0.5,
    )  # fmt: skip


def reference(qkv, norms, eps, places, layer):
    """Returns queries, keys, values, index queries and index keys ``[tokens, heads, dim]`` in float64."""
    heads, kv, index, dim = layer.num_q_heads, layer.num_kv_heads, layer.index_heads, layer.head_dim
    parts = qkv.double().unflatten(1, (-1, dim)).split([heads, kv, kv, index, 1], 1)
    cos, sin = places.angles.double()[places.positions].unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    found = []
    for x, weight in zip(parts, (norms.q, norms.k, None, norms.index_q, norms.index_k), strict=True):
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.double())
            a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
            x = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        found.append(x)
    return found


def written(pool, slots, rows, page):
    """Returns a pool ``[pages, heads, page, dim]`` with rows ``[tokens, heads, dim]`` at their slots, in float64."""
    pool = pool.double()
    for slot, row in zip(slots.tolist(), rows, strict=False):
        if slot >= 0:
            pool[slot // page, :, slot % page] = row
    return pool


CASES = {  # tokens, heads, kv_heads, index_heads, dim, rotary_dim, page, qkv, KV cache, index cache
    "one token": (1, 16, 1, 1, 128, 64, 128, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "a few": (5, 6, 2, 2, 64, 64, 16, torch.float16, torch.float16, torch.float16),
    "four a program": (19, 3, 1, 1, 128, 32, 64, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "sixteen a program": (70, 4, 2, 1, 32, 2, 16, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "e4m3": (7, 4, 2, 2, 128, 64, 128, torch.bfloat16, torch.uint8, E4M3),
    "e4m3 index cache": (18, 2, 2, 1, 64, 16, 32, torch.float32, E4M3, E4M3),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("heads_inside", [False, True])
def test_rows_are_those_of_float64(case, heads_inside):
    tokens, heads, kv, index, dim, rotary_dim, page, dtype, kv_dtype, index_dtype = case
    layer, pages, draw = sizes(heads, kv, index, dim), 8, torch.Generator().manual_seed(tokens)

    def drawn(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE)

    width = (heads + 2 * kv + index + 1) * dim
    qkv = (3 * drawn(tokens, width + 8)).to(dtype)[:, :width]  # rows lie apart
    norms = Norms(*(0.3 * drawn(4, dim)).to(dtype))
    angles = drawn(50, rotary_dim).clamp(-1, 1).to(dtype)
    slots, index_slots = (torch.randperm(pages * page, generator=draw)[:tokens].to(DEVICE) for _ in range(2))
    slots[tokens // 2], index_slots = (-1 if tokens > 1 else slots[0]), index_slots[: max(tokens - 2, 1)]
    places = Places(torch.randint(50, (tokens,), generator=draw).to(DEVICE), angles, slots, index_slots)
    kv_pool = drawn(pages, page, kv, 2 * dim).transpose(1, 2) if heads_inside else drawn(pages, kv, page, 2 * dim)
    stored = E4M3 if kv_dtype == torch.uint8 else kv_dtype
    kv_pool, index_pool = kv_pool.to(stored), drawn(pages, page, dim).to(index_dtype)
    q, k, v, index_q, index_k = reference(qkv, norms, 1e-5, places, layer)
    placed = index_slots.numel()
    expected_kv = written(kv_pool, slots[:placed], torch.cat([k, v], -1), page)
    expected_index = written(index_pool.unsqueeze(1), index_slots, index_k, page).squeeze(1)

    held = kv_pool.view(torch.uint8) if kv_dtype == torch.uint8 else kv_pool
    found = prepare(qkv, norms, 1e-5, places, Caches(held, index_pool), layer, index_dtype)

    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-6, E4M3: 2**-4}
    for x, y, kind in (
        (found.q, q.flatten(1), dtype),
        (found.index_q, index_q.flatten(1), index_dtype),
        (kv_pool, expected_kv, stored),
        (index_pool, expected_index, index_dtype),
    ):
        assert x.dtype == kind
        torch.testing.assert_close(x.double(), y, rtol=1.01 * rounding[kind], atol=1e-3 if kind == E4M3 else 1e-6)


def test_no_token_is_no_launch():
    layer, none = sizes(4, 2, 2, 64), torch.empty(0, dtype=torch.int64)
    norms, places = Norms(*torch.zeros(4, 64)), Places(none, torch.zeros(4, 32), none, none)
    caches = Caches(torch.zeros(2, 2, 16, 128), torch.zeros(2, 16, 64))
    q, index_q = prepare(torch.zeros(0, 11 * 64), norms, 1e-6, places, caches, layer, torch.bfloat16)
    assert q.shape == (0, 256)
    assert index_q.shape == (0, 128)
    assert index_q.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("layer", "rotary_dim", "served"),
    [
        (sizes(16, 1, 1, 128), 64, True),
        (sizes(16, 1, 1, 128), 128, True),
        (sizes(16, 1, 1, 128), 0, False),
        (sizes(16, 1, 1, 128), 63, False),
        (sizes(16, 1, 1, 64), 128, False),
        (sizes(16, 1, 1, 96), 64, False),
        (sizes(16, 1, 1, 128, 64), 64, False),
    ],
)
def test_which_layers_are_served(layer, rotary_dim, served):
    assert serves(layer, rotary_dim) == served
