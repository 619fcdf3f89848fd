# SPDX-License-Identifier: MIT
"""This module gives the FP4 indexer of `fmha_sm100.sparse` by its public place."""

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
