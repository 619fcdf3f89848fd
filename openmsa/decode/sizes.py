# SPDX-License-Identifier: MIT
"""The sizes of a `DecodePlan` are checked here, and become what its kernels take."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from openmsa.runtime import checks
from openmsa.types import INT32_MAX

if TYPE_CHECKING:
    from openmsa.decode.plan import DecodePlan

MAX_NEW_TOKENS = 16
MAX_INDEX_ROWS = 64  # The scoring kernel takes the new tokens x index heads of one index key head as one tile.


def check_sizes(plan: DecodePlan, index_heads: int, kernels_on: torch.device | None) -> None:
    """Checks the numbers and the dtype of a plan. kernels_on: the device, where Triton's kernels run the plan."""
    counts = ("max_batch", "num_q_heads", "num_kv_heads", "page_size", "max_pages", "index_key_heads")
    bounds = (*((name, 1, INT32_MAX) for name in counts), ("init_blocks", 0, None), ("local_blocks", 0, None))
    ranges = (("head_dim", 16, 256), ("index_dim", 16, 256), ("topk", 1, 64), ("block_size", 16, 256))
    for name, low, high in (*bounds, *ranges, ("new_tokens", 1, MAX_NEW_TOKENS)):
        checks.integer(name, getattr(plan, name), low, high)
    checks.divides("num_kv_heads", plan.num_kv_heads, "num_q_heads", plan.num_q_heads)
    checks.head_dim("head_dim", plan.head_dim)
    checks.head_dim("index_dim", plan.index_dim)
    checks.flag("certified_keys", plan.certified_keys)
    if plan.init_blocks + plan.local_blocks > plan.topk:
        raise ValueError(
            f"init_blocks + local_blocks must be at most topk ({plan.topk}), got {plan.init_blocks} + {plan.local_blocks}"
        )
    if checks.integer("index_heads", index_heads, 1) not in (1, plan.num_kv_heads):
        raise ValueError(f"index_heads must be num_kv_heads ({plan.num_kv_heads}) or 1, got {index_heads}")
    checks.divides("index_key_heads", plan.index_key_heads, "index_heads", index_heads)
    if plan.dtype not in checks.FLOATS:
        raise TypeError(f"dtype must be {' or '.join(map(str, checks.FLOATS))}, got {plan.dtype}")
    if kernels_on is None:
        return
    if plan.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"dtype must be float16 or bfloat16 on {kernels_on}, got {plan.dtype}")
    rows = plan.new_tokens * index_heads // plan.index_key_heads
    if rows > MAX_INDEX_ROWS:
        raise NotImplementedError(
            f"new_tokens * index_heads / index_key_heads must be at most {MAX_INDEX_ROWS} on {kernels_on}, got {rows}"
        )


class Sizes(NamedTuple):
    """Holds the sizes of a plan's layer, in the terms of `DecodePlan`; num_blocks is the most blocks of a sequence."""

    new_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_heads: int
    index_key_heads: int
    index_dim: int
    page_size: int
    num_blocks: int
    topk: int
    init_blocks: int
    local_blocks: int
    block_size: int

    @classmethod
    def of(cls, plan: DecodePlan, index_heads: int) -> Sizes:
        """Takes the sizes from a plan, and the number of its index heads."""
        return cls(
            new_tokens=plan.new_tokens,
            num_q_heads=plan.num_q_heads,
            num_kv_heads=plan.num_kv_heads,
            head_dim=plan.head_dim,
            index_heads=index_heads,
            index_key_heads=plan.index_key_heads,
            index_dim=plan.index_dim,
            page_size=plan.page_size,
            num_blocks=-(-plan.max_pages * plan.page_size // plan.block_size),
            topk=plan.topk,
            init_blocks=plan.init_blocks,
            local_blocks=plan.local_blocks,
            block_size=plan.block_size,
        )
