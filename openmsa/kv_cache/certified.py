# SPDX-License-Identifier: MIT
"""Index keys are kept twice: as int8 with error bounds for a first pass, and exact for the blocks that it leaves open.

Byte layout: that of `int8`, and that of plain rows, in tensors of the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.stored import Stored, check_dtype, check_quantizable, part

EXACT = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class CertifiedKeys(Stored):
    """This format keeps the same index keys in two precisions.

    coarse:  `Int8` of the exact keys as they are stored.
    exact:   float32, float16 or bfloat16 of the same shape, any strides.

    Its numbers, and the scores that any stage computes, are those of the exact keys. `write` fills both, the coarse keys from
    the values as `exact` rounded them.
    """

    coarse: Int8
    exact: Tensor
    format: ClassVar[str] = "certified"
    own: ClassVar[tuple[str, ...]] = ("exact",)

    def __post_init__(self) -> None:
        if not isinstance(self.coarse, Int8):
            raise TypeError(f"CertifiedKeys.coarse must be an openmsa.Int8, got {type(self.coarse).__name__}")
        part("CertifiedKeys.exact", self.exact, self.coarse.data, EXACT)
        if self.exact.shape != self.coarse.shape:
            raise ValueError(
                f"CertifiedKeys.exact must have the shape of coarse {tuple(self.coarse.shape)}, got {tuple(self.exact.shape)}"
            )

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Returns the exact keys."""
        return self.exact

    @classmethod
    def allocate(
        cls, shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
    ) -> CertifiedKeys:
        check_dtype(dtype)
        return cls(Int8.allocate(shape, device), torch.zeros(shape, dtype=dtype, device=device))

    @classmethod
    def quantize(cls, values: Tensor, dtype: torch.dtype | None = None) -> CertifiedKeys:
        """Quantises keys ``[..., dim]`` and keeps exact ones in `dtype` (None: as they are, the same tensor)."""
        check_quantizable(values)
        if dtype is not None:
            check_dtype(dtype)
        exact = values.detach() if dtype is None else values.detach().to(dtype)
        return cls(Int8.quantize(exact), exact)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        check_dtype(dtype)
        return self.exact.to(dtype)

    def check_written(self, name: str) -> None:
        super().check_written(name)
        self.coarse.check_written(f"{name}.coarse")

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        return self.exact[index].to(dtype)

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        rounded = values.to(self.exact.dtype)
        self.exact[index] = rounded
        self.coarse.write_checked(index, rounded)
