# SPDX-License-Identifier: MIT
"""Tensors of a process lie on another GPU than the current one, as in the layers of a model that is spread by ``device_map``:
`make test-multi-gpu`."""

import pytest
import torch

from openmsa import E4M3, AttentionPlan, DecodePlan, PagedIndexKeys, PagedKV, msa_attention
from openmsa.runtime import launch_graph
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(GPUS < 2, reason="it needs two GPUs or more")]
RANK = {"kv_heads": 1, "group": 16, "head_dim": 128, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def first_is_current(monkeypatch):
    monkeypatch.setattr(launch_graph, "RUNS_BEFORE", 0)
    with torch.cuda.device(0):
        yield
        assert torch.cuda.current_device() == 0


def everywhere(compute):
    """Computes on GPU 0 and on GPU 1, while 0 is current, three times each; the results must have the same bits."""
    wanted = compute(torch.device("cuda", 0))
    for _ in range(3):
        for device in (torch.device("cuda", 1), torch.device("cuda", 0)):
            for found, value in zip(compute(device), wanted, strict=True):
                assert found.device == device
                assert_equal("result", found.cpu(), value.cpu())


@pytest.mark.parametrize("lengths", [(300, 40), (2500, 1)])
def test_attention(lengths):
    p = problem(lengths, (5000, 700), **RANK)

    def compute(device):
        x = p.to(device)
        return msa_attention(x.q, x.k, x.v, x.index_q, x.index_k, seqs=x.seqs, return_lse=True)

    everywhere(compute)


@pytest.mark.parametrize("kind", ["attention", "decode"])
def test_plans_and_caches(kind):
    p = problem((1, 1), (5000, 700), **RANK)

    def compute(device):
        x = p.to(device)
        table = torch.arange(80, dtype=torch.int32, device=device).view(2, 40)
        kv = PagedKV.allocate(table, 80, 1, 128, 128, dtype=torch.bfloat16)
        index = PagedIndexKeys.allocate(table, 80, 1, 128, 128, dtype=torch.bfloat16)
        kv.append(x.k, x.v, x.seqs.cu_seqlens_k)
        index.append(x.index_k, x.seqs.cu_seqlens_k)
        if kind == "decode":
            sizes = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 128, "page_size": 128}
            plan = DecodePlan(max_batch=2, **sizes, max_pages=40, device=device)
            return [plan.run(x.q, kv, x.index_q, index).clone() for _ in range(2)]
        sizes = {"total_q": 2, "max_seqlen_q": 1, "max_seqlen_k": 5000, "page_size": 128}
        plan = AttentionPlan(cu_seqlens_q=x.seqs.cu_seqlens_q, seq_lens=kv.seq_lens, page_table=table, **sizes)
        return [plan.run(x.q, kv.k, kv.v, x.index_q, index.keys).clone() for _ in range(2)]

    everywhere(compute)


def test_formats():
    p = problem((300,), (3000,), **RANK)

    def compute(device):
        x = p.to(device)
        k, v = E4M3.quantize(x.k), E4M3.quantize(x.v)
        return msa_attention(x.q, k, v, x.index_q, x.index_k, seqs=x.seqs, return_lse=True)

    everywhere(compute)
