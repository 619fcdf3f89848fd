# SPDX-License-Identifier: MIT
"""The tolerance rule allows at most twice the error of honest low-precision PyTorch, both measured against float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Comparison:
    """A comparison holds errors of a result and of honest PyTorch against the truth, the bounds that follow, and the worst
    element."""

    error: float
    bound: float
    rms_error: float
    rms_bound: float
    where: tuple[int, ...]
    tested: float
    truth: float

    @property
    def ok(self) -> bool:
        """Says whether both errors keep their bounds."""
        return self.error <= self.bound and self.rms_error <= self.rms_bound

    def __str__(self) -> str:
        return (
            f"error {self.error:.3g} (bound {self.bound:.3g}), rms {self.rms_error:.3g} (bound {self.rms_bound:.3g}), "
            f"worst at {self.where}: {self.tested:.6g} where the truth is {self.truth:.6g}"
        )


def compare(tested: Tensor, honest: Tensor, truth: Tensor, factor: float = 2.0, magnitudes: Tensor | None = None) -> Comparison:
    """Compares the errors of `tested`, as a maximum and a root mean square, with `factor` times those of `honest`.

    tested, honest:  results of the same dtype; honest is what plain PyTorch gives in the precision of the inputs.
    truth:           float64, from the same (already rounded) inputs.
    magnitudes:      for results that are sums whose terms may cancel, the sums of the magnitudes of these terms.

    Where the truth is not finite tested must match it exactly, else the error is infinite. A floor is added to the bound: half
    a unit in the last place of the largest value for the rounding of the result, and eight roundings of the accumulator, which
    holds that value or, where it is more, a quarter of the largest of `magnitudes`: terms and partial sums are rounded by
    their own size, however near to 0 a sum ends. Raises ValueError for tensors of different shapes, and where honest leaves
    errors without a bound.
    """
    if not tested.shape == honest.shape == truth.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (tested, honest, truth))
        raise ValueError(f"tested, honest and truth must have one shape, got {shapes}")
    tested64, honest64 = tested.detach().double().cpu(), honest.detach().double().cpu()
    truth = truth.detach().double().cpu()
    if truth.numel() == 0:
        return Comparison(0.0, 0.0, 0.0, 0.0, (), 0.0, 0.0)
    errors, honest_errors = _errors(tested64, truth), _errors(honest64, truth)
    if not bool(honest_errors.isfinite().all()):
        where = tuple(honest_errors.isinf().nonzero()[0].tolist())
        got = f"got {honest64[where]:.6g} at {where} where the truth is {truth[where]:.6g}"
        raise ValueError(f"honest must be finite where the truth is and match it elsewhere, {got}")
    magnitudes = truth if magnitudes is None else magnitudes.detach().double().cpu()
    scale, summed = (float(x.where(x.isfinite(), 0).abs().max()) for x in (truth, magnitudes))
    unit = torch.finfo(tested.dtype).eps
    floor = unit / 2 * scale + 8 * min(unit, torch.finfo(torch.float32).eps) * max(scale, summed / 4, 1.0)
    worst = int(errors.argmax())
    return Comparison(
        error=float(errors.max()),
        bound=factor * float(honest_errors.max()) + floor,
        rms_error=float(errors.square().mean().sqrt()),
        rms_bound=factor * float(honest_errors.square().mean().sqrt()) + floor,
        where=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), truth.shape)),
        tested=float(tested64.flatten()[worst]),
        truth=float(truth.flatten()[worst]),
    )


def _errors(result: Tensor, truth: Tensor) -> Tensor:
    same = (result == truth) | (result.isnan() & truth.isnan())
    errors = (result - truth).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return errors.masked_fill(same, 0)


def assert_close(
    name: str, tested: Tensor, honest: Tensor, truth: Tensor, factor: float = 2.0, magnitudes: Tensor | None = None
) -> None:
    """Raises AssertionError unless `tested` has the shape and dtype of `honest` and keeps the tolerance rule."""
    _assert_like(name, tested, honest)
    comparison = compare(tested, honest, truth, factor, magnitudes)
    if not comparison.ok:
        raise AssertionError(f"{name}: {comparison}")


def assert_equal(name: str, tested: Tensor, expected: Tensor) -> None:
    """Raises AssertionError unless both have the same shape, dtype and elements (NaN equals NaN)."""
    _assert_like(name, tested, expected)
    tested, expected = tested.detach().cpu(), expected.detach().cpu()
    different = ~((tested == expected) | ((tested != tested) & (expected != expected)))
    if bool(different.any()):
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(different.sum())} of {different.numel()} elements differ, "
            f"first at {where}: {tested[where].item()} where {expected[where].item()} is expected"
        )


def _assert_like(name: str, tested: Tensor, expected: Tensor) -> None:
    if tested.shape != expected.shape or tested.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: {tested.dtype} {tuple(tested.shape)} where {expected.dtype} {tuple(expected.shape)} is expected"
        )
