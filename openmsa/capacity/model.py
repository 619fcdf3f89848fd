# SPDX-License-Identifier: MIT
"""`Model` holds what caches and steps depend on of a model; `Request` says what is to be served."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openmsa.runtime import checks
from openmsa.runtime.files import check_ends
from openmsa.types import INT32_MAX

KV_TENSORS = {"bf16": (2.0,), "e4m3": (1.0,), "nvfp4": (1 / 2, 1 / 16)}
"""Bytes an element of keys and values in each tensor that holds them, elements or codes first, by format."""
KV_ROW_BYTES = {name: sum(tensors) for name, tensors in KV_TENSORS.items()}
"""Bytes an element of keys and values, scales included, by format."""
INDEX_ROW_BYTES = {"bf16": 2.0, "e4m3": 1.0, "int8": 1.0, "nvfp4": 9 / 16, "mxfp4": 17 / 32, "certified": 3.0}
"""Bytes an element of index keys, without the `KEY_BYTES` of each key."""
KEY_BYTES = {"int8": 4, "certified": 4}
"""The scale and the error of an int8 key take so many bytes."""
OPEN_SHARE = 0.12
"""Of certified keys so many blocks are read exactly as well: 10 to 13 of 112 on real activations (docs/log/selection.md)."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """Holds sizes of a model's attention, in the terms of `openmsa.DecodePlan`.

    sparse_layers:  layers with an index branch. dense_layers: layers that read all keys.
    """

    name: str
    sparse_layers: int
    dense_layers: int = 0
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    index_key_heads: int = 1
    index_dim: int = 128
    block_size: int = 128
    topk: int = 16

    def __post_init__(self) -> None:
        for name in ("sparse_layers", "num_q_heads", "num_kv_heads", "index_key_heads"):
            checks.integer(name, getattr(self, name), 1, INT32_MAX)
        checks.integer("dense_layers", self.dense_layers, 0, INT32_MAX)
        checks.divides("num_kv_heads", self.num_kv_heads, "num_q_heads", self.num_q_heads)
        for name, low, high in (("head_dim", 16, 256), ("index_dim", 16, 256), ("block_size", 16, 256), ("topk", 1, 64)):
            checks.integer(name, getattr(self, name), low, high)
        for name in ("head_dim", "index_dim"):
            checks.head_dim(name, getattr(self, name))

    @classmethod
    def from_config(cls, path: Path) -> Model:
        """Reads the config.json, or the folder that holds it, of a MiniMax-M3 checkpoint, of one with its names, or of a model
        that `openmsa convert` wrote. Raises ValueError for what it lacks, and TypeError for what is no whole number."""
        path = path / "config.json" if os.path.isdir(path) else path  # Path.is_dir raises where a name is too long.
        check_ends("model", path)
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"model must be a preset or a JSON config file, got {str(path)!r}: {error}") from None
        config = _part(path, {"config": config}, "config")
        config = _part(path, config, "text_config") or config
        sparse, converted = _part(path, config, "sparse_attention_config"), _part(path, config, "msa")
        config = {**config, **converted}

        def size(name: str, other: str = "") -> int:
            found, known = config.get(name), name
            if found is None and other:
                found, known = sparse.get(other), f"{name} or sparse_attention_config.{other}"
            if found is None:
                raise ValueError(f"{path} must have {known}")
            return checks.integer(f"{known} of {path}", found, 1, INT32_MAX)

        if converted:
            if config.get("dense_layers") is None:
                raise ValueError(f"{path} must have dense_layers")
            layers, dense = size("num_hidden_layers"), _list(path, config, "dense_layers")
            for number in dense:
                checks.integer(f"dense_layers of {path}", number, 0, layers - 1)
            count = layers - len(set(dense))
        else:
            kinds = _list(path, config, "layer_types") or _list(path, sparse, "sparse_attention_freq")
            layers, count = len(kinds), sum(kind not in (0, "full_attention") for kind in kinds)
        if not count:
            raise ValueError(
                f"{path} must say which layers are sparse, by layer_types or sparse_attention_freq, or be of a model that "
                "openmsa convert wrote"
            )
        heads = size("num_attention_heads")
        sizes = {
            "num_q_heads": heads,
            "num_kv_heads": size("num_key_value_heads"),
            "head_dim": size("hidden_size") // heads if config.get("head_dim") is None else size("head_dim"),
            "index_dim": size("index_head_dim", "sparse_index_dim"),
            "block_size": size("index_block_size", "sparse_block_size"),
            "topk": size("index_topk_blocks", "sparse_topk_blocks"),
            "index_key_heads": 1 if config.get("index_n_key_heads") is None else size("index_n_key_heads"),
        }
        try:
            return cls(name=str(config.get("model_type", path.name)), sparse_layers=count, dense_layers=layers - count, **sizes)
        except ValueError as error:
            raise ValueError(f"{path} must hold sizes that MSA takes: {error}") from None


def _part(path: Path, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a part of a config, empty where it is missing."""
    part = config.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} of {path} must be an object of names and values, got {type(part).__name__}")
    return part


def _list(path: Path, config: dict[str, Any], name: str) -> list[Any]:
    """Returns a list of a config, empty where it is missing."""
    found = config.get(name) or []
    if not isinstance(found, list) or not all(isinstance(x, int | str) for x in found):
        raise ValueError(f"{name} of {path} must be a list of numbers or names, got {str(found)[:40]}")
    return found


PRESETS = {
    "minimax-m3": Model(name="MiniMax-M3", sparse_layers=57, dense_layers=3, num_q_heads=64, num_kv_heads=4, head_dim=128),
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Says what is to be served.

    context, batch:  keys of a sequence, and sequences at a time. new_tokens: of a sequence in a step.
    kv, index:       formats of keys and values, and of index keys.
    cache:           share of the keys that the block cache of a `HostKV` holds.
    hits:            share of the chosen blocks that a step finds there.
    """

    context: int
    batch: int = 1
    new_tokens: int = 1
    kv: str = "bf16"
    index: str = "bf16"
    cache: float = 0.1
    hits: float = 0.95

    def __post_init__(self) -> None:
        checks.integer("context", self.context, 1, INT32_MAX)
        checks.integer("batch", self.batch, 1, INT32_MAX)
        checks.integer("new_tokens", self.new_tokens, 1, 16)
        for name, formats in (("kv", KV_ROW_BYTES), ("index", INDEX_ROW_BYTES)):
            if getattr(self, name) not in formats:
                raise ValueError(f"{name} must be one of {', '.join(formats)}, got {getattr(self, name)!r}")
        for name in ("cache", "hits"):
            if not 0 <= checks.scale(name, getattr(self, name)) <= 1:
                raise ValueError(f"{name} must lie from 0 to 1, got {getattr(self, name)}")

    def kv_row(self, model: Model) -> float:
        """Returns the bytes of a token's keys and values of one layer."""
        return 2 * model.num_kv_heads * model.head_dim * KV_ROW_BYTES[self.kv]

    def index_row(self, model: Model) -> float:
        """Returns the bytes of a token's index keys of one layer."""
        return model.index_key_heads * (model.index_dim * INDEX_ROW_BYTES[self.index] + KEY_BYTES.get(self.index, 0))

    def index_read(self, model: Model) -> float:
        """Returns how many of these a step reads."""
        if self.index != "certified":
            return self.index_row(model)
        return model.index_key_heads * (model.index_dim * (1 + 2 * OPEN_SHARE) + KEY_BYTES["certified"])
