# SPDX-License-Identifier: MIT
"""This module says what is right, in float64, and what honest low-precision PyTorch gives, by masked matrices of sequences."""

from __future__ import annotations

import torch

from openmsa.kv_cache.e4m3 import encode
from tests import oracle
from tests.products import products


def last_keys(p):
    """Returns int64 [total_q], the last key that each query sees, below 0 where it sees none."""
    pieces = [
        (torch.arange(q_len) + offset).clamp(max=k_len - 1)
        for q_len, k_len, offset in zip(p.q_lens, p.k_lens, p.offsets, strict=True)
    ]
    return torch.cat([torch.arange(0), *pieces])


def sees(p, b, blocks, block_size, causal):
    """Returns which queries of sequence b see which keys, bool [KV heads or 1, q_len, k_len]. blocks: int32 [total_q, heads,
    topk], or None for all."""
    own = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1]))
    keys = torch.arange(p.k_lens[b])
    last = last_keys(p)[own] if causal else torch.full((p.q_lens[b],), p.k_lens[b] - 1)
    seen = (keys <= last[:, None])[None]
    if blocks is None:
        return seen
    ids, count = blocks[own].transpose(0, 1).long(), -(-p.k_lens[b] // block_size)
    ids = ids.masked_fill((ids < 0) | (ids >= count), count)
    chosen = torch.zeros(*ids.shape[:2], count + 1, dtype=torch.bool).scatter_(2, ids, True)
    return seen & chosen[..., :count].repeat_interleave(block_size, 2)[..., : p.k_lens[b]]


def attention(p, dtype, blocks=None, block_size=128, scale=None, causal=True, factors=None, form="normalised"):
    """Returns out [total_q, query heads, dim] and lse of a problem's numbers rounded to `dtype`; float64 makes them the truth.

    factors:  `Codes` "q" and "k" where both are E4M3 and multiplied as they are.
    form:     how weights are rounded: "normalised", as ``softmax`` gives them; "raw", before they are divided by their sum, as
              kernels that walk the keys have them, and with the heads of a group as rows of one product, as these have, too:
              libraries add up products of few rows in another order than those of many; "e4m3", raw ones to E4M3.
    """
    wide, scale = torch.promote_types(dtype, torch.float32), p.q.shape[2] ** -0.5 if scale is None else scale
    group = p.q.shape[1] // p.k.shape[1]
    outs, lses = [torch.zeros(0, *p.q.shape[1:], dtype=dtype)], [torch.zeros(0, p.q.shape[1], dtype=wide)]
    for b, q in enumerate(p.q.to(dtype).split(list(p.q_lens))):
        k, v = (oracle.keys_of(x, p, b).to(dtype).transpose(0, 1).repeat_interleave(group, 0) for x in (p.k, p.v))
        seen = sees(p, b, blocks, block_size, causal)
        seen = seen.repeat_interleave(p.q.shape[1] // seen.shape[0], 0)
        if factors is None:
            raw = _product(q.transpose(0, 1).to(wide), k.to(wide).mT, group if form == "raw" else 1)
        else:
            own, keys = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1])), oracle.keys_of(factors["k"], p, b)
            raw = [products(factors["q"][own, h], keys[:, h // group]) for h in range(p.q.shape[1])]
            raw = torch.stack(raw).to(wide)
        logits = (raw * scale).masked_fill(~seen, -torch.inf)
        peak = logits.amax(-1, keepdim=True).clamp(min=-1e30) if p.k_lens[b] else logits.new_zeros(*logits.shape[:2], 1)
        weights = (logits - peak).exp()
        total = weights.to(dtype).to(wide).sum(-1, keepdim=True)
        lses.append((peak + total.log())[..., 0].mT)
        if form == "normalised":
            out = (weights / total).nan_to_num(0).to(dtype) @ v
        elif form == "raw":
            out = (_product(weights.to(dtype).to(wide), v.to(wide), group) / total).nan_to_num(0)
        else:
            total = weights.sum(-1, keepdim=True)
            out = ((encode(weights * 448).to(wide) / 448 @ v.to(wide)) / total).nan_to_num(0)
        outs.append(out.to(dtype).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def _product(rows, others, group):
    """Multiplies matrices of heads; those of so many neighbouring heads, whose second factors are equal, at once."""
    heads, count, size = rows.shape
    together = rows.reshape(heads // group, group * count, size) @ others[::group]
    return together.reshape(heads, count, others.shape[2])


def worse(results, truth):
    """Returns, element by element, the one of several honest results that is farthest from the truth."""
    first, *others = results
    for other in others:
        first = torch.where((other.double() - truth).abs() > (first.double() - truth).abs(), other, first)
    return first


def scores(q, k, p, block_size, causal=True):
    """Returns float64 [heads, total_q, blocks], the largest product with a visible key of each block, or -inf without one."""
    blocks, group = -(-max(p.k_lens, default=0) // block_size), q.shape[1] // k.shape[1]
    found = [torch.zeros(q.shape[1], 0, blocks, dtype=torch.float64)]
    for b, own in enumerate(q.double().split(list(p.q_lens))):
        raw = own.transpose(0, 1) @ oracle.keys_of(k, p, b).double().transpose(0, 1).repeat_interleave(group, 0).mT
        raw = raw.masked_fill(~sees(p, b, None, block_size, causal), -torch.inf)
        raw = torch.nn.functional.pad(raw, (0, blocks * block_size - raw.shape[2]), value=-torch.inf)
        found.append(raw.view(*raw.shape[:2], blocks, block_size).amax(3))
    return torch.cat(found, 1)


def magnitudes(q, k, p, block_size, causal=True):
    """Returns the same of the sums of the magnitudes of what these products add up."""
    return scores(q.abs(), k.abs(), p, block_size, causal)


def selection(scores, visible, topk, init_blocks, local_blocks):
    """Selects the forced blocks and the best visible others, ties to the lower id: int32 [total_q, heads, topk], ascending,
    then -1."""
    count = scores.shape[2]
    block, seen = torch.arange(count), visible.clamp(0, count)[:, None]
    forced = ((block < init_blocks) | (block >= seen - local_blocks)) & (block < seen)
    ranked = scores.double().masked_fill(block >= seen, -torch.inf).masked_fill(forced, torch.inf)
    order = ranked.sort(dim=-1, descending=True, stable=True)
    ids = order.indices.masked_fill(order.values == -torch.inf, count)[..., :topk]
    ids = torch.nn.functional.pad(ids, (0, topk - ids.shape[2]), value=count).sort(-1).values
    return ids.masked_fill(ids == count, -1).int().transpose(0, 1)


def assert_selected(name, blocks, scores, visible, slack, topk, init_blocks, local_blocks):
    """Checks that ids ascend, as many as there can be and then -1, the forced ones among them, and that no block left out
    scores above one that was chosen freely by more than `slack`."""
    count = scores.shape[2]
    if not scores.numel():
        assert bool((blocks == -1).all()), f"{name}: blocks of sequences without keys"
        return
    ids, seen = blocks.cpu().transpose(0, 1).long(), visible.clamp(0, count)[:, None]
    held = torch.arange(topk) < seen.clamp(max=topk)
    assert bool(((ids >= 0) == held).all()), f"{name}: not as many blocks as visible ones, or -1 among them"
    assert bool((ids[..., 1:] > ids[..., :-1])[:, held[:, 1:]].all()), f"{name}: ids do not ascend"
    assert bool((ids < seen).all()), f"{name}: a block that is not visible"
    chosen = torch.zeros(*ids.shape[:2], count + 1, dtype=torch.bool).scatter_(2, ids.masked_fill(ids < 0, count), True)[
        ..., :count
    ]
    block = torch.arange(count)
    forced = ((block < init_blocks) | (block >= seen - local_blocks)) & (block < seen)
    assert bool(chosen[:, forced].all()), f"{name}: a forced block is missing"
    least = scores.masked_fill(~chosen | forced, torch.inf).amin(-1)
    most = scores.masked_fill(chosen | (block >= seen), -torch.inf).amax(-1)
    gap = most - least
    assert bool((gap <= slack).all()), f"{name}: a block left out scores {gap.max():.3g} higher, {slack:.3g} is allowed"
