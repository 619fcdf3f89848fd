# SPDX-License-Identifier: MIT
"""The dense peer is `torch.nn.functional.scaled_dot_product_attention` in the best form for the shape.

Which form is the fastest depends on the machine, so the forms are timed on a slice of the inputs and the winner runs:
packed (decode: the query heads of a group as rows of one product), gqa (PyTorch shares the KV heads), expanded (a head of
keys for every query head, without copying), each on keys as they lie or copied head by head; on a GPU through cuDNN and through
FlashAttention. A chunk of queries behind a prefix has no form in cuDNN's PyTorch interface: it runs as attention to the
prefix without a mask and causal attention to itself, merged by their lse ("split").
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from openmsa.bench.inputs import Inputs
from openmsa.testing.timing import Clock, Run, sample

PROBE_KEYS = {"cpu": 1 << 12, "cuda": 1 << 15}
PROBE_DECODE_KEYS = {"cpu": 1 << 16, "cuda": 1 << 15}
LEAD = 1.03  # an earlier, simpler form stands unless a later one is faster by more than this

Form = Callable[[Tensor, Tensor, Tensor], Run]  # q [B, Hq, q_len, D], k, v [B, Hkv, context, D] -> a call; raises if it cannot


def dense_peer(x: Inputs, clock: Clock) -> Run:
    """Returns a call of the fastest form on all inputs; the name of the form stands in ``x.chosen_forms["sdpa"]``."""
    forms = _forms(x)
    if "sdpa" not in x.chosen_forms:
        x.chosen_forms["sdpa"] = _fastest(x, forms, clock)
    name = x.chosen_forms["sdpa"]
    return forms[name](*_heads_first(x))


def _heads_first(x: Inputs, q_len: int | None = None, context: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views ``[batch, heads, length, head_dim]`` of the last `q_len` queries and `context` keys (None: all)."""
    w = x.workload
    q_len, context = q_len or w.q_len, context or w.context
    q = x.q.unflatten(0, (w.batch, w.q_len)).transpose(1, 2)[:, :, w.q_len - q_len :]
    k, v = (t.unflatten(0, (w.batch, w.context)).transpose(1, 2)[:, :, w.context - context :] for t in (x.k, x.v))
    return q, k, v


def _fastest(x: Inputs, forms: dict[str, Form], clock: Clock) -> str:
    w = x.workload
    limits = PROBE_DECODE_KEYS if w.kind == "decode" else PROBE_KEYS
    context = min(w.context, limits[x.device.type])
    q_len = context if w.kind == "prefill" else min(w.q_len, max(1, context // 2))
    found = {name: _probe(form, _heads_first(x, q_len, context), clock) for name, form in forms.items()}
    seconds = {name: value for name, value in found.items() if isinstance(value, float)}
    if not seconds:
        raise RuntimeError(f"no form of dense attention runs here: {found}")
    least = min(seconds.values())
    return next(name for name, value in seconds.items() if value <= LEAD * least)


def _probe(form: Form, tensors: tuple[Tensor, Tensor, Tensor], clock: Clock) -> float | str:
    """Returns the least of a few measurements, or why the form cannot run."""
    try:
        run = form(*tensors)
        clock(run)
        return min(sample(run, clock, 5, 1.0))
    except RuntimeError as error:  # the backend lacks this form
        return str(error).strip().partition("\n")[0]


def _forms(x: Inputs) -> dict[str, Form]:
    """Returns every form that computes the workload's dense attention, by name."""
    kind = x.workload.kind
    if kind == "decode":
        base: dict[str, Callable[..., Run]] = {"packed": _packed, "gqa": _gqa}
    elif kind == "prefill":
        base = {"gqa": partial(_gqa, causal=True), "expanded": partial(_expanded, causal=True)}
    else:
        base = {"lower-right": _lower_right, "split gqa": _split, "split expanded": partial(_split, expand=True)}
    forms: dict[str, Form] = {}
    for name, form in base.items():
        for backend, label in _backends(x.device):
            if name.startswith("split") and label == "flash":
                continue  # _split calls cuDNN's operator itself
            if name == "lower-right" and label == "cudnn":
                continue  # CausalBias runs FlashAttention alone
            title = f"{name}, {label}" if label else name
            forms[title] = partial(_within, backend, form)
            forms[f"{title}, copied"] = partial(_copied, forms[title])
    return forms


def _backends(device: torch.device) -> tuple[tuple[SDPBackend | None, str], ...]:
    if device.type == "cuda":
        return (SDPBackend.CUDNN_ATTENTION, "cudnn"), (SDPBackend.FLASH_ATTENTION, "flash")
    return ((None, ""),)


def _within(backend: SDPBackend | None, form: Callable[..., Run], q: Tensor, k: Tensor, v: Tensor) -> Run:
    run = form(q, k, v)
    if backend is None:
        return run

    def with_backend() -> Any:
        with sdpa_kernel([backend]):
            return run()

    return with_backend


def _copied(form: Form, q: Tensor, k: Tensor, v: Tensor) -> Run:
    return form(q, k.contiguous(), v.contiguous())


def _packed(q: Tensor, k: Tensor, v: Tensor) -> Run:
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, Hkv, group, D]: one query a head
    return partial(scaled_dot_product_attention, rows, k, v)


def _gqa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Run:
    return partial(scaled_dot_product_attention, q, k, v, is_causal=causal, enable_gqa=True)


def _expand(q: Tensor, k: Tensor) -> Tensor:
    """Expands [B, Hkv, S, D] to [B, Hq, S, D], without a copy where there is one KV head."""
    group = q.shape[1] // k.shape[1]
    return k[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def _expanded(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Run:
    return partial(scaled_dot_product_attention, q, _expand(q, k), _expand(q, v), is_causal=causal)


def _lower_right(q: Tensor, k: Tensor, v: Tensor) -> Run:
    bias = causal_lower_right(q.shape[2], k.shape[2])
    return partial(scaled_dot_product_attention, q, k, v, attn_mask=bias, enable_gqa=True)


def _split(q: Tensor, k: Tensor, v: Tensor, expand: bool = False) -> Run:
    if expand:
        k, v = _expand(q, k), _expand(q, v)
    prefix = k.shape[2] - q.shape[2]
    before, own = (k[:, :, :prefix], v[:, :, :prefix]), (k[:, :, prefix:], v[:, :, prefix:])

    def run() -> Tensor:
        out_before, lse_before = _with_lse(q, *before, causal=False)
        out_own, lse_own = _with_lse(q, *own, causal=True)
        share = torch.sigmoid(lse_before - lse_own).to(out_own.dtype)  # [B, Hq, q_len, 1]: weight of the prefix
        return torch.lerp(out_own, out_before, share)

    return run


def _with_lse(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns out [B, Hq, q_len, D] and lse float32 [B, Hq, q_len, 1]."""
    if q.device.type == "cuda":
        out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)[:2]
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse.reshape(*q.shape[:3], 1)
