# SPDX-License-Identifier: MIT
"""The checks that sparse and dense attention share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from openmsa.kv_cache import PagedKV
from openmsa.runtime import checks
from openmsa.types import Sequences, layout


def check_qkv(
    q: Tensor, k: Tensor | PagedKV, v: Tensor | None, seqs: Sequences | None, softmax_scale: float | None, check: bool
) -> dict[str, Any]:
    """Checked ``{q, k, v, seqs, softmax_scale}``: shapes, head counts, dtypes, devices and lengths; values when `check`."""
    checks.tensor("q", q, "[total_q, num_q_heads, head_dim]")
    head_dim = q.shape[2]
    checks.head_dim("head_dim", head_dim)
    if isinstance(k, PagedKV):
        if v is not None and v is not k:
            raise ValueError(f"v must be None when k is a PagedKV (it holds both), got {type(v).__name__}")
        v, num_kv_heads = None, k.num_heads
        checks.alike("k.k", k.k, "q", q)
        checks.size("k.k", k.k, 3, head_dim, "head_dim of q")
        packed = k.layout(seqs, q.shape[0], q.device, check)
        values = dict(zip(("k.k", "k.v"), k.gather(packed.k_lens()), strict=False)) if check else {}
    else:
        checks.tensor("k", k, "[total_k, num_kv_heads, head_dim]")
        checks.tensor("v", v, "[total_k, num_kv_heads, head_dim]")
        assert v is not None
        for name, value in (("k", k), ("v", v)):
            checks.alike(name, value, "q", q)
            checks.size(name, value, 2, head_dim, "head_dim of q")
        checks.size("v", v, 0, k.shape[0], "total_k of k")
        checks.size("v", v, 1, k.shape[1], "num_kv_heads of k")
        num_kv_heads = k.shape[1]
        packed = layout(seqs, q.shape[0], k.shape[0], q.device, check=check)
        values = {"k": k, "v": v}
    checks.divides("num_kv_heads", num_kv_heads, "num_q_heads", q.shape[1])
    if check:
        for name, value in ({"q": q} | values).items():
            checks.finite(name, value)
    scale = head_dim**-0.5 if softmax_scale is None else checks.scale("softmax_scale", softmax_scale)
    return {"q": q, "k": k, "v": v, "seqs": packed, "softmax_scale": scale}
