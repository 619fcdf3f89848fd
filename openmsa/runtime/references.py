# SPDX-License-Identifier: MIT
"""The reference of a stage serves what has values to read, and on a GPU only who asks for it."""

from __future__ import annotations

from typing import Any


def unless_values(tensor: Any) -> str | None:
    """Refuses a tensor on the meta device for a reference, which serves every other device."""
    return "tensors on the meta device hold no values, not even for impl='reference'" if tensor.device.type == "meta" else None


def on_gpu_by_name_only(tensor: Any) -> str | None:
    """Refuses a reference on a GPU, where a slow path must never be taken unnoticed."""
    if tensor.device.type == "cpu":
        return None
    return "on a GPU the reference runs only when asked for by name: impl='reference'"
