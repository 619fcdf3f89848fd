# SPDX-License-Identifier: MIT
"""This module computes the index loss by PyTorch's autograd, apart from the package: in float64 the truth, in the dtype of the
inputs what honest PyTorch gives."""

from typing import NamedTuple

import torch

from openmsa.testing.compare import assert_close
from tests import oracle


class Result(NamedTuple):
    loss: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor


@oracle.on_one_thread
def autograd(p, reads, scale, index_scale, coefficient=1.0, dtype=torch.float64):
    """Returns the loss and the gradients of index_q and index_k, computed in `dtype`. reads: as in `tests.oracle`."""
    q, k = p.q.to(dtype), p.k.to(dtype)
    index_q, index_k = (x.detach().to(dtype).requires_grad_() for x in (p.index_q, p.index_k))
    heads, group = index_q.shape[1], q.shape[1] // index_q.shape[1]
    total = ((index_q * 0).sum() + (index_k * 0).sum()).to(torch.promote_types(dtype, torch.float32))
    tokens = list(oracle.rows(p))
    for b, q_len in enumerate(p.q_lens):
        own = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1]))
        keys, index_keys = oracle.keys_of(k, p, b), oracle.keys_of(index_k, p, b)
        for head in range(heads) if len(keys) and q_len else ():
            seen = torch.zeros(q_len, len(keys), dtype=torch.bool)
            for row, _, last in tokens[own]:
                seen[row - own.start, reads(row, head, b, last)] = True
            some = seen.any(1)
            hidden = ~seen[some]
            teacher = 0
            for main in range(head * group, (head + 1) * group):
                logits = (q[own, main] @ keys[:, main // (q.shape[1] // k.shape[1])].T)[some] * scale
                teacher = teacher + logits.masked_fill(hidden, -torch.inf).softmax(-1) / group
            logits = (index_q[own, head] @ index_keys[:, head // (heads // index_k.shape[1])].T)[some] * index_scale
            student = logits.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0)
            total = total + (torch.xlogy(teacher, teacher) - teacher * student).sum(dtype=total.dtype)
    loss = total * (coefficient / max(q.shape[0] * heads, 1))
    return Result(loss.detach(), *torch.autograd.grad(loss, (index_q, index_k)))


def check(result, p, reads, scale, index_scale, coefficient=1.0):
    """Holds a loss and its gradients against the truth: with twice the error of honest PyTorch, in float64 to 11 digits.

    Gradients are compared as those of the sum over queries and heads, because the tolerance has an absolute part.
    """
    pairs = max(p.index_q.shape[0] * p.index_q.shape[1], 1) / (coefficient or 1.0)
    truth = autograd(p, reads, scale, index_scale, coefficient)
    if p.index_q.dtype == torch.float64:
        torch.testing.assert_close(tuple(x.cpu() for x in result), tuple(truth), rtol=1e-10, atol=1e-11)
        return
    honest = autograd(p, reads, scale, index_scale, coefficient, p.index_q.dtype)
    assert_close("loss", result[0].cpu(), honest.loss, truth.loss)
    for name, x, near, exact in zip(("dq", "dk"), result[1:], honest[1:], truth[1:], strict=True):
        assert x.dtype == near.dtype
        assert_close(name, x.cpu().float() * pairs, near.float() * pairs, exact * pairs)


@oracle.on_one_thread
def main_lse(p, reads, scale):
    """Returns the lse of the main attention in float64, [total_q, num_q_heads]."""
    q, k, heads = p.q.double(), p.k.double(), p.index_q.shape[1]
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row, b, last in oracle.rows(p):
        keys = oracle.keys_of(k, p, b)
        for main in range(q.shape[1]):
            ids = reads(row, main * heads // q.shape[1], b, last)
            logits = keys[ids, main * k.shape[1] // q.shape[1]] @ q[row, main] * scale
            lse[row, main] = logits.logsumexp(0) if len(ids) else -torch.inf
    return lse
