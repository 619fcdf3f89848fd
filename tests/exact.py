# SPDX-License-Identifier: MIT
"""This module computes attention and block scores of a packed batch with whole masked matrices, on any device.

In float64 they are the truth; in the dtype of the inputs, what anyone would write in PyTorch, whose error is the yardstick. The
tests of the public package's commands use it.
"""

from dataclasses import dataclass

import pytest
import torch

from openmsa.testing.compare import assert_close
from tests.products import FP8, e4m3_products, multiplies_e4m3

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


@dataclass(frozen=True)
class Batch:
    """Holds packed q [total_q, Hq, D], k and v [total_k, Hkv, D] of requests with these lengths. Offsets of None mean that
    queries are the last tokens of their request."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_lens: tuple
    k_lens: tuple
    offsets: tuple | None = None
    causal: bool = True

    def lengths(self):
        return torch.tensor(self.q_lens, dtype=torch.int32), torch.tensor(self.k_lens, dtype=torch.int32)

    def offset(self, b):
        return self.k_lens[b] - self.q_lens[b] if self.offsets is None else self.offsets[b]

    def positions(self):
        return torch.cat([torch.arange(n) + self.offset(b) for b, n in enumerate(self.q_lens)])

    def pages(self, page_size=128, seed=0):
        """Returns pools [P, Hkv, page, D] in random order with NaN wherever no key lives, and the flat packed page table."""
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-n // page_size) for n in self.k_lens]
        table = torch.randperm(sum(counts) + 1, generator=generator)[: sum(counts)].int()
        pools = [torch.full((sum(counts) + 1, x.shape[1], page_size, x.shape[2]), torch.nan) for x in (self.k, self.v)]
        for x, pool in zip((self.k, self.v), pools, strict=True):
            page = 0
            for rows, n in zip(x.float().cpu().split(list(self.k_lens)), self.k_lens, strict=True):
                for start in range(0, n, page_size):
                    piece = rows[start : start + page_size]
                    pool[table[page], :, : len(piece)] = piece.transpose(0, 1)
                    page += 1
        k, v = (pool.to(self.k.device).to(self.k.dtype) for pool in pools)
        return k, v, table.to(self.k.device)


def random_batch(q_lens, k_lens, heads, *, dim=128, dtype=torch.bfloat16, device="cpu", seed=0, **more):
    """Draws normal values, which are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(q_lens), heads[0], dim), *((sum(k_lens), heads[1], dim),) * 2
    q, k, v = (torch.randn(shape, generator=generator).to(device).to(dtype) for shape in shapes)
    return Batch(q, k, v, tuple(q_lens), tuple(k_lens), **more)


