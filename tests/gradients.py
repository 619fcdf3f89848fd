# SPDX-License-Identifier: MIT
"""This module computes gradients of attention by PyTorch's autograd, apart from the package: in float64 the truth, in the dtype
of the inputs what honest PyTorch gives."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from openmsa.testing.compare import assert_close
from tests import oracle


def inputs_and_gradients(p, seed=1):
    """Returns random gradients of out (rounded to the inputs' dtype) and of lse."""
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(p.q.shape, generator=generator, dtype=torch.float64).to(p.q.dtype)
    wide = torch.promote_types(p.q.dtype, torch.float32)
    return grad_out, torch.randn(p.q.shape[:2], generator=generator, dtype=torch.float64).to(wide)


@oracle.on_one_thread
def autograd(p, reads, scale, grad_out, grad_lse, dtype=torch.float64):
    """Returns dq, dk and dv of masked attention in PyTorch, computed in `dtype`. reads: as in `tests.oracle`. grad_lse may be
    None: then float32 takes PyTorch's fused attention, whose exponentials and saved lse cost it some bits."""
    fused = dtype == torch.float32 and grad_lse is None
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (p.q, p.k, p.v))
    group, wide = q.shape[1] // k.shape[1], torch.promote_types(dtype, torch.float32)
    total = (q * 0).sum() + (k * 0).sum() + (v * 0).sum()
    tokens = list(oracle.rows(p))
    for b, q_len in enumerate(p.q_lens):
        own = slice(sum(p.q_lens[:b]), sum(p.q_lens[: b + 1]))
        keys, values = oracle.keys_of(k, p, b), oracle.keys_of(v, p, b)
        for kv in range(k.shape[1]) if len(keys) and q_len else ():
            seen = torch.zeros(q_len, len(keys), dtype=torch.bool)
            for row, _, last in tokens[own]:
                seen[row - own.start, reads(row, kv, b, last)] = True
            for head in range(kv * group, (kv + 1) * group):
                some = seen.any(1)
                if fused:
                    heads = (q[own, head][some], keys[:, kv], values[:, kv])
                    heads = (x[None, None] for x in heads)
                    out = scaled_dot_product_attention(*heads, attn_mask=seen[some], scale=scale)[0, 0]
                else:
                    logits = ((q[own, head] @ keys[:, kv].T) * scale)[some].masked_fill(~seen[some], -torch.inf)
                    out = logits.softmax(-1) @ values[:, kv]
                total = total + (out * grad_out[own, head][some].to(dtype)).sum()
                if grad_lse is not None:
                    total = total + (logits.to(wide).logsumexp(-1) * grad_lse[own, head][some].to(wide)).sum()
    return torch.autograd.grad(total, (q, k, v))


def check(result, p, reads, scale, grad_out, grad_lse):
    """Holds dq, dk and dv against the truth: with twice the error of honest PyTorch, in float64 to 11 digits."""
    truth = autograd(p, reads, scale, grad_out, grad_lse)
    if p.q.dtype == torch.float64:
        torch.testing.assert_close(tuple(result), truth, rtol=1e-11, atol=1e-11)
        return
    honest = autograd(p, reads, scale, grad_out, grad_lse, p.q.dtype)
    for name, x, near, exact in zip(("dq", "dk", "dv"), result, honest, truth, strict=True):
        assert_close(name, x.cpu(), near, exact)
