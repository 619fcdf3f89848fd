# SPDX-License-Identifier: MIT
"""This package offers the names of the public `fmha_sm100` package over `openmsa`, for every device.

Code written for that package runs unchanged: `fmha_sm100_plan` and `fmha_sm100` (dense attention, max scores, attention over
selected pages), `sparse_topk_select`, and what `fmha_sm100.sparse` holds. Names are loaded when first used; importing this
package initialises no GPU and compiles nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "fmha_sm100.api": ("_fmha_sm100", "_fmha_sm100_plan", "fmha_sm100", "fmha_sm100_plan", "sparse_topk_select"),
    "fmha_sm100.sparse": (
        "SparseDecodePagedAttentionWrapper",
        "SparseK2qCsrBuilderSm100",
        "build_k2q_csr",
        "fp4_indexer_block_scores",
        "sparse_atten_func",
        "sparse_atten_nvfp4_kv_func",
        "sparse_decode_atten_func",
    ),
    "fmha_sm100.sparse_fmha_adapter": ("sparse_fmha", "sparse_fmha_plan"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(name for name in _HOME if not name.startswith("_"))


def __getattr__(name: str) -> Any:
    """Loads a public name from its module."""
    if name not in _HOME:
        raise AttributeError(f"module 'fmha_sm100' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names beside those that are loaded."""
    return sorted([*globals(), *_HOME])