def visible(batch, b, blocks=None, block_size=128):
    """Returns bool [Hkv or 1, q_len, k_len]."""
    n, device = batch.k_lens[b], batch.q.device
    rows = slice(sum(batch.q_lens[:b]), sum(batch.q_lens[: b + 1]))
    key = torch.arange(n, device=device)
    seen = torch.ones(1, batch.q_lens[b], n, dtype=torch.bool, device=device)
    if batch.causal:
        seen &= key <= torch.arange(batch.q_lens[b], device=device)[:, None] + batch.offset(b)
    if blocks is None:
        return seen
    ids = blocks[rows].transpose(0, 1).long()  # [heads, q_len, topk]
    count = -(-n // block_size)
    ids = ids.masked_fill((ids < 0) | (ids >= count), count)
    chosen = torch.zeros(*ids.shape[:2], count + 1, dtype=torch.bool, device=device).scatter_(2, ids, True)
    return seen & chosen[..., :count].repeat_interleave(block_size, 2)[..., :n]


def attention(batch, blocks=None, dtype=torch.float64, scale=None, block_size=128, quantized=False):
    """Returns (out [total_q, Hq, D], lse [total_q, Hq]); quantized: weights rounded to float8, as kernels for float8 do, and
    products of float8 operands where the device multiplies them."""
    wide = torch.promote_types(dtype, torch.float32)
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    outs, lses = [], []
    group = batch.q.shape[1] // batch.k.shape[1]
    for b, (q, k, v) in enumerate(
        zip(batch.q.split(list(batch.q_lens)), *(x.split(list(batch.k_lens)) for x in (batch.k, batch.v)), strict=True)
    ):
        codes = [x.transpose(0, 1) for x in (q, k)]
        q, k, v = (x.to(dtype).transpose(0, 1) for x in (q, k, v))  # [heads, length, D]
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        seen = visible(batch, b, blocks, block_size)
        seen = seen.repeat_interleave(q.shape[0] // seen.shape[0], 0)
        raw = e4m3_products(*codes) if quantized and multiplies_e4m3(q.device) else q @ k.mT
        logits = (raw.to(wide) * scale).masked_fill(~seen, -torch.inf)
        lse = logits.logsumexp(-1)
        weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
        if quantized:
            weights = (weights * 448).to(FP8).to(wide) / 448
        outs.append((weights.to(dtype) @ v).transpose(0, 1))
        lses.append(lse.mT)
    return torch.cat(outs), torch.cat(lses)


def scores(batch, dtype=torch.float64, tile=128):
    """Returns the maximum raw dot products [Hq, tiles, total_q], -inf where a tile holds no visible key; in float32 as honest
    PyTorch computes them."""
    wide = torch.promote_types(dtype, torch.float32)
    tiles, group, found = -(-max(batch.k_lens) // tile), batch.q.shape[1] // batch.k.shape[1], []
    for b, (q, k) in enumerate(zip(batch.q.split(list(batch.q_lens)), batch.k.split(list(batch.k_lens)), strict=True)):
        q, k = q.transpose(0, 1), k.transpose(0, 1)
        if q.dtype == k.dtype == FP8 and wide == torch.float32:
            raw = e4m3_products(q, k)
        else:
            raw = q.to(wide) @ k.to(wide).repeat_interleave(group, 0).mT
        raw = raw.masked_fill(~visible(batch, b), -torch.inf)
        raw = torch.nn.functional.pad(raw, (0, tiles * tile - raw.shape[2]), value=-torch.inf)
        found.append(raw.unflatten(2, (tiles, tile)).amax(3))
    return torch.cat(found, 1).transpose(1, 2)


def assert_attention(name, out, batch, blocks=None, scale=None, lse=None, block_size=128):
    """Checks the tolerance rule: the error is at most twice that of honest PyTorch in the precision of the inputs."""
    options = {"blocks": blocks, "scale": scale, "block_size": block_size}
    quantized = batch.q.dtype == FP8 and batch.q.is_cuda
    dtype = torch.bfloat16 if batch.q.dtype == FP8 else batch.q.dtype
    exact, honest = attention(batch, **options), attention(batch, dtype=dtype, quantized=quantized, **options)
    assert_close(name, out, honest[0].to(dtype), exact[0])
    if lse is not None:
        assert_close(f"lse of {name}", lse, honest[1].to(lse.dtype), exact[1])


def assert_scores(name, found, batch):
    """Checks the scores `found`, [Hq, tiles or more, total_q], by the tolerance rule."""
    exact, honest = scores(batch), scores(batch, dtype=torch.float32)
    tiles = exact.shape[1]
    assert bool((found[:, tiles:] == -torch.inf).all()), f"{name}: tiles past the longest request"
    assert_close(name, found[:, :tiles], honest.float(), exact)


def best_blocks(raw, visible_blocks, topk):
    """Returns int32 [total_q, heads, topk] from [heads, tiles, total_q]: ties to the lower number, ascending, -1 tail;
    vectorised."""
    raw = raw.permute(2, 0, 1).double()  # [total_q, heads, tiles]
    tile = torch.arange(raw.shape[2], device=raw.device)
    raw = raw.masked_fill(tile >= visible_blocks.to(raw.device)[:, None, None], -torch.inf)
    order = raw.sort(dim=-1, descending=True, stable=True)
    ids = order.indices.masked_fill(order.values == -torch.inf, raw.shape[2])[..., :topk].sort(-1).values
    ids = torch.nn.functional.pad(ids, (0, max(topk - ids.shape[2], 0)), value=raw.shape[2])
    return ids.masked_fill(ids == raw.shape[2], -1).int()
