# SPDX-License-Identifier: MIT
"""Decode steps over host memory give what steps over resident caches give, however small the block cache is."""

import importlib.util

import pytest
import torch

from openmsa import DecodePlan, HostDecodePlan, HostKV
from openmsa.decode import plan as decode
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem

CUDA = torch.cuda.is_available()
HOW = ["stages"] if CUDA or importlib.util.find_spec("triton") is None else ["stages", "kernels"]
HOW += [pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else []
SHAPE = {"max_batch": 4, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "index_dim": 32, "topk": 4, "block_size": 32}
PAGE = 64


@pytest.fixture(params=HOW)
def device(request, monkeypatch):
    """ "kernels": the GPU's path on CPU tensors, in the interpreter, in stages as steps over host memory run."""
    if request.param == "kernels":
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
        monkeypatch.setattr("openmsa.decode.triton_launch.MAX_BLOCKS", 0)
    return "cuda" if request.param == "cuda" else "cpu"


def step(k_lens, new_tokens=1, seed=0, **options):
    """A problem whose queries are the newest tokens."""
    options = {"kv_heads": 2, "group": 4, "head_dim": 64, "index_dim": 32, "dtype": torch.float16} | options
    return problem(
        [new_tokens] * len(k_lens), k_lens, index_heads=2, integer_index=True, shared_prefix=130, seed=seed, **options
    )


def in_host_memory(kv, least=True, **options):
    """A `HostKV` of the pages of a `PagedKV`, which is on the CPU, with as few slots as steps allow or for all blocks."""
    rows = kv.batch * kv.num_heads
    blocks = rows * 4 * options.get("new_tokens", 1) if least else kv.num_pages * kv.num_heads * 2
    pools = [pool.clone() for pool in (kv.k, kv.v)]
    return HostKV(*pools, kv.page_table, kv.seq_lens.clone(), blocks, block_size=32, topk=4, **options)


@pytest.mark.parametrize("least", [True, False])
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_equals_a_resident_cache(device, new_tokens, least):
    """Over steps whose selections are unrelated, so that a small cache is thrashed."""
    p = step((500, 0, 161, 1), new_tokens)
    kv, keys = paged(p, PAGE)
    host = in_host_memory(kv, least, new_tokens=new_tokens)
    options = SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": p.q.dtype, "device": device, "new_tokens": new_tokens}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)
    for seed in range(4):
        other = step((500, 0, 161, 1), new_tokens, seed=seed)
        q, index_q = other.q, other.index_q
        assert_equal("out", plan.run(q, host, index_q, keys), resident.run(q, kv, index_q, keys))
        assert_equal("blocks", plan.blocks, resident.blocks)
        assert_equal("lse", plan.lse, resident.lse)
    found = host.statistics()
    assert found.steps == 4
    assert found.blocks == 4 * new_tokens * 2 * (4 + 4) + 4 * 2 * (2 if new_tokens > 1 else 1) * 0 or found.blocks > 0
