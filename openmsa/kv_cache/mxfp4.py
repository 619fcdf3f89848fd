# SPDX-License-Identifier: MIT
"""`MXFP4` stores index keys as two E2M1 codes a byte and one E8M0 scale for 32 elements.

Byte layout: codes as in `nvfp4`, ``dim // 2`` bytes a key; scales ``dim // 32`` bytes a key, code c for 2**(c - 127), 255 NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.nvfp4 import BYTES, decode_pairs, encode_pairs
from openmsa.kv_cache.stored import Stored, check_quantizable, check_shape, part
from openmsa.runtime import named_devices

GROUP = 32
NAN_CODE = 255


def power_of_two(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Gives the numbers of E8M0 codes (uint8) in float32 or float64."""
    bits = codes.int() << 23
    numbers = torch.where(codes == 0, 1 << 22, bits).view(torch.float32)  # 2**-127 is subnormal
    return torch.where(codes == NAN_CODE, torch.nan, numbers).to(dtype)


@dataclass(frozen=True, eq=False)
class MXFP4(Stored):
    """`MXFP4` holds index keys, whose numbers are e2m1 * scale of the group.

    data:   uint8 ``[..., dim // 2]``, dim a multiple of 32, any strides.
    scale:  uint8 (float8_e8m0fnu is taken as its bytes) ``[..., dim // 32]``, any strides.

    Quantising a group takes, in float32, scale = 2**(floor(log2(largest magnitude)) - 2), at least 2**-127, and code =
    E2M1(value / scale) to nearest, ties to even, saturating. An infinity counts as the largest float32 for the scale and
    becomes 6 * scale. A group of zeros has scale code 0. -0.0, and what rounds to it, keeps its sign. A group with NaN has
    scale code 255 and codes 0.
    """

    data: Tensor
    scale: Tensor
    format: ClassVar[str] = "mxfp4"
    own: ClassVar[tuple[str, ...]] = ("data", "scale")

    def __post_init__(self) -> None:
        data = part("MXFP4.data", self.data, self.data, BYTES).view(torch.uint8)
        if data.shape[-1] % (GROUP // 2):
            raise ValueError(f"MXFP4.data.shape[-1] must be a multiple of {GROUP // 2} bytes, got {data.shape[-1]}")
        dtypes, shape = (torch.uint8, torch.float8_e8m0fnu), (*data.shape[:-1], data.shape[-1] * 2 // GROUP)
        scale = part("MXFP4.scale", self.scale, data, dtypes, shape).view(torch.uint8)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "scale", scale)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.data.shape[:-1], 2 * self.data.shape[-1]))

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> MXFP4:
        device = named_devices.usable("device", device)
        *lead, dim = check_shape(shape, GROUP)
        data, scale = (torch.zeros(*lead, n, dtype=torch.uint8, device=device) for n in (dim // 2, dim // GROUP))
        return cls(data, scale)

    @classmethod
    def quantize(cls, values: Tensor) -> MXFP4:
        """Quantises keys ``[..., dim]``, which are converted to float32 first."""
        check_quantizable(values, GROUP)
        stored = cls.allocate(tuple(values.shape), values.device)
        stored.fill(values)
        return stored

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = power_of_two(self.scale[index], wide)[..., None]
        return decode_pairs(self.data[index], wide).unflatten(-1, (-1, GROUP)).mul_(scale).flatten(-2).to(dtype)

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        groups = values.float().unflatten(-1, (-1, GROUP))
        has_nan = groups.isnan().any(-1)
        amax = torch.where(has_nan, 0.0, groups.abs().amax(-1))
        exponent = (amax.view(torch.int32) >> 23).clamp_(max=254)  # biased; 0 of zeros and subnormals
        codes = (exponent - 2).clamp_(min=0).to(torch.uint8)
        ratio = torch.where(has_nan[..., None], 0.0, groups / power_of_two(codes, torch.float32)[..., None])
        self.data[index] = encode_pairs(ratio.flatten(-2))
        self.scale[index] = codes.masked_fill_(has_nan, NAN_CODE)
