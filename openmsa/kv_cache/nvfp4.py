# SPDX-License-Identifier: MIT
"""`NVFP4` stores two E2M1 codes a byte, one E4M3 scale for 16 elements, and one float32 scale for the tensor.

Byte layout: ``dim // 2`` bytes a row; byte i holds element 2 i in its low and element 2 i + 1 in its high nibble. E2M1 has a
sign, 2 exponent bits and 1 mantissa bit; the codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, those from 8 their negatives.
Linear scales take ``dim // 16`` bytes a row. For scales in the 128x4 layout, rows are counted in C order of the leading
dimensions and padded to a multiple of 128, the groups of a row (cols) to a multiple of 4; the scale of (row, col) lies at byte
``((row // 128) * ceil(cols / 4) + col // 4) * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache import e4m3
from openmsa.kv_cache.scales import check_positive, scalar
from openmsa.kv_cache.stored import Stored, check_quantizable, check_shape, index_of, part
from openmsa.runtime import named_devices

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
LAYOUTS = ("linear", "128x4")
BYTES = (torch.uint8, torch.float4_e2m1fn_x2)


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """A table of both elements of each byte, ``[256, 2]``, is made once a device and dtype."""
    codes = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=dtype, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack((codes[byte & 15], codes[byte >> 4]), 1).to(device)


def decode_pairs(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives the E2M1 numbers ``[..., dim]``, float32 or float64, of bytes ``[..., dim // 2]``."""
    pairs, byte = _pairs(data.device, dtype), data.reshape(-1).int()
    if dtype == torch.float32:  # a pair is read as one element of 8 bytes
        numbers = pairs.view(torch.float64).flatten().index_select(0, byte).view(dtype)
    else:
        numbers = pairs.index_select(0, byte)
    return numbers.view(*data.shape[:-1], 2 * data.shape[-1])


def encode_pairs(values: Tensor) -> Tensor:
    """Rounds float32 numbers ``[..., dim]`` to bytes ``[..., dim // 2]``: to nearest, ties to the even code, saturating at 6;
    the sign of zero is kept. No number may be NaN."""
    magnitude, code = values.abs(), values.signbit().to(torch.uint8) * 8
    for midpoint in (0.25, 1.25, 2.5, 5.0):  # the codes just below these midpoints are even
        code += magnitude > midpoint
    for midpoint in (0.75, 1.75, 3.5):
        code += magnitude >= midpoint
    return code[..., 0::2] | code[..., 1::2] << 4


