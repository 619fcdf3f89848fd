# SPDX-License-Identifier: MIT
"""This module passes on the FP4 indexer of `fmha_sm100.sparse`, under the public package's name."""

from __future__ import annotations

from fmha_sm100.sparse import (
    fp4_indexer_block_scores,
    fp4_indexer_mma_scale_shape,
    fp4_indexer_mma_scale_storage_shape,
    fp4_indexer_mma_scale_storage_stride,
    fp4_indexer_mma_scale_stride,
    fp4_indexer_reorder_scales_for_mma_cute,
)

__all__ = [
    "fp4_indexer_block_scores",
    "fp4_indexer_mma_scale_shape",
    "fp4_indexer_mma_scale_storage_shape",
    "fp4_indexer_mma_scale_storage_stride",
    "fp4_indexer_mma_scale_stride",
    "fp4_indexer_reorder_scales_for_mma_cute",
]
