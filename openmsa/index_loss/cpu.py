# SPDX-License-Identifier: MIT
"""`index_loss` on a CPU walks the key blocks twice, with the queries that read them: first for the sums of exponentials, then
for the loss and its gradients. A block's share of them is held at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmsa.index_loss import share
from openmsa.runtime.matmul import matmul_nt
from openmsa.types import Layout, wide_dtype

TILE_ROWS = 2048  # (query, head) rows of a tile
TILE_KEYS = 256  # keys of a tile where all are read


def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    index_scale: float,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
) -> Tensor:
    """See `openmsa.index_loss.index_loss`."""
    if not return_loss:
        return index_q.new_zeros((), dtype=_dtype(q, index_q))
    return loss_and_gradients(
        q, k, index_q, index_k, blocks, seqs, block_size, softmax_scale, index_scale, coefficient, lse,
        return_loss=True, gradients=False,
    )[0]  # fmt: skip


def loss_and_gradients(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    blocks: Tensor | None,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    index_scale: float,
    coefficient: float,
    lse: Tensor | None,
    return_loss: bool,
    *,
    gradients: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss, and the gradients of the sum of all divergences by index_q and index_k in float32 (float64 where an
    input is); zeros where `gradients` is False."""
    dtype, heads = _dtype(q, index_q), index_q.shape[1]
    dq, dk = (torch.zeros(x.shape, dtype=dtype, device="cpu") for x in (index_q, index_k))
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    group, kv_each, shared = q.shape[1] // heads, k.shape[1] // heads, heads // index_k.shape[1]
    for q0, q1, k0, k_len, offset in seqs.on_host():
        last_key = (torch.arange(q1 - q0, device="cpu") + offset).clamp_(max=k_len - 1)
        for head in range(heads):
            ids = None if blocks is None else blocks[q0:q1, head if blocks.shape[1] > 1 else 0]
            of_group, of_keys = slice(head * group, (head + 1) * group), slice(head * kv_each, (head + 1) * kv_each)
            at_q, at_k = (slice(q0, q1), head), (slice(k0, k0 + k_len), head // shared)
            teacher = _Teacher(
                q[q0:q1, of_group].to(dtype).mul(softmax_scale).unflatten(1, (kv_each, -1)),
                k[k0 : k0 + k_len, of_keys],
                torch.full((q1 - q0, group), -torch.inf, dtype=dtype, device="cpu")
                if lse is None
                else lse[q0:q1, of_group].to(dtype),
            )
            tiles = _tiles(ids, last_key, k_len, block_size, max(1, TILE_ROWS // group))
            student = (index_q[at_q].to(dtype) * index_scale, index_k[at_k].to(dtype))
            sums = _sums(tiles, last_key, teacher, student, lse is None)
            for first, stop, chosen in tiles:
                weights = teacher.logits(chosen, first, stop).sub_(teacher.lse[chosen][..., None]).exp_().mean(1)
                logs = matmul_nt(student[0][chosen], student[1][first:stop]).sub_(sums[chosen][:, None])
                hidden = torch.arange(first, stop, device="cpu") > last_key[chosen][:, None]
                weights.masked_fill_(hidden, 0)
                if return_loss:
                    divergence = torch.xlogy(weights, weights) - weights * logs
                    total += divergence.masked_fill_(hidden, 0).sum(dtype=torch.float64)
                if gradients:
                    slopes = logs.exp_().masked_fill_(hidden, 0).sub_(weights)
                    dq[at_q].index_add_(0, chosen, torch.mm(slopes, student[1][first:stop]).mul_(index_scale))
                    dk[at_k][first:stop] += torch.mm(slopes.t(), student[0][chosen])
    return (total * share(index_q, coefficient)).to(dtype), dq, dk


def _dtype(q: Tensor, index_q: Tensor) -> torch.dtype:
    return torch.promote_types(wide_dtype(q), wide_dtype(index_q))


class _Teacher(NamedTuple):
    """Holds the main branch's part of one sequence and index head: queries ``[q_len, kv heads, heads of each, dim]``, scaled,
    keys ``[k_len, kv heads, dim]``, and lse ``[q_len, heads]``."""

    q: Tensor
    k: Tensor
    lse: Tensor

    def logits(self, chosen: Tensor, first: int, stop: int) -> Tensor:
        """Returns the logits of some queries on some keys, ``[queries, heads, keys]``."""
        parts = []
        for head in range(self.k.shape[1]):
            rows, keys = self.q[chosen, head], self.k[first:stop, head].to(self.q.dtype)
            parts.append(matmul_nt(rows.flatten(0, 1), keys).view(*rows.shape[:2], -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _tiles(ids: Tensor | None, last_key: Tensor, k_len: int, block_size: int, tokens: int) -> list[tuple[int, int, Tensor]]:
    """Returns ranges of keys with queries that read them, ascending in both, at most so many tokens at a time. ids: the
    selection of one sequence and head ``[q_len, topk]``, or None."""
    found, start = [], 0
    if ids is None:
        for first in range(0, k_len, TILE_KEYS):
            seeing = torch.arange(int(torch.searchsorted(last_key, first)), len(last_key), device="cpu")
            found += [(first, min(first + TILE_KEYS, k_len), x) for x in seeing.split(tokens) if len(x)]
        return found
    num_blocks = -(-k_len // block_size)
    ids = ids.long()
    ids = ids.masked_fill((ids < 0) | (ids > last_key[:, None].div(block_size, rounding_mode="floor")), num_blocks)
    order = ids.flatten().argsort(stable=True)
    for block, count in enumerate(torch.bincount(ids.flatten(), minlength=num_blocks + 1)[:num_blocks].tolist()):
        readers = order[start : start + count] // ids.shape[1]
        stop = min((block + 1) * block_size, k_len)
        found += [(block * block_size, stop, x) for x in readers.split(tokens) if len(x)]
        start += count
    return found


def _sums(
    tiles: list[tuple[int, int, Tensor]], last_key: Tensor, teacher: _Teacher, student: tuple[Tensor, Tensor], main: bool
) -> Tensor:
    """Returns the logarithm of the sum of exponentials of each index query ``[q_len]``. main: whether to write those of the
    teacher too, which are -inf."""
    sums = torch.full((len(last_key),), -torch.inf, dtype=student[0].dtype, device="cpu")
    for first, stop, chosen in tiles:
        hidden = torch.arange(first, stop, device="cpu") > last_key[chosen][:, None]
        logits = matmul_nt(student[0][chosen], student[1][first:stop]).masked_fill_(hidden, -torch.inf)
        sums[chosen] = torch.logaddexp(sums[chosen], logits.logsumexp(1))
        if main:
            logits = teacher.logits(chosen, first, stop).masked_fill_(hidden[:, None], -torch.inf)
            teacher.lse[chosen] = torch.logaddexp(teacher.lse[chosen], logits.logsumexp(2))
    return sums
