# SPDX-License-Identifier: MIT
"""`Int8` stores index keys as one byte an element, and for each key a bfloat16 scale and a bfloat16 bound of the error.

Byte layout: ``dim`` two's complement bytes a key, element 0 first; scale and error lie in tensors of their own or, as
`Int8.allocate` lays them, side by side: four bytes a key, which GPU kernels read as one word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.stored import Stored, check_quantizable, check_shape, divided, part
from openmsa.runtime import named_devices

STEPS = 127.49
"""The largest magnitude is so many steps of the scale. Rounding the scale up leaves more than 126.5, so the largest code is
127; and a key made of codes has the same scale again."""
LARGEST = 2.0**127
"""Larger magnitudes (infinities too) count as this one, so that code times scale is finite."""
FRACTION_BITS = 18
MARGIN = 1 + 2.0**-20
TINY = 2.0**-126


def rounded_up(x: Tensor) -> Tensor:
    """Rounds float32 from 0 to infinity up to the nearest bfloat16 that is not smaller."""
    return ((x.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def encode(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes int8 ``[..., dim]``, and scales and errors bfloat16 ``[...]``, of float32 keys ``[..., dim]``.

    The error is the same whatever the order of the sum: with ``ratio = value / scale`` rounded to float32, at most
    127.5 * 2**-24 from the true ratio, each element's ``|ratio - code|`` is counted in units of 2**-18 and raised by two to
    three of them; the squares add up exactly in int64. The float32 steps behind the sum lose less than `MARGIN` gives.
    """
    has_nan, magnitude = values.isnan().any(-1), values.abs()
    past = (magnitude > LARGEST).any(-1)
    amax = torch.where(has_nan, 0.0, magnitude.amax(-1)).clamp(max=LARGEST)
    scale = rounded_up(divided(amax, STEPS)).float()
    ratio = values.clamp(-LARGEST, LARGEST) / scale[..., None]
    ratio = torch.where((scale > 0)[..., None], ratio, 0.0)
    code = ratio.round().clamp_(-127, 127)
    units = ((ratio - code).abs() * 2.0**FRACTION_BITS).floor().long() + 3
    norm = units.square().sum(-1).float().double().sqrt().float()  # the CPU's float32 root is not correctly rounded
    error = (norm * 2.0**-FRACTION_BITS * scale * MARGIN).clamp(min=TINY)
    error = torch.where(scale > 0, error, torch.where(amax > 0, TINY, 0.0))  # scale 0: below 2**-142 in every element
    error = torch.where(past, torch.inf, error)
    bits = torch.where(has_nan, 0x7FC0, scale.view(torch.int32) >> 16)  # conversions make different NaN
    return code.to(torch.int8), bits.to(torch.int16).view(torch.bfloat16), rounded_up(torch.where(has_nan, 0.0, error))


@dataclass(frozen=True, eq=False)
class Int8(Stored):
    """`Int8` holds index keys, whose numbers are data * scale of the key.

    data:   int8 ``[..., dim]`` from -127 to 127, any strides.
    scale:  bfloat16 ``data.shape[:-1]``, any strides.
    error:  bfloat16 of the same shape: at least the Euclidean norm of (key - data * scale), so that
            ``|q . key - q . (data * scale)| <= |q| * error``.

    Quantising a key takes scale = largest magnitude / 127.49, rounded up to bfloat16, and rounds codes to nearest, ties to
    even; all else is in float32, and the error is rounded up in the end. The largest code is 127, and numbers of the format
    stay as they are (but below 2**-118, where bfloat16 is coarser). A key of zeros has codes, scale and error 0. A key with NaN
    has codes and error 0 and scale NaN, so that each of its products is NaN as the true ones are. A magnitude above 2**127,
    infinity too, counts as 2**127, and the key's error is infinite.
    """

    data: Tensor
    scale: Tensor
    error: Tensor
    format: ClassVar[str] = "int8"
    own: ClassVar[tuple[str, ...]] = ("data", "scale", "error")

    def __post_init__(self) -> None:
        part("Int8.data", self.data, self.data, (torch.int8,))
        for name, value in (("Int8.scale", self.scale), ("Int8.error", self.error)):
            part(name, value, self.data, (torch.bfloat16,), tuple(self.data.shape[:-1]))

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Int8:
        shape, device = check_shape(shape), named_devices.usable("device", device)
        pairs = torch.zeros(*shape[:-1], 2, dtype=torch.bfloat16, device=device)
        return cls(torch.zeros(shape, dtype=torch.int8, device=device), *pairs.unbind(-1))

    @classmethod
    def quantize(cls, values: Tensor) -> Int8:
        """Quantises keys ``[..., dim]``, which are converted to float32 first."""
        check_quantizable(values)
        stored = cls.allocate(tuple(values.shape), values.device)
        stored.fill(values)
        return stored

    def to(self, device: torch.device | str) -> Int8:
        device = named_devices.usable("device", device)
        if device == self.device:
            return self
        pairs = torch.stack((self.scale, self.error), -1).to(device)
        return Int8(self.data.to(device), *pairs.unbind(-1))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles scale and error side by side, as `allocate` lays them."""
        return _of_pairs, (self.data, torch.stack((self.scale, self.error), -1))

    def words(self) -> Tensor | None:
        """Returns scale (the low half) and error of each key as one int32, ``data.shape[:-1]``; None if they lie apart."""
        scale, error = self.scale, self.error
        beside = error.data_ptr() - scale.data_ptr() == 2 and scale.stride() == error.stride()
        if not beside or any(n % 2 for n in (scale.storage_offset(), *scale.stride())) or scale.data_ptr() % 4:
            return None
        if scale.untyped_storage().data_ptr() != error.untyped_storage().data_ptr():  # neighbours only by chance
            return None
        return scale.as_strided((*scale.shape, 2), (*scale.stride(), 1)).view(torch.int32).squeeze(-1)

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.data[index].to(wide).mul_(self.scale[index][..., None]).to(dtype)

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        for own, new in zip((self.data, self.scale, self.error), encode(values.float()), strict=True):
            own[index] = new


def _of_pairs(data: Tensor, pairs: Tensor) -> Int8:
    """Makes keys of which `pairs` ``[..., 2]`` holds scale and error."""
    return Int8(data, *pairs.unbind(-1))
