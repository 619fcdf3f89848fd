# SPDX-License-Identifier: MIT
"""transformers' own integration of MSA works, as it stands, with `fmha_sm100` where it expects the kernel from the hub."""

import contextlib
import types

import pytest
import torch

from tests.exact import DEVICES, Batch, assert_attention

path = pytest.importorskip("transformers.integrations.msa_attention", reason="this transformers has no MSA integration")

import fmha_sm100  # noqa: E402

BLOCK, HEADS, KV_HEADS, DIM = 128, 8, 2, 128


@pytest.fixture
def kernel(monkeypatch):
    """Sets what loading from the hub sets, but for the check of the device, which asks for SM100."""
    monkeypatch.setattr(path, "_MSA_KERNEL", fmha_sm100)
    monkeypatch.setattr(path, "_validate_msa_init", lambda *arguments: None)
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("q_len", "k_len"), [(300, 300), (1, 513), (70, 400)])
def test_selections_in_score_order(kernel, q_len, k_len, device):
    generator = torch.Generator().manual_seed(q_len)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = ((2, HEADS, q_len, DIM), *((2, KV_HEADS, k_len, DIM),) * 2)
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    own = torch.arange(k_len - q_len, k_len) // BLOCK
    ids = torch.full((2, KV_HEADS, q_len, 3), -1)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in ids.shape[:3])).tolist():
        last = int(own[index[2]])
        others = torch.randperm(last, generator=generator)[:2]
        ids[(*index, slice(0, 1 + len(others)))] = torch.cat((torch.tensor([last]), others))  # the own block first
    config = types.SimpleNamespace(_attn_implementation="MiniMaxAI/msa")
    module = types.SimpleNamespace(indexer=types.SimpleNamespace(block_size=BLOCK, topk_blocks=4), config=config)
    out, weights = path.msa_attention_forward(module, q, k, v, None, scaling=DIM**-0.5, block_indices=ids.to(device))
    assert weights is None
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    batch = Batch(*flat, (q_len,) * 2, (k_len,) * 2)
    assert_attention("out", out.flatten(0, 1), batch, blocks=ids.transpose(1, 2).flatten(0, 1).int().to(device))


@pytest.mark.parametrize("device", DEVICES)
def test_decode_with_a_static_cache(kernel, device):
    """k_len is the cache's capacity; how much of it is filled stands in cache_position."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    filled, capacity = 300, 512
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, m, DIM, generator=generator).to(device, dtype) for n, m in ((8, 1), (2, capacity), (2, capacity))
    )
    k[:, :, filled:], v[:, :, filled:] = 100.0, torch.nan
    ids = torch.tensor([2, 0, -1, -1], device=device).expand(1, KV_HEADS, 1, 4)
    config = types.SimpleNamespace(_attn_implementation="MiniMaxAI/msa")
    module = types.SimpleNamespace(indexer=types.SimpleNamespace(block_size=BLOCK, topk_blocks=4), config=config)
    position = torch.tensor([filled - 1], device=device)
    out, _ = path.msa_attention_forward(module, q, k, v, None, block_indices=ids, cache_position=position)
    flat = q[0].transpose(0, 1), *(x[0, :, :filled].transpose(0, 1) for x in (k, v))
    blocks = ids.transpose(1, 2).flatten(0, 1).int()
    assert_attention("out", out.flatten(0, 1), Batch(*flat, (1,), (filled,)), blocks=blocks)
