# SPDX-License-Identifier: MIT
"""NVFP4 under the public names, over `openmsa.kv_cache.NVFP4`: quantise, dequantise, and the 128x4 layout of scales.

The public quantiser needs another library and rows in multiples of 16; this one needs PyTorch alone, takes any number of rows,
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
QUAD = 4  # tokens whose V scales lie together in vLLM's cache
CODES = (torch.uint8, torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Nvfp4QuantizedTensor:
    """data: uint8 ``[..., dim // 2]``. scale_128x4: uint8 ``[rows rounded up to 128, groups rounded up to 4]``, E4M3 codes.
    global_scale: float32 ``[1]``. logical_scale_shape: (rows, groups). original_shape: ``(..., dim)``."""

    data: Tensor
    scale_128x4: Tensor
    global_scale: Tensor
    logical_scale_shape: tuple[int, int]
    original_shape: tuple[int, ...]


def quantize_bf16_to_nvfp4_128x4(x: Tensor) -> Nvfp4QuantizedTensor:
    """Rows ``[..., dim]`` of any float dtype, dim a multiple of 16. The global scale is the largest finite magnitude / 2688 (1
    for zeros), computed on the device without a host sync."""
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
    """K and V, each with a global scale of its own."""
    _check_rows("k", k)
    _check_rows("v", v)
    if k.shape != v.shape:
        raise ValueError(f"v must have the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    return quantize_bf16_to_nvfp4_128x4(k), quantize_bf16_to_nvfp4_128x4(v)


def dequantize_nvfp4_128x4_to_bf16(qx: Nvfp4QuantizedTensor, *, include_global_scale: bool = True) -> Tensor:
    """The numbers, bfloat16 in the original shape; without the global scale on request."""
    if not isinstance(qx, Nvfp4QuantizedTensor):
        raise TypeError(f"qx must be an Nvfp4QuantizedTensor, got {type(qx).__name__}")
    data = qx.data.reshape(*qx.original_shape[:-1], -1)
    scale = qx.global_scale.reshape(()) if include_global_scale else None
    return NVFP4(data, qx.scale_128x4, scale, "128x4").dequantize(torch.bfloat16)


def nvfp4_global_scale_from_amax(amax: Tensor) -> Tensor:
    """amax / (448 * 6) in float32, of the shape of `amax`; 1 where that is 0, so that zeros can be divided by it."""
    if not isinstance(amax, Tensor):
        raise TypeError(f"amax must be a torch.Tensor, got {type(amax).__name__}")
    return e4m3.unit(amax.to(torch.float32), e4m3.LARGEST * nvfp4.LARGEST)


def nvfp4_scale_128x4_offset(row: int | Tensor, col: int | Tensor, scale_cols: int) -> int | Tensor:
    """Byte of the scale of group `col` of `row` in the 128x4 layout; ints or int64 tensors that broadcast."""
    for name, value in (("row", row), ("col", col)):
        if not isinstance(value, Tensor):
            checks.integer(name, value, 0)
    checks.integer("scale_cols", scale_cols, 1)
    return nvfp4.swizzled_offset(row, col, scale_cols)  # type: ignore[arg-type]


def swizzle_nvfp4_scale_to_128x4(scale: Tensor, *, rows: int, cols: int) -> Tensor:
    """Scales in 128x4 tiles, uint8 ``[rows rounded up to 128, cols rounded up to 4]``, zeros in the padding, from E4M3 codes
    (uint8 or float8_e4m3fn) ``[at least rows, at least cols]`` or any shape with ``rows * cols`` elements."""
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
    high, wide = nvfp4.swizzled_shape(rows, cols)
    padded = torch.nn.functional.pad(codes, (0, wide - cols, 0, high - rows))
    tiles = padded.reshape(high // 128, 4, 32, wide // 4, 4)  # row tile, row // 32, row % 32, column tile, column
    return tiles.permute(0, 3, 2, 1, 4).reshape(high, wide)


def nvfp4_operand(
    name: str,
    data: Tensor,
    scale: Tensor,
    global_scale: Tensor | float | None,
    kv_layout: str,
    pages: Tensor | None = None,
) -> NVFP4:
    """K or V of `sparse_atten_nvfp4_kv_func` as openmsa takes it. pages: of a pool, the physical pages that may be read; any
    shape, repeated and wild ids are harmless; None: all."""
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
    """V's scales in linear order: a copy, of a pool only of `pages` where they are fewer; the others hold anything."""
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
    """Pages ``[num_pages, num_kv_heads, page_size, groups]``."""
    pages, heads, size, groups = scale.shape
    return scale.reshape(pages, heads, size // QUAD, groups, QUAD).transpose(-1, -2).reshape(scale.shape)


def _global_scale(name: str, scale: Tensor | float | None, data: Tensor) -> Tensor | None:
    if scale is None:
        return None
    if not isinstance(scale, Tensor):  # filled on the device: no copy from the host
        return torch.full((), checks.scale(name, scale), dtype=torch.float32, device=data.device)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name} must be one float32 number, got {scale.dtype} {tuple(scale.shape)}")
    checks.alike(name, scale, name[0], data, dtype=False)
    return scale.reshape(())


def _check_rows(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS:
        raise TypeError(f"{name} must be a float tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() < 2 or x.shape[-1] % nvfp4.GROUP or not x.shape[-1]:
        raise ValueError(f"{name} must have shape [..., dim] with dim a multiple of {nvfp4.GROUP}, got {tuple(x.shape)}")
