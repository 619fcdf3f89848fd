# SPDX-License-Identifier: MIT
"""This module passes on the attention functions of `fmha_sm100.sparse`, under the public package's name."""

from __future__ import annotations

from fmha_sm100.sparse import (
    SparseDecodePagedAttentionWrapper,
    sparse_atten_func,
    sparse_atten_nvfp4_kv_func,
    sparse_decode_atten_func,
)

__all__ = [
    "SparseDecodePagedAttentionWrapper",
    "sparse_atten_func",
    "sparse_atten_nvfp4_kv_func",
    "sparse_decode_atten_func",
]
