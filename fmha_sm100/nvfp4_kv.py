# SPDX-License-Identifier: MIT
"""Quantises and dequantises K and V in NVFP4 under the public names, over `openmsa.NVFP4`, and reads the layouts in which
callers hold codes and scales, the pages of vLLM's cache among them.

The public quantiser needs another library and rows in multiples of 16. This one needs PyTorch alone, takes any number of rows,
runs on any device, and defines NaN, infinities and zeros (see `openmsa.NVFP4`). Rows are all leading dimensions in C order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa import NVFP4
from openmsa.kv_cache import e4m3, nvfp4
from openmsa.runtime import checks

LAYOUTS = ("legacy", "linear", "vllm")
"""`sparse_atten_nvfp4_kv_func` takes and describes these layouts of scales."""

QUAD = 4
"""In vLLM's cache the V scales of so many neighbouring tokens lie next to each other."""

CODES = (torch.uint8, torch.float8_e4m3fn)
"""E4M3 codes may come in these dtypes."""


@dataclass(frozen=True, eq=False)
class Nvfp4QuantizedTensor:
    """Holds rows in NVFP4 with scales in 128x4 tiles, as the public quantiser returns them."""

    data: Tensor  # uint8 [..., dim // 2], two E2M1 codes a byte
    scale_128x4: Tensor  # uint8 [rows rounded up to 128, groups rounded up to 4], E4M3 codes
    global_scale: Tensor  # float32 [1]
    logical_scale_shape: tuple[int, int]  # (rows, groups)
    original_shape: tuple[int, ...]  # (..., dim)


def quantize_bf16_to_nvfp4_128x4(x: Tensor) -> Nvfp4QuantizedTensor:
    """Quantises rows ``[..., dim]`` of any float dtype, dim a multiple of 16. The global scale is the largest finite magnitude
    divided by 2688 (1 for zeros), computed on the device without a host sync."""
    _check_rows("x", x)
    stored = NVFP4.quantize(x, layout="128x4")
    rows = stored.data.shape[:-1].numel()
    assert stored.global_scale is not None
    return Nvfp4QuantizedTensor(
        stored.data,
        stored.scale.view(torch.uint8),
        stored.global_scale.view(1),
        (rows, stored.groups),
        tuple(x.shape),
    )


def quantize_kv_bf16_to_nvfp4_128x4(k: Tensor, v: Tensor) -> tuple[Nvfp4QuantizedTensor, Nvfp4QuantizedTensor]:
    """Quantises K and V, tensors of one shape, each with a global scale of its own."""
    _check_rows("k", k)
    _check_rows("v", v)
    if k.shape != v.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    return quantize_bf16_to_nvfp4_128x4(k), quantize_bf16_to_nvfp4_128x4(v)


def dequantize_nvfp4_128x4_to_bf16(qx: Nvfp4QuantizedTensor, *, include_global_scale: bool = True) -> Tensor:
    """Returns the numbers in bfloat16 and the original shape, multiplied by the global scale unless that is declined."""
    if not isinstance(qx, Nvfp4QuantizedTensor):
        raise TypeError(f"qx must be an Nvfp4QuantizedTensor, got {type(qx).__name__}")
    data = qx.data.reshape(*qx.original_shape[:-1], -1)
    scale = qx.global_scale.reshape(()) if include_global_scale else None
    return NVFP4(data, qx.scale_128x4, scale, "128x4").dequantize(torch.bfloat16)


def nvfp4_global_scale_from_amax(amax: Tensor) -> Tensor:
    """Returns amax / (448 * 6) in float32, the shape of `amax`; 1 where that is 0, so that zeros can be divided by it."""
    if not isinstance(amax, Tensor):
        raise TypeError(f"amax must be a torch.Tensor, got {type(amax).__name__}")
    return e4m3.unit(amax.to(torch.float32), e4m3.LARGEST * nvfp4.LARGEST)


def nvfp4_scale_128x4_offset(row: int | Tensor, col: int | Tensor, scale_cols: int) -> int | Tensor:
    """Returns which byte holds the scale of group `col` of `row` in the 128x4 layout; takes ints or int64 tensors that
    broadcast."""
    for name, value in (("row", row), ("col", col)):
        if not isinstance(value, Tensor):
            checks.integer(name, value, 0)
    checks.integer("scale_cols", scale_cols, 1)
    return nvfp4.swizzled_offset(row, col, scale_cols)  # type: ignore[arg-type]


