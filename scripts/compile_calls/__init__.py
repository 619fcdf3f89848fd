# SPDX-License-Identifier: MIT
"""This folder holds the calls whose kernels `compile_check` compiles, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .kinds import (
    LONG,
    Append,
    ByKeys,
    Dense,
    DenseBackward,
    DropIn,
    Exchange,
    HostPlan,
    IndexLoss,
    NewTokens,
    Plan,
    Scores,
    Select,
    Sparse,
    SparseBackward,
    TopK,
    TopKDropIn,
)

FORMATS = ("e4m3", "e4m3 page", "int8", "nvfp4", "nvfp4 128x4", "mxfp4")
FEW = {"queries": 16, "keys": LONG, "impl": "triton_prefill"}
HEADS = {1: (4, 4), 3: (12, 4), 4: (16, 4), 8: (32, 4), 16: (64, 4), 32: (128, 4), 64: (256, 4), 100: (400, 4)}
PREFILL = (  # dtype, head_dim, heads to a key head, block, page
    ("bf16", 128, 16, 128, 0),
    ("bf16", 128, 16, 128, 128),
    ("fp16", 128, 16, 128, 0),
    ("bf16", 128, 16, 128, 16),
    *(("bf16", dim, 16, 128, 0) for dim in (64, 96, 192, 256)),
    *(("bf16", 128, group, 128, 0) for group in (1, 3, 4, 8)),
    *(("bf16", 64, 3, block, 0) for block in (16, 48, 64, 256)),
)
CALLS: tuple[Any, ...] = (
    # These make scores alone, with a fill of what no query sees.
    Scores("bf16", "bf16", 4096),
    Scores("bf16", "bf16", 4096, keys=1 << 20),  # The L2 cache does not hold so many.
    Scores("bf16", "bf16", 16),
    Scores("bf16", "bf16", 4096, dim=80, block=48),
    Scores("fp16", "nvfp4", 1, block=256),
    Scores("fp16", "int8 odd", 256, dim=64, block=64),
    # These make scores and top-k.
    Select("bf16", "bf16", 4096, page=128),
    Select("fp16", "fp16 odd", 4096),
    Select("bf16", "bf16", 4096, page=16),
    Select("bf16", "bf16", 4096, dim=64, block=64, page=128),
    Select("fp16", "fp16", 4096, dim=256, block=256),
    Select("e4m3 tensor", "e4m3 head", 4096, page=128),
    Select("e4m3 tensor", "e4m3 page", 4096, page=16),
    Select("e4m3 tensor", "e4m3", 4096, dim=16, block=16, page=128, keys=16384),
    Scores("e4m3 tensor", "e4m3", 4096),
    Select("e4m3 tensor", "e4m3", 4096),
    *(Select("bf16", kind, 256, page=128) for kind in FORMATS),
    Select("bf16", "nvfp4", 256, dim=80, block=48, page=16),
    Select("fp16", "mxfp4", 1),
    # In these one kernel makes both.
    Select("bf16", "bf16", 16384),
    Select("bf16", "bf16", 16384, page=128),
    Select("fp16", "fp16", 16384, page=16, init=1),
    Select("fp16", "fp16 odd", 16384, local=0),
    Select("bf16", "bf16", 16384, dim=64, block=64),
    Select("bf16", "bf16", 16384, dim=256, block=256),
    *(Select("bf16", kind, 16384, page=128) for kind in FORMATS if kind != "e4m3 page"),
    Select("e4m3 tensor", "e4m3", 16, keys=2 * 128 * 16384),
    Select("e4m3 tensor", "e4m3 page", 16, keys=2 * 128 * 16384, page=128),
    # These have certified keys.
    Select("bf16", "certified", 4, batch=2, keys=8192, topk=8, page=128),
    Select("fp16", "certified fp16", 2, batch=2),
    Select("bf16", "certified", 4, batch=2),
    Select("bf16", "certified", 4, batch=66, keys=8192 * 32, block=32, page=128),
    # These take the top-k of given scores.
    TopK(16384, 1024, 16),
    TopK(8192, 8192, 16),
    TopK(1, 16384, 64),
    # These have few queries a sequence.
    *(Sparse("bf16", "bf16", 1, batch=batch, page=128) for batch in (1, 32)),
    Sparse("fp16", "fp16", 1, batch=32),
    # These have many queries a sequence, which go to union tiles and KV-outer; then few.
    *(Sparse(q, q, 4096, dim=dim, heads=HEADS[g], block=block, page=page) for q, dim, g, block, page in PREFILL),
    *(Sparse(q, q, **FEW, dim=dim, heads=HEADS[g], block=block, page=page) for q, dim, g, block, page in PREFILL),
    *(Sparse("bf16", "e4m3 tensor", queries, page=page) for queries in (4096, 512) for page in (0, 128)),
    *(Sparse("fp16", "e4m3", queries, scale=-0.1) for queries in (4096, 512)),
    Sparse("fp16", "e4m3 tensor", 512),
    Sparse("bf16", "e4m3 tensor", 512, dim=64, heads=HEADS[3], block=64, page=16),
    Sparse("bf16", "e4m3 tensor", 512, dim=256),
    *(Sparse("e4m3 tensor", "e4m3 tensor", 4096, page=page) for page in (0, 128)),
    Sparse("e4m3 tensor", "e4m3 tensor", 4096, dim=64, heads=HEADS[4], block=64),
    Sparse("e4m3 tensor", "e4m3 tensor", 4096, dim=16, heads=HEADS[4], block=64, page=64),
    Sparse("bf16", "e4m3 page", 512, page=128),
    Sparse("bf16", "e4m3 page", 512, dim=64, heads=HEADS[4], block=64, page=16),
    Sparse("bf16", "nvfp4", 512),
    Sparse("bf16", "nvfp4", 4096, page=128),
    Sparse("bf16", "nvfp4 128x4", 4096),
    Sparse("e4m3 tensor", "nvfp4 128x4", 512, page=128),
    # These compute gradients of sparse attention.
    SparseBackward("bf16"),
    SparseBackward("fp16"),
    SparseBackward("fp32"),
    SparseBackward("bf16", tuned=False),
    SparseBackward("bf16", selection_heads=1),
    *(SparseBackward("bf16", dim=dim) for dim in (64, 96, 256)),
    *(SparseBackward("bf16", heads=HEADS[group]) for group in (1, 3, 8)),
    SparseBackward("bf16", dim=64, heads=HEADS[3], block=48, selection_heads=1),
    SparseBackward("bf16", dim=64, heads=HEADS[4], block=256),
    SparseBackward("fp32", dim=256, heads=HEADS[1], block=16),
    # These run dense attention.
    Dense("bf16", "bf16", 16384),
    Dense("bf16", "bf16", 16384, page=128, results="ol"),
    Dense("bf16", "bf16", 4096, keys=8192, results="olm"),
    Dense("bf16", "bf16", 4096, keys=8192, results="m"),
    Dense("bf16", "bf16", 288),  # It leaves too many of Hopper's multiprocessors idle for the kernel of its own.
    Dense("bf16", "bf16", 288, page=128, results="ol"),
    Dense("bf16", "bf16", 600, keys=8192, results="olm"),
    Dense("fp16", "fp16", 4096, keys=8192, page=256, heads=HEADS[8], results="olm"),
    Dense("fp16", "fp16", 64, page=128, results="ol"),
    Dense("bf16", "bf16", 1, batch=32, keys=32768, page=128, results="ol"),
    Dense("bf16", "bf16", 1, batch=32, keys=32768, page=16),
    Dense("bf16", "bf16", 1, batch=8, keys=32768, page=64, block=16, results="om"),
    Dense("fp16", "fp16", 8192, keys=8192, heads=HEADS[3], dim=64, results="ol"),
    Dense("bf16", "bf16", 8192, keys=8192, heads=HEADS[1], dim=96, results="ol"),
    Dense("bf16", "bf16", 4096, keys=8192, heads=HEADS[8], dim=256, block=48, results="om"),
    Dense("bf16", "bf16", 1, batch=8, keys=32768, heads=HEADS[8], dim=256, page=64),
    Dense("e4m3 tensor", "e4m3 tensor", 16384),
    Dense("e4m3 tensor", "e4m3 tensor", 4096, keys=8192, results="olm"),
    Dense("bf16", "e4m3 tensor", 16384),
    Dense("bf16", "e4m3 page", 16384, page=128, results="ol"),
    Dense("bf16", "nvfp4", 16384),
    Dense("bf16", "nvfp4", 16384, heads=HEADS[3], dim=96, page=128),
    Dense("bf16", "e4m3 tensor", 8192, keys=8192, heads=HEADS[8], dim=256),
    Dense("e4m3 tensor", "bf16", 8192, keys=8192),
    Dense("e4m3 tensor", "e4m3 tensor", 1, batch=32, keys=32768, page=128, results="ol"),
    Dense("bf16", "e4m3 tensor", 1, batch=32, keys=32768, page=128, results="ol"),
    Dense("bf16", "e4m3 page", 1, batch=32, keys=32768, page=16),
    Dense("bf16", "nvfp4", 1, batch=32, keys=32768, page=128, results="ol"),
    Dense("fp16", "nvfp4 128x4", 1, batch=32, keys=32768, page=16),
    # These compute gradients of dense attention.
    *(DenseBackward(kind) for kind in ("bf16", "fp16", "fp32")),
    DenseBackward("bf16", causal=False),
    DenseBackward("bf16", dim=64, heads=HEADS[3]),
    DenseBackward("bf16", dim=96, heads=HEADS[1]),
    DenseBackward("bf16", dim=256, heads=HEADS[8]),
    # These compute the index loss.
    IndexLoss("bf16"),
    IndexLoss("bf16", visible=True, lse=False),
    IndexLoss("fp16", "fp16", return_loss=False),
    IndexLoss("fp32", "fp32", lse=False),
    IndexLoss("bf16", "fp32", gradients=False),
    IndexLoss("bf16", heads=(32, 4), index_heads=1, selection_heads=1),
    IndexLoss("bf16", dim=64, heads=HEADS[3], index_dim=64, block=48, key_heads=4, selection_heads=1),
    IndexLoss("bf16", dim=256, heads=HEADS[1], index_dim=96, block=256, lse=False),
    IndexLoss("bf16", dim=96, index_dim=256, block=16),
    # These are decode steps of one launch.
    Plan(1, 32768),
    Plan(4, 8192, *("fp16",) * 4),
    Plan(1, 32768, new=2, init=1),
    Plan(1, 25600, *("fp16",) * 4, heads=(12, 2), index_heads=1, dim=64, index_dim=64, block=256, page=256, topk=8),
    Plan(1, LONG),
    *(Plan(batch, LONG, heads=(16, 1)) for batch in (1, 4)),
    Plan(8, LONG, heads=(16, 1), strided=8),
    Plan(1, 25600, *("fp16",) * 4, heads=(12, 2), init=1, dim=64, index_dim=64, block=64, topk=8),
    # These are decode steps of two launches.
    *(Plan(batch, LONG, heads=(16, 1)) for batch in (8, 32, 40)),
    *(Plan(batch, LONG, heads=(16, 1), topk=1) for batch in (8, 40)),
    Plan(128, LONG, heads=HEADS[8]),
    *(Plan(64, 2 * LONG, kind, kind, kind, kind, heads=HEADS[8]) for kind in ("bf16", "fp16")),
    Plan(32, 8192, *("fp16",) * 4, heads=(12, 2), index_heads=1, dim=64, index_dim=64, block=64, page=32, init=1),
    # These are decode steps of several launches: plain keys, certified ones (the first in two parts), formats.
    Plan(32, 32768),
    Plan(128, 32768),
    Plan(32, 32768, page=16),
    Plan(8, 32768, dim=192, heads=HEADS[8], block=64, page=64),
    Plan(32, 32768, dim=256, heads=HEADS[64], block=256, page=256),
    Plan(16, 8192, new=2, heads=HEADS[8], dim=64, index_dim=64, block=32, page=16),
    Plan(32, LONG, index_k="certified"),
    Plan(128, 8192, index_k="certified apart", new=4, index_dim=64, block=32, page=16),
    *(Plan(16, LONG, index_k="certified apart", new=new, index_dim=80, block=256, page=256) for new in (1, 2)),
    Plan(16, LONG, index_k="certified", new=4, index_dim=256, block=64, page=128),
    Plan(16, LONG, index_k="certified apart", index_dim=256, block=48, page=16),
    Plan(128, 32768, index_k="certified", index_dim=64, block=20, page=16),
    *(Plan(32, 32768, index_k=kind) for kind in FORMATS),
    Plan(32, 32768, index_q="e4m3 tensor", index_k="e4m3"),
    Plan(32, 32768, index_q="e4m3 tensor"),
    Plan(32, 32768, index_q="e4m3 tensor", index_k="nvfp4"),
    Plan(32, 32768, index_k="nvfp4", new=2),
    Plan(128, 8192, new=8),  # New tokens share the reading of blocks; here one program serves them, and then several do.
    Plan(12, 8192, *("fp16",) * 4, new=4, topk=5, dim=64, block=32, page=64),
    Plan(32, 32768, index_k="nvfp4", index_dim=64, block=64),
    Plan(32, 8192, topk=8),
    Plan(32, LONG),
    Plan(8, 16384 * 128, topk=64),
    Plan(32, 32768, *("fp16",) * 3, "fp16 odd"),
    Plan(1, 32768, index_k="e4m3"),
    Plan(8, 4096, index_k="e4m3", dim=64, heads=HEADS[3], block=32, page=64),
    Plan(8, 32768, "fp16", "fp16", index_k="e4m3", index_q="fp16", dim=96, heads=HEADS[1]),
    *(Plan(batch, 32768, k=k) for k in ("e4m3 tensor", "nvfp4") for batch in (1, 32, 64)),
    Plan(32, 32768, k="e4m3 page"),
    Plan(32, 32768, k="e4m3 tensor", heads=HEADS[64]),
    Plan(32, 32768, k="nvfp4", heads=HEADS[64]),
    Plan(32, 32768, k="nvfp4", heads=HEADS[32]),
    # These exchange candidates and partial results with other ranks.
    *(Exchange(ranks) for ranks in (2, 4, 8)),
    Exchange(2, "fp16", topk=64, dim=64, init=1, local=2, page_blocks=4),
    Exchange(2, topk=3, dim=80, local=0),
    # These are decode steps over keys and values in host memory.
    HostPlan(8, LONG),
    HostPlan(2, 32768, k="e4m3", new=2),
    HostPlan(8, 32768, k="nvfp4", page=256),
    HostPlan(2, 8192, dim=80, block=48, page=96, topk=5),
    # These append to caches.
    *(Append(kind) for kind in ("bf16", "e4m3 tensor", "int8", "nvfp4", "nvfp4 128x4", "mxfp4")),
    # These prepare an engine's new tokens.
    *(NewTokens(kind, tokens) for kind in ("bf16", "e4m3") for tokens in (1, 32)),
    NewTokens("bf16", 128, heads=(3, 1), dim=64),
    # These call the drop-in package.
    DropIn("scores", "bf16", 1, 4096),
    DropIn("scores", "bf16", 8, 1),
    DropIn("sparse", "bf16", 8, 1),
    DropIn("sparse", "e4m3", 1, 4096),
    DropIn("dense", "bf16", 8, 1),
    *(TopKDropIn(64, 256, layout) for layout in ("HKT", "THK")),
    ByKeys("bf16", 512),
)
HOPPER_CALLS: tuple[Any, ...] = (
    # These launch Hopper's own kernels, and further combinations of what all architectures compile.
    Scores("e4m3 tensor", "e4m3 head", 4096),
    Scores("e4m3 tensor", "e4m3 head", 4096, dim=64, page=128),
    Scores("fp16", "nvfp4", 1, page=256),
    Select("e4m3 tensor", "e4m3", 4096, dim=64),
    Sparse("bf16", "e4m3 tensor", 4096, dim=64, page=128),
    Sparse("fp16", "e4m3", 512),
    Sparse("bf16", "bf16", 4096, heads=HEADS[32]),
    Sparse("fp16", "fp16", 4096, heads=HEADS[64], page=128, scale=-0.1),
    Sparse("bf16", "e4m3 head", 4096, heads=HEADS[3]),
    Sparse("bf16", "e4m3 head", 4096, heads=HEADS[100]),
    Dense("bf16", "nvfp4", 1, batch=8, keys=32768, page=128, results="m"),
    Plan(32, 32768, *("fp16",) * 4),
    Plan(8, 1024 * 1024, index_k="certified", topk=16),
    Plan(64, 32768, index_k="certified", new=4),
    DropIn("scores", "e4m3", 1, 4096),
    DropIn("scores", "e4m3", 8, 1),
    DropIn("sparse", "bf16", 1, 4096),
    DropIn("sparse", "e4m3", 8, 1),
    DropIn("dense", "bf16", 1, 4096),
    DropIn("dense", "e4m3", 1, 4096),
    DropIn("dense", "e4m3", 8, 1),
    ByKeys("bf16", 512, page=128),
    ByKeys("e4m3", 512),
    ByKeys("e4m3", 512, page=128),
)


def label(call: Any) -> str:
    """Returns the name of a call: its kind and those fields that differ from the defaults."""
    said = [value for name, value in call._asdict().items() if name not in call._field_defaults]
    said += [f"{name}={value}" for name, value in call._asdict().items() if value != call._field_defaults.get(name, value)]
    return " ".join([type(call).__name__, *map(str, said)])


def calls(arch: int) -> Iterator[tuple[str, Any]]:
    """Yields the name and the call of everything that is compiled for an architecture."""
    for call in CALLS + (HOPPER_CALLS if arch == 90 else ()):
        yield label(call), call
