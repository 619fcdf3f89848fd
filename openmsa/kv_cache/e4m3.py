# SPDX-License-Identifier: MIT
"""`E4M3` stores one byte an element and float32 scales for the whole tensor, a head, or a page and head.

float8_e4m3fn has a sign, 4 exponent bits (bias 7) and 3 mantissa bits; it has no infinity; 0x7F and 0xFF are NaN; the largest
number is 448, the smallest 2**-9.

Byte layout: ``dim`` bytes a row, element 0 first. The scales lie in a tensor of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.scales import check_positive, scalar
from openmsa.kv_cache.stored import Stored, check_quantizable, check_shape, divided, part
from openmsa.runtime import named_devices

LARGEST = 448.0
NAN_CODE = 0x7F


def encode(values: Tensor) -> Tensor:
    """Rounds float32 numbers to E4M3: to nearest, ties to even, saturating at 448 (infinities too); NaN becomes 0x7F."""
    codes = values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).masked_fill(values.isnan(), NAN_CODE).view(torch.float8_e4m3fn)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives the float32 or float64 numbers of codes (as uint8). On a CPU this goes through float16, whose bits are the same but
    for a smaller bias of the exponent: PyTorch's own conversion is slow there."""
    if codes.device.type != "cpu":
        return codes.view(torch.float8_e4m3fn).to(dtype)
    wide = codes.view(torch.int8).to(torch.int16)  # the sign fills all bits above its own
    bits = wide.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # the sign alone stands in front of exponent and mantissa
    numbers = bits.view(torch.float16).to(dtype).mul_(256.0)
    nan = (codes & 0x7F).eq_(0x7F)
    return numbers.masked_fill_(nan.bool(), torch.nan) if bool(nan.any()) else numbers


def unit(amax: Tensor, largest: float) -> Tensor:
    """Returns the scale that makes `amax` the largest number of a format: their quotient, or 1 where that is 0 or NaN."""
    scale = divided(amax, largest)
    return torch.where(scale > 0, scale, 1.0)


