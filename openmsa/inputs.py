# SPDX-License-Identifier: MIT
"""The checks that sparse and dense attention share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.stored import KEY_FORMATS, QUERY_FORMATS, check_alike, check_rows, check_values, kind_of
from openmsa.runtime import checks
from openmsa.types import Layout, Sequences, layout


class Inputs(NamedTuple):
    """What every attention reads, checked: v is None where k is a `PagedKV`."""

    q: Tensor | Stored
    k: Tensor | Stored | PagedKV
    v: Tensor | Stored | None
    seqs: Layout
    softmax_scale: float


def check_qkv(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Sequences | None,
    softmax_scale: float | None,
    check: bool,
    known: Layout | None = None,
) -> Inputs:
    """Checks shapes, head counts, dtypes, formats, devices and lengths, and the values when `check`.

    known: what `seqs` was found to mean for as many queries and keys on the device of q; None where that is still to be found.
    """
    checks.flag("check", check)
    check_rows("q", q, "[total_q, num_q_heads, head_dim]", QUERY_FORMATS)
    head_dim = q.shape[2]
    checks.head_dim("head_dim", head_dim)
    if isinstance(k, PagedKV):
        if v is not None and v is not k:
            raise ValueError(f"v must be None when k is a PagedKV (it holds both), got {type(v).__name__}")
        v, num_kv_heads = None, k.num_heads
        check_alike("k.k", k.k, "q", q)
        checks.size("k.k", k.k, 3, head_dim, "head_dim of q")
        packed = known or k.layout(seqs, q.shape[0], q.device, check)
        values: dict[str, Any] = dict(zip(("k.k", "k.v"), k.gather(packed.k_lens()), strict=False)) if check else {}
    else:
        _check_packed(q, k, v)
        packed, num_kv_heads = known or layout(seqs, q.shape[0], k.shape[0], q.device, check=check), k.shape[1]
        values = {"k": k, "v": v}
    checks.divides("num_kv_heads", num_kv_heads, "num_q_heads", q.shape[1])
    if check:
        for name, value in ({"q": q} | values).items():
            check_values(name, value)
    scale = head_dim**-0.5 if softmax_scale is None else checks.scale("softmax_scale", softmax_scale)
    return Inputs(q, k, v, packed, scale)


def _check_packed(q: Tensor | Stored, k: Tensor | Stored, v: Tensor | Stored | None) -> None:
    for name, value in (("k", k), ("v", v)):
        check_rows(name, value, "[total_k, num_kv_heads, head_dim]", KEY_FORMATS)
    assert v is not None
    if kind_of(v) != kind_of(k):
        raise TypeError(f"v must be stored as k ({kind_of(k)}), got {kind_of(v)}")
    for name, value in (("k", k), ("v", v)):
        check_alike(name, value, "q", q)
        checks.size(name, value, 2, q.shape[2], "head_dim of q")
    check_alike("v", v, "k", k)
    checks.size("v", v, 0, k.shape[0], "total_k of k")
    checks.size("v", v, 1, k.shape[1], "num_kv_heads of k")