def swizzled_offset(row: Tensor, col: Tensor, cols: int) -> Tensor:
    """Says at which byte the scale of group `col` of `row` lies in the 128x4 layout (int64, shapes that broadcast)."""
    tile = (row // 128) * (-(-cols // 4)) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + col % 4


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """The scales of so many rows and groups have this shape in the 128x4 layout."""
    return -(-rows // 128) * 128, -(-cols // 4) * 4


@dataclass(frozen=True, eq=False)
class NVFP4(Stored):
    """`NVFP4` holds the numbers e2m1 * scale of the group * global_scale.

    data:          uint8 ``[..., dim // 2]``, any strides.
    scale:         float8_e4m3fn (uint8 is taken as its bytes): linear ``[..., dim // 16]``, any strides; 128x4: contiguous
                   ``[rows padded to 128, dim // 16 padded to 4]`` or more rows.
    global_scale:  float32 ``[]`` (a float is taken too), positive and finite, which is checked of a float, and by `quantize` of
                   a tensor on a CPU too; None: 1.0.
    layout:        that of the scales, "linear" or "128x4".

    Quantising a group takes, in float32, scale = E4M3(largest magnitude / (6 * global_scale)) and code = E2M1(value / (scale *
    global_scale)), both to nearest, ties to even, saturating, so that an infinity is the largest number of the format. A group
    with NaN has scale NaN (0x7F) and codes 0. A group whose scale rounds to 0 has codes 0. `write` keeps the global scale.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None = None
    layout: str = "linear"
    format: ClassVar[str] = "nvfp4"
    own: ClassVar[tuple[str, ...]] = ("data", "scale")

    if TYPE_CHECKING:

        def __init__(
            self, data: Tensor, scale: Tensor, global_scale: Tensor | float | None = None, layout: str = "linear"
        ) -> None: ...

    def __post_init__(self) -> None:
        data = part("NVFP4.data", self.data, self.data, BYTES).view(torch.uint8)
        object.__setattr__(self, "data", data)
        if self.layout not in LAYOUTS:
            raise ValueError(f"NVFP4.layout must be 'linear' or '128x4', got {self.layout!r}")
        if self.shape[-1] % GROUP:
            raise ValueError(f"NVFP4.data.shape[-1] must be a multiple of {GROUP // 2} bytes, got {data.shape[-1]}")
        bytes_ = (torch.float8_e4m3fn, torch.uint8)
        if self.layout == "linear":
            part("NVFP4.scale", self.scale, data, bytes_, (*data.shape[:-1], self.groups))
        else:
            part("NVFP4.scale", self.scale, data, bytes_)
            rows, cols = swizzled_shape(data.shape[:-1].numel(), self.groups)
            shape = tuple(self.scale.shape)
            if len(shape) != 2 or shape[0] < rows or shape[1] != cols or not self.scale.is_contiguous():
                raise ValueError(f"NVFP4.scale must be contiguous, {(rows, cols)} or more rows, in 128x4, got {shape}")
        object.__setattr__(self, "scale", self.scale.view(torch.float8_e4m3fn))
        if self.global_scale is not None:
            object.__setattr__(self, "global_scale", scalar("NVFP4.global_scale", self.global_scale, data))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-1], 2 * self.data.shape[-1]))

    @property
    def groups(self) -> int:
        """A row has so many groups."""
        return self.data.shape[-1] * 2 // GROUP

    @classmethod
    def allocate(
        cls,
        shape: tuple[int, ...],
        device: torch.device | str = "cpu",
        global_scale: Tensor | float | None = None,
        layout: str = "linear",
    ) -> NVFP4:
        device = named_devices.usable("device", device)
        *lead, dim = check_shape(shape, GROUP)
        groups = dim // GROUP
        scales = (*lead, groups) if layout == "linear" else swizzled_shape(torch.Size(lead).numel(), groups)
        data, scale = (torch.zeros(s, dtype=torch.uint8, device=device) for s in ((*lead, dim // 2), scales))
        return cls(data, scale, global_scale, layout)

    @classmethod
    def quantize(cls, values: Tensor, global_scale: Tensor | float | None = None, layout: str = "linear") -> NVFP4:
        """Quantises rows ``[..., dim]``, which are converted to float32 first. global_scale None: the largest finite magnitude
        / (6 * 448), or 1 where that is 0."""
        check_quantizable(values, GROUP)
        if global_scale is None:
            global_scale = e4m3.unit(e4m3.finite_amax(values.detach(), tuple(range(values.dim()))), LARGEST * e4m3.LARGEST)
        else:
            check_positive("global_scale", global_scale)
        stored = cls.allocate(tuple(values.shape), values.device, global_scale, layout)
        stored.fill(values)
        return stored

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles scales as bytes, since PyTorch does not pickle numbers of eight bits."""
        return NVFP4, (self.data, self.scale.view(torch.uint8), self.global_scale, self.layout)

    def in_layout(self, layout: str) -> NVFP4:
        """Gives the same numbers with scales copied into the other layout; the codes are shared."""
        if layout == self.layout:
            return self
        other = NVFP4.allocate(tuple(self.shape), self.device, self.global_scale, layout)
        moved = NVFP4(self.data, other.scale, self.global_scale, layout)
        moved._put_scales((), self._scales(()))
        return moved

    def _at(self, index: tuple[Any, ...]) -> Tensor:
        rows = index_of(tuple(self.data.shape[:-1]), index, self.device)
        return swizzled_offset(rows[..., None], torch.arange(self.groups, device=self.device), self.groups)

    def _scales(self, index: tuple[Any, ...]) -> Tensor:
        """Returns scale codes of ``self[index]``, uint8 ``[..., groups]``."""
        scale = self.scale.view(torch.uint8)
        return scale[index] if self.layout == "linear" else scale.view(-1)[self._at(index)]

    def _put_scales(self, index: tuple[Any, ...], codes: Tensor) -> None:
        scale = self.scale.view(torch.uint8)
        if self.layout == "linear":
            scale[index] = codes
        else:
            scale.view(-1)[self._at(index)] = codes

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = e4m3.decode(self._scales(index), wide)[..., None]
        numbers = decode_pairs(self.data[index], wide).unflatten(-1, (-1, GROUP)).mul_(scale)  # exact
        if self.global_scale is not None:
            numbers = numbers.mul_(self.global_scale)
        return numbers.flatten(-2).to(dtype)

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        groups = values.float().unflatten(-1, (-1, GROUP))
        has_nan = groups.isnan().any(-1)
        amax = torch.where(has_nan, 0.0, groups.abs().amax(-1))
        whole = amax.new_ones(()) if self.global_scale is None else self.global_scale
        codes = e4m3.encode(amax / (whole * LARGEST))
        unit = (codes.float() * whole)[..., None]
        ratio = torch.where((unit > 0) & ~has_nan[..., None], groups / unit, 0.0)
        self.data[index] = encode_pairs(ratio.flatten(-2))
        self._put_scales(index, codes.view(torch.uint8).masked_fill(has_nan, e4m3.NAN_CODE))
