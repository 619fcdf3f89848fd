# SPDX-License-Identifier: MIT
"""Int8 index keys: one byte an element, and for each key a float32 scale and a float32 bound of the error.

Byte layout: ``dim`` two's complement bytes a key, element 0 first; scale and error lie in tensors of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored, check_quantizable, divided, part

LARGEST = 2.0**127
"""Magnitudes above it (infinities too) count as it, so that code times scale is finite."""
FRACTION_BITS = 18
MARGIN = 1 + 2.0**-20
TINY = 2.0**-126


def encode(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 ``[..., dim]``, scales and errors float32 ``[...]`` of float32 keys ``[..., dim]``.

    The error is the same whatever the order of the sum: with ``ratio = value / scale`` rounded to float32, at most
    127.5 * 2**-24 from the true ratio, each element's ``|ratio - code|`` is counted in units of 2**-18 and raised by two to
    three of them; the squares add up exactly in int64. The float32 steps behind the sum lose less than `MARGIN` gives. (Where a
    subnormal scale lets ratios grow past 127.5, the whole distance is below `TINY`.)
    """
    has_nan, magnitude = values.isnan().any(-1), values.abs()
    past = (magnitude > LARGEST).any(-1)
    amax = torch.where(has_nan, 0.0, magnitude.amax(-1)).clamp(max=LARGEST)
    scale = divided(amax, 127.0)
    ratio = values.clamp(-LARGEST, LARGEST) / scale[..., None]
    ratio = torch.where((scale > 0)[..., None], ratio, 0.0)
    code = ratio.round().clamp_(-127, 127)
    units = ((ratio - code).abs() * 2.0**FRACTION_BITS).floor().long() + 3
    norm = units.square().sum(-1).float().double().sqrt().float()  # the CPU's float32 root is not correctly rounded
    error = (norm * 2.0**-FRACTION_BITS * scale * MARGIN).clamp(min=TINY)
    error = torch.where(scale > 0, error, torch.where(amax > 0, TINY, 0.0))  # scale 0: below 2**-142 in every element
    error = torch.where(past, torch.inf, error)
    scale, error = torch.where(has_nan, torch.nan, scale), torch.where(has_nan, 0.0, error)
    return code.to(torch.int8), scale, error


@dataclass(frozen=True, eq=False)
class Int8(Stored):
    """Index keys: number = data * scale of the key.

    data:   int8 ``[..., dim]`` from -127 to 127, any strides.
    scale:  float32 ``data.shape[:-1]``, any strides.
    error:  float32 of the same shape: at least the Euclidean norm of (key - data * scale), so that
            ``|q . key - q . (data * scale)| <= |q| * error``.

    Quantising a key: scale = largest magnitude / 127, codes rounded to nearest, ties to even, all in float32. A key of zeros:
    codes, scale and error 0. A key with NaN: codes and error 0, scale NaN, so that each of its products is NaN as the true ones
    are. A magnitude above 2**127, infinity too, counts as 2**127, and the key's error is infinite.
    """

    data: Tensor
    scale: Tensor
    error: Tensor
    format: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        part("Int8.data", self.data, self.data, (torch.int8,))
        for name, value in (("Int8.scale", self.scale), ("Int8.error", self.error)):
            part(name, value, self.data, (torch.float32,), tuple(self.data.shape[:-1]))

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Int8:
        scale, error = torch.zeros(2, *shape[:-1], dtype=torch.float32, device=device).unbind(0)
        return cls(torch.zeros(shape, dtype=torch.int8, device=device), scale, error)

    @classmethod
    def quantize(cls, values: Tensor) -> Int8:
        """Keys ``[..., dim]``, converted to float32 first."""
        check_quantizable(values)
        stored = cls.allocate(tuple(values.shape), values.device)
        stored.fill(values)
        return stored

    def rows(self, *index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.data[index].to(wide).mul_(self.scale[index][..., None]).to(dtype)

    def write(self, index: tuple[Any, ...], values: Tensor) -> None:
        for own, new in zip((self.data, self.scale, self.error), encode(values.detach().float()), strict=True):
            own[index] = new
