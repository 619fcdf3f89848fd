# SPDX-License-Identifier: MIT
"""A caller inside the library may say where results of a stage are written. This module checks such places: wrong ones raise
ValueError or TypeError before anything is launched or changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache.rows import QUERY_FORMATS
from openmsa.kv_cache.stored import Stored
from openmsa.runtime import checks, overlap
from openmsa.runtime.kinds import tensors_in
from openmsa.types import out_dtype, wide_dtype


def made_out(q: Tensor | Stored) -> Tensor:
    """Makes memory for what attention of the queries q returns."""
    if not isinstance(q, (Tensor, Stored)):
        checks.rows("q", q, "[total_q, num_q_heads, head_dim]", QUERY_FORMATS)
    return torch.empty(q.shape, dtype=out_dtype(q), device=q.device)


def made_results(q: Tensor | Stored, with_lse: bool) -> dict[str, Tensor]:
    """Makes memory for out and, with `with_lse`, lse of the queries q."""
    made = {"out": made_out(q)}
    return made | {"lse": torch.empty(q.shape[:2], dtype=wide_dtype(q), device=q.device)} if with_lse else made


def made_blocks(index_q: Tensor | Stored, topk: int) -> dict[str, Tensor]:
    """Makes memory for `topk` blocks of each of the queries index_q and each of their heads."""
    return {"blocks": torch.empty((*index_q.shape[:2], topk), dtype=torch.int32, device=index_q.device)}


def check_place(
    name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, read: list[Tensor], in_place: Any = None
) -> None:
    """Results are written to `value`, a dense tensor of this shape and dtype that shares no memory with the tensors `read`, on
    whose device it lies. in_place: as in `check_apart`."""
    dimensions = ", ".join(map(str, shape))
    checks.tensor(name, value, f"[{dimensions}]", (dtype,))
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    checks.alike(name, value, "the inputs", read[0], dtype=False)
    check_apart(name, value, read, in_place)


def check_apart(name: str, value: Tensor, read: list[Tensor], in_place: Any = None) -> None:
    """Each element of `value` has a place of its own, which is none of the tensors `read`. in_place: what `value` may be, and
    else must not overlap."""
    overlap.check_written(name, value)
    if not isinstance(in_place, Tensor) or (value.data_ptr(), value.stride()) != (in_place.data_ptr(), in_place.stride()):
        read = [*read, *tensors_in(in_place)]
    if not apart(value, read):
        raise ValueError(
            f"{name} must share no memory with the inputs, got one that overlaps an input at {value.data_ptr():#x}"
        )


def apart(value: Tensor, others: list[Tensor]) -> bool:
    """Says whether the addresses that `value` spans lie outside those that each of the others spans."""
    first, stop = overlap.span(value)
    return first == stop or all(stop <= start or end <= first or start == end for start, end in map(overlap.span, others))


def check_places(q: Any, read: list[Tensor], out: Tensor | None, lse: Tensor | None, in_place: Any = None) -> None:
    """Checks where attention writes its results for the queries `q`: contiguous tensors of the results' shapes and dtypes,
    apart from those `read` and from each other. in_place: as in `check_apart`."""
    for name, place, shape, dtype in (("out", out, q.shape, out_dtype(q)), ("lse", lse, q.shape[:2], wide_dtype(q))):
        if place is None:
            continue
        check_place(name, place, tuple(shape), dtype, read, in_place)
        if not place.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {place.stride()}")
        read = [*read, place]


def check_scores_place(name: str, place: Tensor, q: Any, num_blocks: int, read: list[Tensor]) -> None:
    """Checks where scores of the queries `q` are written: float32 ``[heads, total_q, blocks]``, any strides, blocks at most
    `num_blocks`. Scores of blocks behind these are dropped; those of blocks that a query does not see become -inf or stay what
    they were."""
    blocks = min(place.shape[-1], num_blocks) if isinstance(place, Tensor) and place.dim() else num_blocks
    check_place(name, place, (q.shape[1], q.shape[0], blocks), torch.float32, read)


def delivered(result: Tensor, place: Tensor | None) -> Tensor:
    """Returns a result, in its place where there is one."""
    return result if place is None else place.copy_(result)