def finite_amax(values: Tensor, dims: tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Returns the largest finite magnitude, float32; 0 where there is none."""
    magnitude = values.float().abs()
    magnitude = torch.where(magnitude.isfinite(), magnitude, 0)
    if not values.numel():
        kept = [1 if d in dims else n for d, n in enumerate(values.shape) if keepdim or d not in dims]
        return torch.zeros(kept, dtype=torch.float32, device=values.device)
    return magnitude.amax(dims, keepdim=keepdim)


@dataclass(frozen=True, eq=False)
class E4M3(Stored):
    """`E4M3` holds the numbers data * scale.

    data:   float8_e4m3fn ``[total, heads, dim]`` or a pool ``[num_pages, heads, page_size, dim]``, any strides (uint8 is taken
            as its bytes).
    scale:  None (1.0); float32 ``[]`` (one of the tensor; a float or ``[1]`` is taken too), ``[heads]``, or, for a pool,
            ``[num_pages, heads]`` or ``[num_pages, 1]``. Positive and finite, which is checked of a float, and by `quantize`
            of a tensor on a CPU too.

    Quantising divides by the scale in float32 (values of other dtypes are converted to it first) and rounds to nearest, ties
    to even; what lies past 448 * scale saturates, infinities too; NaN stays NaN, and nothing else becomes NaN. `write` keeps
    the scales: they are static.
    """

    data: Tensor
    scale: Tensor | None = None
    format: ClassVar[str] = "e4m3"
    own: ClassVar[tuple[str, ...]] = ("data",)

    if TYPE_CHECKING:

        def __init__(self, data: Tensor, scale: Tensor | float | None = None) -> None: ...

    def __post_init__(self) -> None:
        data = part("E4M3.data", self.data, self.data, (torch.float8_e4m3fn, torch.uint8))
        object.__setattr__(self, "data", data.view(torch.float8_e4m3fn))
        if self.scale is not None:
            object.__setattr__(self, "scale", self._checked_scale(self.scale))

    def _checked_scale(self, scale: Tensor | float) -> Tensor:
        if not isinstance(scale, Tensor) or (scale.numel() == 1 and scale.dim() < 2):
            return scalar("E4M3.scale", scale, self.data)
        part("E4M3.scale", scale, self.data, (torch.float32,))
        shape, rank = self.data.shape, self.data.dim()
        allowed: list[tuple[int, ...]] = [(shape[1],)] if rank >= 3 else []
        if rank == 4:
            allowed += [(shape[0], shape[1]), (shape[0], 1)]
        if tuple(scale.shape) not in allowed:
            shapes = ", ".join(map(str, [(), *allowed]))
            raise ValueError(f"E4M3.scale must have one of the shapes {shapes} (tensor, head, page), got {tuple(scale.shape)}")
        return scale

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device | str = "cpu", scale: Tensor | float | None = None) -> E4M3:
        """Makes zeros with the given scale."""
        device = named_devices.usable("device", device)
        data = torch.zeros(check_shape(shape), dtype=torch.uint8, device=device)
        return cls(data.view(torch.float8_e4m3fn), scale)

    @classmethod
    def quantize(cls, values: Tensor, scale: Tensor | float | None = None, *, per: str | None = None) -> E4M3:
        """Quantises rows ``[total, heads, dim]`` or a pool of them. scale: as the class takes it. per: "tensor", "head" or
        "page" (page and head) computes the scale instead, the largest finite magnitude / 448, or 1 where that is 0."""
        check_quantizable(values)
        if per is not None:
            if scale is not None:
                raise ValueError(f"per must be None when scale is given, got {per!r}")
            scale = _amax_scale(values, per)
        elif scale is not None:
            check_positive("scale", scale)
        stored = cls.allocate(tuple(values.shape), values.device, scale)
        stored.fill(values)
        return stored

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles codes as bytes, since PyTorch does not pickle numbers of eight bits."""
        return E4M3, (self.data.view(torch.uint8), self.scale)

    @property
    def scale_strides(self) -> tuple[int, int]:
        """Returns the elements of `scale` from page to page and from head to head; 0 where one scale serves all of them."""
        if self.scale is None or self.scale.dim() == 0:
            return 0, 0
        if self.scale.dim() == 1:
            return 0, self.scale.stride(0)
        return self.scale.stride(0), 0 if self.scale.shape[1] == 1 else self.scale.stride(1)

    def __getitem__(self, rows: slice) -> E4M3:
        """Returns a slice of the first dimension (tokens or pages), a view."""
        if not isinstance(rows, slice):
            raise TypeError(f"rows of E4M3[rows] must be a slice, got {type(rows).__name__}; rows() gives numbers")
        paged = self.scale is not None and self.scale.dim() == 2
        return E4M3(self.data[rows], self.scale[rows] if paged and self.scale is not None else self.scale)

    def _scales(self, index: tuple[Any, ...]) -> Tensor | None:
        """Returns the scale of each row of ``self[index]``, float32; one for all stays a scalar."""
        if self.scale is None or self.scale.dim() == 0:
            return self.scale
        lead = self.data.shape[:-1]
        heads = self.scale if self.scale.dim() == 2 else self.scale[None]
        spread = heads.reshape(tuple(heads.shape) + (1,) * (len(lead) - 2)).expand(lead)  # a view
        return spread[index][..., None]

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        numbers = decode(self.data.view(torch.uint8)[index], wide)
        scale = self._scales(index)
        return (numbers if scale is None else numbers.mul_(scale)).to(dtype)

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        values = values.float()
        scale = self._scales(index)
        scaled = values if scale is None else values / scale
        if scale is not None:  # 0 / 0 and inf / inf become 0
            scaled = torch.where(scaled.isnan() & ~values.isnan(), 0.0, scaled)
        self.data.view(torch.uint8)[index] = encode(scaled).view(torch.uint8)


def _amax_scale(values: Tensor, per: str) -> Tensor:
    if per not in ("tensor", "head", "page") or (per == "page" and values.dim() != 4) or (per == "head" and values.dim() < 3):
        rule = "'tensor', from 3 dimensions on 'head', or, for a pool of 4 dimensions, 'page'"
        raise ValueError(f"per must be {rule}, got {per!r} for shape {tuple(values.shape)}")
    kept = {"tensor": (), "head": (1,), "page": (0, 1)}[per]
    return unit(finite_amax(values.detach(), tuple(d for d in range(values.dim()) if d not in kept)), LARGEST)
