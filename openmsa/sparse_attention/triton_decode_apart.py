# SPDX-License-Identifier: MIT
# ruff: noqa: RET505 (kernels return from branches on constants)
"""What lets every warp of a decode program walk keys of its own: a leading dimension, one entry a warp.

Warps that share a tile meet in every tile, for the greatest logit of a row and for the weights. A warp that holds all rows and
their sums needs the others only once, at the end. Measured: worth it where a tile has few bytes and many instructions (NVFP4),
no gain for bfloat16, whose bytes take longer than the meetings.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_keys(BN: tl.constexpr, WALKS: tl.constexpr):
    """Places of the keys in a tile [BN], or [WALKS, BN // WALKS]: neighbours go to one warp."""
    if WALKS == 1:
        return tl.arange(0, BN)
    else:
        return (tl.arange(0, WALKS) * (BN // WALKS))[:, None] + tl.arange(0, BN // WALKS)[None, :]


@triton.jit
def key_columns(BN: tl.constexpr, WALKS: tl.constexpr, FOURS: tl.constexpr):
    """Which keys the columns of a product of queries and keys are, as `tile_keys`. Of 16 columns a thread has 2c, 2c + 1 and
    those eight behind. FOURS: where the product with values takes four neighbours of it, as it does beside words of four
    elements, these columns are keys 4c to 4c + 3."""
    o_n = tile_keys(BN, WALKS)
    if FOURS:
        o_n = (o_n & ~14) + (o_n & 6) * 2 + (o_n & 8) // 4
    return o_n


@triton.jit
def in_order(x, FOURS: tl.constexpr):
    """Columns of `key_columns`, [walks, rows, keys], in the order of keys."""
    if FOURS:
        pairs = tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 16, 2, 4, 2])
        x = tl.reshape(tl.permute(pairs, (0, 1, 2, 4, 3, 5)), x.shape)
    return x


@triton.jit
def per_walk(x, WALKS: tl.constexpr):
    """One copy of x, a vector or a matrix, for each walk, in a leading dimension; x itself for one."""
    if WALKS == 1:
        return x
    elif len(x.shape) == 1:
        return tl.broadcast_to(x[None, :], [WALKS, x.shape[0]])
    else:
        return tl.broadcast_to(x[None, :, :], [WALKS, x.shape[0], x.shape[1]])


@triton.jit
def joined(b_acc, b_m, b_z):
    """Sums, greatest logits and sums of weights of several walks, [WALKS, BM, BD] and [WALKS, BM], as those of one."""
    b_top = tl.max(b_m, 0)
    b_w = tl.exp2(b_m - tl.where(b_top == -float("inf"), 0.0, b_top)[None, :])
    b_sum = tl.permute(b_acc * b_w[:, :, None], (1, 2, 0))  # [BM, BD, WALKS]
    for _ in tl.static_range(b_m.shape[0] // 4 + 1):  # 1, 2, 3 of 2, 4, 8 walks
        b_left, b_right = tl.split(tl.reshape(b_sum, [b_sum.shape[0], b_sum.shape[1], b_sum.shape[2] // 2, 2]))
        b_sum = b_left + b_right
    return tl.reshape(b_sum, [b_sum.shape[0], b_sum.shape[1]]), b_top, tl.sum(b_z * b_w, 0)
