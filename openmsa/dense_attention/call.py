# SPDX-License-Identifier: MIT
"""This file holds the checked call of `dense_attention`, and its results."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from openmsa.inputs import check_qkv
from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.results import check_places, check_scores_place
from openmsa.runtime import checks
from openmsa.runtime.kinds import tensors_in
from openmsa.types import Layout, Sequences


class DenseCall(NamedTuple):
    """Holds the checked arguments of `dense_attention`. out, lse: contiguous tensors that the results are written to, and that
    the implementation returns; max_score: such a tensor too, but as `check_scores_place` says; None: new ones."""

    q: Tensor | Stored
    k: Tensor | Stored | PagedKV
    v: Tensor | Stored | None
    seqs: Layout
    causal: bool
    softmax_scale: float
    block_size: int
    return_out: bool
    return_lse: bool
    return_max_score: bool
    out: Tensor | None = None
    lse: Tensor | None = None
    max_score: Tensor | None = None

    def writing(self, out: Tensor | None, lse: Tensor | None, max_score: Tensor | None = None) -> DenseCall:
        """Returns the call with the places of its results, which are checked."""
        wanted = {"out": self.return_out, "lse": self.return_lse, "max_score": self.return_max_score}
        for (name, asked), place in zip(wanted.items(), (out, lse, max_score), strict=True):
            if place is not None and not asked:
                raise ValueError(f"{name} must be None with return_{name}=False, got {type(place).__name__}")
        read = list(tensors_in(self.q, self.k, self.v))
        check_places(self.q, read, out, lse)
        if max_score is not None:
            num_blocks = self.seqs.num_blocks(self.block_size)
            check_scores_place("max_score", max_score, self.q, num_blocks, [*read, *tensors_in(out, lse)])
        return self._replace(out=out, lse=lse, max_score=max_score)


def check_dense(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    seqs: Sequences | None,
    causal: bool,
    softmax_scale: float | None,
    block_size: int,
    return_out: bool,
    return_lse: bool,
    return_max_score: bool,
    check: bool,
) -> DenseCall:
    """Checks the arguments of `dense_attention`."""
    checks.integer("block_size", block_size, 16, 256)
    checks.flag("causal", causal)
    check_wanted(return_out, return_lse, return_max_score)
    inputs = check_qkv(q, k, v, seqs, softmax_scale, check, causal)
    return DenseCall(*inputs[:4], causal, inputs.softmax_scale, block_size, return_out, return_lse, return_max_score)


def check_wanted(return_out: bool, return_lse: bool, return_max_score: bool) -> None:
    """Raises unless at least one result is asked for."""
    wanted = {"return_out": return_out, "return_lse": return_lse, "return_max_score": return_max_score}
    if not any([checks.flag(name, value) for name, value in wanted.items()]):
        raise ValueError("return_out, return_lse or return_max_score must be True, got False for all three")


def chosen_results(out: Tensor | None, lse: Tensor | None, max_score: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """Returns the results that are not None, in order: several as a tuple, one alone as it is."""
    results = tuple(result for result in (out, lse, max_score) if result is not None)
    return results[0] if len(results) == 1 else results
