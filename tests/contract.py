# SPDX-License-Identifier: MIT
"""This module lists what is tested: every implementation of a stage on every device, and the shapes that all must serve."""

from dataclasses import dataclass

import pytest
import torch

from openmsa import block_scores, explain, msa_attention, select_blocks, sparse_attention
from openmsa.explain import STAGES
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.inputs import paged, problem, strided
from openmsa.types import Sequences
from tests import instructions

ON_CPU = ("cpu", "reference")  # these must serve everything on CPU tensors: a refusal there is a failure
COMPILED = (block_scores, select_blocks, sparse_attention, msa_attention)  # C kernels serve them on a CPU.
DTYPES = {"cpu": ("float64", "float32", "float16", "bfloat16"), "cuda": ("bfloat16", "float16")}
CUDA = torch.cuda.is_available()
DEVICES = ("cpu", pytest.param("cuda", marks=[pytest.mark.gpu])) if CUDA else ("cpu",)


@dataclass(frozen=True)
class Subject:
    """Names an implementation, where it runs, in which dtype, and whether C kernels may serve it."""

    impl: str
    device: str
    dtype: torch.dtype
    compiled: bool = True

    def __str__(self):
        parts = (self.impl, self.device, str(self.dtype).removeprefix("torch."), *([] if self.compiled else ["without C"]))
        return "-".join(parts)

    def run(self, function, *args, **kwargs):
        """Calls the implementation with poisoned outputs; the arguments must stay as they are. On a GPU an implementation may
        refuse, with its sentence as the reason of the skip."""
        if self.device != "cpu":
            explanation = explain(function, *args, impl=self.impl, **kwargs)
            for stage in explanation if function is msa_attention else (explanation,):
                if stage.chosen is None:
                    pytest.skip(str(stage))
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        versions = [x._version for x in tensors]
        with PoisonedOutputs(), pytest.MonkeyPatch.context() as patch:
            if not self.compiled:
                instructions.use_none(patch)
            result = function(*args, impl=self.impl, **kwargs)
        assert versions == [x._version for x in tensors], "an argument was written to"
        return result


def subjects(function, every_dtype=False):
    """Returns a test for each implementation of a public function; in one dtype a device unless `every_dtype`."""
    return pytest.mark.parametrize("subject", [param(s) for s in all_subjects(function, every_dtype)])


def combinations(function):
    """Returns a test for each implementation, dtype and shape; the storage changes from one to the next, so that every pair of
    shape, dtype and storage occurs."""
    dtypes = DTYPES["cpu"]
    return pytest.mark.parametrize(
        ("subject", "shape", "storage"),
        [
            param(subject, shape, STORAGES[(n + dtypes.index(str(subject.dtype)[6:])) % len(STORAGES)])
            for subject in all_subjects(function, every_dtype=True)
            for n, shape in enumerate(SHAPES)
        ],
    )


def param(subject, *others):
    marks = [pytest.mark.gpu] if subject.device == "cuda" else []
    return pytest.param(subject, *others, id="-".join(map(str, (subject, *others))), marks=marks)


def all_subjects(function, every_dtype):
    stages = [STAGES[f] for f in ((select_blocks, sparse_attention) if function is msa_attention else (function,))]
    names = [row.name for row in stages[-1].table if all(row.name in [r.name for r in stage.table] for stage in stages)]
    pairs = [(impl, "cpu") for impl in ON_CPU]
    if CUDA:
        pairs += [(impl, "cuda") for impl in ("auto", *names) if impl != "cpu"]
    for impl, device in pairs:
        for dtype in DTYPES[device] if every_dtype else ("float32",) if device == "cpu" else ("bfloat16",):
            yield Subject(impl, device, getattr(torch, dtype))
            if impl == "cpu" and dtype != "float64" and function in COMPILED:
                yield Subject(impl, device, getattr(torch, dtype), compiled=False)


@dataclass(frozen=True)
class Shape:
    """One combination of everything a caller may choose."""

    head_dim: int
    group: int
    kv_heads: int
    block_size: int
    topk: int
    shared_selection: bool
    page_size: int

    def __str__(self):
        shared = "shared" if self.shared_selection else "own"
        return f"d{self.head_dim}-g{self.group}x{self.kv_heads}-b{self.block_size}-k{self.topk}-{shared}-p{self.page_size}"

    def problem(self, dtype, blocks=None, **options):
        """Draws a problem whose sequences have no keys, one key, a block and its neighbours, and more blocks than topk (or
        `blocks` blocks)."""
        b, many = self.block_size, blocks or self.topk + 2
        q_lens, k_lens = (2, 1, 3, 0, 5, 4, 17), (0, 1, b - 1, b, b + 1, many * b + 3, 17)
        options = {"index_heads": 1 if self.shared_selection else self.kv_heads, "shared_prefix": self.block_size} | options
        return problem(q_lens, k_lens, kv_heads=self.kv_heads, group=self.group, head_dim=self.head_dim, dtype=dtype, **options)


SHAPES = [
    Shape(16, 1, 1, 16, 1, False, 16),
    Shape(48, 3, 2, 48, 5, True, 16),
    Shape(64, 16, 1, 32, 16, False, 64),
    Shape(96, 3, 3, 128, 5, True, 32),
    Shape(128, 16, 2, 16, 64, False, 128),
    Shape(256, 1, 2, 256, 16, False, 48),
    Shape(64, 3, 3, 64, 5, False, 1),
    Shape(128, 1, 4, 128, 1, True, 256),
    Shape(16, 16, 1, 48, 64, True, 7),
    Shape(256, 3, 1, 32, 16, False, 5),
    Shape(48, 16, 1, 256, 1, True, 100),
    Shape(96, 1, 2, 16, 16, False, 16),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


STORAGES = ("flat", "strided", "paged", "interleaved pages")


def stored(p, storage, page_size=16, seed=0):
    """Returns the problem's tensors as a caller may hold them: q, index_q, then (k, v) and index_k or the caches that hold
    them."""
    if storage == "flat":
        return p.q, p.index_q, (p.k, p.v), p.index_k
    if storage == "strided":
        p = p.map(strided)
        return p.q, p.index_q, (p.k, p.v), p.index_k
    kv, index_keys = paged(p, page_size, seed=seed, interleaved=storage != "paged")
    return strided(p.q, 2), strided(p.index_q, 2), (kv, None), index_keys


def one_sequence(q_len, k_len, device="cpu", **fields):
    """Returns lengths of one sequence as explicit tensors."""
    return Sequences(*(torch.tensor([0, n], dtype=torch.int32, device=device) for n in (q_len, k_len)), q_len, k_len, **fields)
