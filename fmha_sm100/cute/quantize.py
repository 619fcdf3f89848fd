# SPDX-License-Identifier: MIT
"""This module passes on the NVFP4 helpers of `fmha_sm100.sparse`, under the public package's name."""

from __future__ import annotations

from fmha_sm100.sparse import (
    Nvfp4QuantizedTensor,
    dequantize_nvfp4_128x4_to_bf16,
    nvfp4_global_scale_from_amax,
    nvfp4_scale_128x4_offset,
    quantize_bf16_to_nvfp4_128x4,
    quantize_kv_bf16_to_nvfp4_128x4,
    swizzle_nvfp4_scale_to_128x4,
)

__all__ = [
    "Nvfp4QuantizedTensor",
    "dequantize_nvfp4_128x4_to_bf16",
    "nvfp4_global_scale_from_amax",
    "nvfp4_scale_128x4_offset",
    "quantize_bf16_to_nvfp4_128x4",
    "quantize_kv_bf16_to_nvfp4_128x4",
    "swizzle_nvfp4_scale_to_128x4",
]
