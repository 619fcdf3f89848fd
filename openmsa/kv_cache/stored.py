# SPDX-License-Identifier: MIT
"""`Stored` is rows of numbers kept in a low-precision format, which stand wherever a tensor of rows stands.

Rows are packed, ``[total, heads, dim]``, or a pool of pages, ``[num_pages, heads, page_size, dim]``. The functions below serve
the formats; those that take a plain tensor as well stand in `openmsa.kv_cache.rows`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from openmsa.runtime import checks, named_devices, overlap
from openmsa.runtime.dispatch import has_triton, operator
from openmsa.types import INT32_MAX

if TYPE_CHECKING:
    from typing_extensions import Self


class Stored:
    """A format says how bytes and scales stand for numbers. It is frozen: the tensors inside change only through `write`.

    format:  the name that ``refuse`` functions, errors and ``allocate(format=...)`` use.
    data:    the codes, ``[..., dim]`` or, with two codes a byte, ``[..., dim // 2]``; any strides.
    own:     the names of the tensors that `write` fills.
    """

    format: ClassVar[str]
    own: ClassVar[tuple[str, ...]]
    data: Tensor

    @property
    def shape(self) -> torch.Size:
        """Returns the logical shape, its last dimension counted in elements."""
        return self.data.shape

    def dim(self) -> int:
        return self.data.dim()

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """The codes have this dtype."""
        return self.data.dtype

    @property
    def requires_grad(self) -> bool:
        return False

    def to(self, device: torch.device | str) -> Self:
        """Gives the same rows on another device."""
        device = named_devices.usable("device", device)
        fields = {name: value for name, value in vars(self).items() if isinstance(value, (Tensor, Stored))}
        moved = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(moved, name, value.to(device))
        return moved

    def detach(self) -> Self:
        """Gives itself, since codes have no gradient."""
        return self

    def __getitem__(self, rows: slice) -> Self:
        """Gives a slice of the first dimension, a view; the formats of queries offer it."""
        raise TypeError(f"{type(self).__name__} offers no slices; rows() gives numbers")

    def rows(self, *index: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gives ``self[index]`` as numbers; `index` runs over the leading dimensions as torch indexing does: negative numbers
        count from the end, and slices end where the rows do. Products with scales are taken in float64 for float64 and in
        float32 otherwise, then rounded to `dtype`."""
        check_dtype(dtype)
        check_index(self.shape[:-1], index, self.device)
        return self._numbers(index, dtype)

    def write(self, index: tuple[Any, ...], values: Tensor) -> None:
        """Quantises `values`, of the shape of ``self[index]``, into place. Scales that belong to the whole tensor, a head or a
        page stay; those of a row or a group are computed from the values."""
        if not isinstance(index, tuple):
            raise TypeError(f"index must be a tuple of indices, got {type(index).__name__}")
        self._check_new(values, check_index(self.shape[:-1], index, self.device))
        self.write_checked(index, values.detach())

    def _check_new(self, values: Any, lead: torch.Size) -> None:
        """`values` must fit rows of these leading dimensions, and each element must have a place of its own."""
        part("values", values, self.data, checks.FLOATS, (*lead, self.shape[-1]), detached=True)
        self.check_written(type(self).__name__)

    def check_written(self, name: str) -> None:
        """Raises unless each element of the tensors that `write` fills has a place of its own."""
        for own in self.own:
            overlap.check_written(f"{name}.{own}", getattr(self, own))

    def _numbers(self, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        """Does what `rows` does with checked arguments."""
        raise NotImplementedError

    def write_checked(self, index: tuple[Any, ...], values: Tensor) -> None:
        """Does what `write` does with checked arguments."""
        raise NotImplementedError

    @operator("openmsa::dequantize")
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gives all rows as numbers; on a GPU one kernel makes them, except for float64."""
        check_dtype(dtype)
        if self._in_triton() and dtype != torch.float64:
            from openmsa.kv_cache import triton_store

            return triton_store.dequantize(self, dtype)
        return self._numbers((), dtype)

    @operator("openmsa::fill")
    def fill(self, values: Tensor) -> None:
        """Does what ``write((), values)`` does; on a GPU by one kernel."""
        self._check_new(values, self.shape[:-1])
        if self._in_triton():
            from openmsa.kv_cache import triton_store

            triton_store.quantize_into(self, values)
        else:
            self.write_checked((), values.detach())

    def _in_triton(self) -> bool:
        return self.device.type == "cuda" and self.dim() in (3, 4) and has_triton()

    @classmethod
    def allocate(cls, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Stored:
        """Makes zeros of a logical shape."""
        raise NotImplementedError


def part(
    name: str,
    value: Any,
    of: Tensor,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int, ...] | None = None,
    detached: bool = False,
) -> Tensor:
    """Checks the codes `of` themselves or a tensor that belongs to them: dense, a dtype of `dtypes`, their device and, unless
    None, this shape. detached: whether it may require a gradient, as it is only quantised."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if value.is_nested or value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor (torch.strided), got {'nested' if value.is_nested else value.layout}")
    if value is of and not value.dim():
        raise ValueError(f"{name} must have shape [..., dim], got ()")
    if value.device != of.device:
        raise ValueError(f"{name} must be on the device of the codes ({of.device}), got {value.device}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if value.requires_grad and not detached:
        checks.no_gradient(name, value, "none flows to what a format stores")
    return value


def check_shape(value: Any, group: int = 1) -> tuple[int, ...]:
    """Returns the argument ``shape``, which must be a tuple or list of at least one size, the last of whole groups."""
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"shape must be a tuple of ints, got {type(value).__name__}")
    if not value:
        raise ValueError(f"shape must have at least one dimension, got {value}")
    sizes: list[Any] = [
        length if isinstance(length, torch.SymInt) else checks.integer(f"shape[{i}]", length, 0, INT32_MAX)
        for i, length in enumerate(value)
    ]
    if group > 1 and (not sizes[-1] or sizes[-1] % group):
        raise ValueError(f"shape[-1] must be a multiple of {group}, at least {group}, got {sizes[-1]}")
    return tuple(sizes)


def check_dtype(value: Any) -> None:
    """The argument ``dtype`` must be one of floats that PyTorch computes with."""
    if not isinstance(value, torch.dtype) or value not in checks.FLOATS:
        raise TypeError(f"dtype must be {' or '.join(map(str, checks.FLOATS))}, got {value!r}")


def check_quantizable(values: Any, group: int = 1) -> None:
    """`values` must be a float tensor ``[..., dim]`` of whole groups."""
    part("values", values, values, checks.FLOATS, detached=True)
    if values.dim() == 0 or values.shape[-1] % group or not values.shape[-1]:
        multiple = f", dim a multiple of {group}" if group > 1 else ", dim at least 1"
        raise ValueError(f"values must have shape [..., dim]{multiple}, got {tuple(values.shape)}")


def check_index(shape: torch.Size, index: tuple[Any, ...], device: torch.device) -> torch.Size:
    """Returns the shape of ``x[index]`` for an x of this shape, whose dimensions `index` must stay within. Values of indices on
    a GPU are not read."""
    if not index:
        return shape
    for i, value in enumerate(index):
        if not isinstance(value, (int, slice, list, Tensor)) and value is not None:
            raise TypeError(f"index[{i}] must be an int, a slice or a tensor of ints or bools, got {type(value).__name__}")
    try:
        return torch.zeros((), dtype=torch.bool, device=device).expand(shape)[index].shape
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"index must stay within the leading dimensions {tuple(shape)} of the rows: {error}") from error


def in_items(codes: Tensor, dtype: torch.dtype, fits: bool) -> Tensor:
    """Views codes of one byte as items of `dtype` where `fits` and their number and strides allow it; else leaves them."""
    outer = (codes.data_ptr(), codes.shape[-1], *codes.stride()[:-1])
    return codes.view(dtype) if fits and codes.stride(-1) == 1 and all(n % dtype.itemsize == 0 for n in outer) else codes


def divided(x: Tensor, by: float) -> Tensor:
    """Gives x / by, correctly rounded: for a number of Python, PyTorch multiplies by its reciprocal on a GPU."""
    return x / torch.full_like(x, by)


def index_of(shape: tuple[int, ...], index: tuple[Any, ...], device: torch.device) -> Tensor:
    """Gives the numbers, int64, of the rows of ``self[index]`` when the leading dimensions `shape` are counted in C order. This
    costs no memory for rows outside the index."""
    number, stride = torch.zeros((), dtype=torch.int64, device=device), 1
    for d in reversed(range(len(shape))):
        at = torch.arange(shape[d], device=device).view([-1 if i == d else 1 for i in range(len(shape))])
        number = number + at.expand(shape)[index] * stride
        stride *= shape[d]
    return number