def swizzle_nvfp4_scale_to_128x4(scale: Tensor, *, rows: int, cols: int) -> Tensor:
    """Lays scales out in 128x4 tiles: ``[rows rounded up to 128, cols rounded up to 4]`` in its dtype, zeros in the padding.
    `scale` holds E4M3 codes, uint8 or float8_e4m3fn, ``[at least rows, at least cols]``, or ``rows * cols`` in any shape."""
    checks.integer("rows", rows, 0)
    checks.integer("cols", cols, 1)
    if not isinstance(scale, Tensor) or scale.dtype not in CODES:
        raise TypeError(f"scale must be uint8 or float8_e4m3fn, got {getattr(scale, 'dtype', type(scale).__name__)}")
    codes = scale.view(torch.uint8)
    if scale.dim() == 2 and scale.shape[0] >= rows and scale.shape[1] >= cols:
        codes = codes[:rows, :cols]
    elif codes.numel() == rows * cols:
        codes = codes.reshape(rows, cols)
    else:
        raise ValueError(f"scale must have at least {(rows, cols)} codes, got {tuple(scale.shape)}")
    return to_tiles(codes[None]).reshape(nvfp4.swizzled_shape(rows, cols)).view(scale.dtype)


def to_tiles(scale: Tensor) -> Tensor:
    """Lays the scales uint8 ``[matrices, rows, groups]`` out in 128x4 tiles, zeros in the padding: ``[matrices, row // 128,
    group // 4, row % 32, row % 128 // 32, group % 4]``."""
    matrices, rows, groups = scale.shape
    tiles, columns = -(-rows // 128), -(-groups // 4)
    padded = torch.nn.functional.pad(scale, (0, columns * 4 - groups, 0, tiles * 128 - rows))
    return padded.reshape(matrices, tiles, 4, 32, columns, 4).permute(0, 1, 4, 3, 2, 5).contiguous()


def nvfp4_operand(
    name: str,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | float | None,
    kv_layout: str,
    pages: Tensor | None = None,
) -> NVFP4:
    """Returns K or V of `sparse_atten_nvfp4_kv_func` in the format of `openmsa`. `pages`, of any shape, holds the physical
    pages of a pool that may be read; repeated and wild ids do no harm there, and None allows all."""
    if kv_layout not in LAYOUTS:
        raise ValueError(f"kv_layout must be one of {', '.join(LAYOUTS)}, got {kv_layout!r}")
    argument = f"{name}_scale_128x4"
    groups = data.shape[-1] * 2 // nvfp4.GROUP
    shape = "[rows, groups]" if kv_layout == "legacy" else "[total_k, num_kv_heads, groups]"
    if kv_layout != "legacy" and data.dim() == 4:
        shape = "[num_pages, num_kv_heads, page_size, groups]"
    checks.tensor(argument, scale, shape, CODES)
    checks.alike(argument, scale, name, data, dtype=False)
    if data.shape[-1] % (nvfp4.GROUP // 2):
        raise ValueError(f"{name}.shape[-1] must be a multiple of {nvfp4.GROUP // 2} bytes, got {data.shape[-1]}")
    whole = _global_scale(f"{name}_global_scale", global_scale, data)
    if kv_layout == "legacy":
        rows, cols = nvfp4.swizzled_shape(data.shape[:-1].numel(), groups)
        if scale.shape[0] < rows or scale.shape[1] != cols:
            raise ValueError(f"{argument} must have shape {(rows, cols)} or more rows, got {tuple(scale.shape)}")
        return NVFP4(data, scale.contiguous(), whole, "128x4")
    if tuple(scale.shape) != (*data.shape[:-1], groups):
        raise ValueError(f"{argument} must have shape {(*data.shape[:-1], groups)}, got {tuple(scale.shape)}")
    if kv_layout == "vllm" and name == "v":
        scale = _without_quads(argument, scale.view(torch.uint8), pages)
    return NVFP4(data, scale, whole)


def _without_quads(name: str, scale: Tensor, pages: Tensor | None) -> Tensor:
    """Returns a copy of V's scales in linear order. Of a pool only the scales of `pages` are copied where they are fewer; those
    of the other pages hold anything."""
    tokens = scale.shape[-2] if scale.dim() == 4 else scale.shape[0]
    if tokens % QUAD:
        raise ValueError(f"{name} must cover tokens in multiples of {QUAD} with kv_layout='vllm', got {tokens}")
    if scale.dim() == 3:
        total, heads, groups = scale.shape
        return scale.reshape(total // QUAD, heads, groups, QUAD).permute(0, 3, 1, 2).reshape(scale.shape)
    if pages is None or pages.numel() >= scale.shape[0]:
        return _linear(scale)
    used = pages.flatten().long().clamp(0, scale.shape[0] - 1)
    return torch.empty(scale.shape, dtype=scale.dtype, device=scale.device).index_copy_(0, used, _linear(scale[used]))


def _linear(scale: Tensor) -> Tensor:
    """Returns the scales of pages ``[num_pages, num_kv_heads, page_size, groups]`` in linear order."""
    pages, heads, size, groups = scale.shape
    return scale.reshape(pages, heads, size // QUAD, groups, QUAD).transpose(-1, -2).reshape(scale.shape)


def _global_scale(name: str, scale: Tensor | float | None, data: Tensor) -> Tensor | None:
    """Returns a global scale as a float32 tensor of no dimensions on the device of `data`; None stands for 1."""
    if scale is None:
        return None
    if not isinstance(scale, Tensor):  # a number is filled in on the device, without a copy from the host
        return torch.full((), checks.scale(name, scale), dtype=torch.float32, device=data.device)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name} must be one float32 number, got {scale.dtype} {tuple(scale.shape)}")
    checks.alike(name, scale, name[0], data, dtype=False)
    return scale.reshape(())


def _check_rows(name: str, x: Tensor) -> None:
    """Checks that `x` is a float tensor whose last dimension is a multiple of a group of 16."""
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS:
        raise TypeError(f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2 or x.shape[-1] % nvfp4.GROUP or not x.shape[-1]:
        raise ValueError(f"{name} must have shape [..., dim] with dim a multiple of {nvfp4.GROUP}, got {tuple(x.shape)}")


def nvfp4_head_slot_views(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns views of the codes and scales in a cache uint8 ``[num_pages, 2 * num_kv_heads, page_size, dim // 2 + dim // 16]``
    as vLLM lays it out.

    k, v: the slots ``cache[:, 0::2]`` and ``cache[:, 1::2]``, each ``[num_pages, num_kv_heads, page_size, dim // 2 + dim //
    16]``: a head's codes of all tokens of the page, then its scales. The views are, in this order: K's codes ``[num_pages,
    num_kv_heads, page_size, dim // 2]``, K's scales ``[..., dim // 16]``, V's codes, V's scales.

    For pages of 128 and dim 128 this is what the public function does. Beyond it, this one takes other page sizes and dims and
    any strides of pages and heads (a slot itself must be contiguous), however K and V slots lie to each other.
    """
    for name, slots in (("k", k), ("v", v)):
        if not isinstance(slots, Tensor) or slots.dtype != torch.uint8:
            raise TypeError(f"{name} must be uint8 slots, got {getattr(slots, 'dtype', type(slots).__name__)}")
        if slots.dim() != 4 or slots.shape[3] % 9 or not slots.shape[3]:
            raise ValueError(
                f"{name} must have shape [num_pages, num_kv_heads, page_size, 9 * dim // 16], got {tuple(slots.shape)}"
            )
        if slots.shape != k.shape:
            raise ValueError(f"{name} must have the shape of k {tuple(k.shape)}, got {tuple(slots.shape)}")
        if slots.stride(3) != 1 or slots.stride(2) != slots.shape[3]:
            raise ValueError(f"{name} must have contiguous slots (strides {slots.shape[3]}, 1), got {slots.stride()[2:]}")
    return (*_split(k), *_split(v))


def _split(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Returns views of the codes and of the scales in the slots of K or V."""
    pages, heads, size, width = slots.shape
    scales = width // 9
    codes = slots.as_strided((pages, heads, size, 8 * scales), (*slots.stride()[:2], 8 * scales, 1))
    start = slots.storage_offset() + size * 8 * scales
    return codes, slots.as_strided((pages, heads, size, scales), (*slots.stride()[:2], scales, 1), start)
