# SPDX-License-Identifier: MIT
"""`MSAConfig` says how a layer selects blocks, in the names of MiniMax-M3's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from openmsa.runtime import checks, named_devices


@dataclass(frozen=True)
class MSAConfig:
    """Describes the index branch of a layer and the blocks that it selects. Defaults are MiniMax-M3's.

    index_n_heads:       heads of index queries: one a KV head, or 1 (one selection shared by all KV heads).
    index_n_key_heads:   heads of index keys, a divisor of index_n_heads; 1 in MiniMax-M3. With one a KV head the index keys can
                         be the layer's own keys, from which a conversion without training starts.
    index_head_dim:      elements of an index vector, a multiple of 16 from 16 to 256.
    index_block_size:    keys a block, 16 to 256.
    index_topk_blocks:   blocks that a query reads, 1 to 64, forced ones included.
    index_init_blocks:   first blocks that are always read.
    index_local_blocks:  last visible blocks that are always read, the query's own among them.
    index_rotary_dim:    leading elements of an index vector that the position embedding turns, even; None: as many as it turns
                         in the layer's own heads, at most index_head_dim. See `openmsa.modules.rotate`.
    index_norm:          whether index queries and keys pass an RMSNorm a head, as in MiniMax-M3.
    index_bias:          whether the index projections add biases.
    index_norm_eps:      the epsilon of these norms.

    Raises ValueError or TypeError, naming the field, the rule and the value.
    """

    index_n_heads: int
    index_n_key_heads: int = 1
    index_head_dim: int = 128
    index_block_size: int = 128
    index_topk_blocks: int = 16
    index_init_blocks: int = 0
    index_local_blocks: int = 1
    index_rotary_dim: int | None = None
    index_norm: bool = True
    index_bias: bool = False
    index_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        checks.integer("index_n_heads", self.index_n_heads, 1)
        checks.integer("index_n_key_heads", self.index_n_key_heads, 1)
        checks.divides("index_n_key_heads", self.index_n_key_heads, "index_n_heads", self.index_n_heads)
        checks.integer("index_head_dim", self.index_head_dim, 1)
        checks.head_dim("index_head_dim", self.index_head_dim)
        checks.integer("index_block_size", self.index_block_size, 16, 256)
        topk = checks.integer("index_topk_blocks", self.index_topk_blocks, 1, 64)
        first = checks.integer("index_init_blocks", self.index_init_blocks, 0)
        last = checks.integer("index_local_blocks", self.index_local_blocks, 0)
        if first + last > topk:
            rule = f"index_init_blocks + index_local_blocks must be at most index_topk_blocks ({topk})"
            raise ValueError(f"{rule}, got {first} + {last}")
        if self.index_rotary_dim is not None:
            check_rotary_dim("index_rotary_dim", self.index_rotary_dim, self.index_head_dim)
        checks.flag("index_norm", self.index_norm)
        checks.flag("index_bias", self.index_bias)
        if checks.scale("index_norm_eps", self.index_norm_eps) < 0:
            raise ValueError(f"index_norm_eps must be at least 0, got {self.index_norm_eps}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as what JSON holds."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MSAConfig:
        """Makes a configuration of what `to_dict` returned; fields that are missing take their defaults."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"an MSAConfig must have no fields but {', '.join(sorted(known))}, got {', '.join(unknown)}")
        if "index_n_heads" not in values:
            raise ValueError(f"index_n_heads must be given, got only {', '.join(sorted(values)) or 'nothing'}")
        return cls(**values)


def check_rotary_dim(name: str, value: int, head_dim: int) -> None:
    """Checks how many elements of a head a position embedding turns: an even number, at most all."""
    checks.integer(name, value, 2, head_dim)
    if value % 2:
        raise ValueError(f"{name} must be even, got {value}")


def made_with(device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
    """Checks where and of what dtype a layer's parameters are made, and returns both as `torch.nn` takes them."""
    if dtype is not None and dtype not in checks.FLOATS:
        raise TypeError(f"dtype must be None or {' or '.join(map(str, checks.FLOATS))}, got {dtype!r}")
    return {"device": None if device is None else named_devices.usable("device", device), "dtype": dtype}
