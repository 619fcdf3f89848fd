# SPDX-License-Identifier: MIT
"""Launches on a GPU can be captured and replayed with other lengths, wait for nothing, and run on two streams at once."""

import pytest
import torch

from fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select
from openmsa.testing.compare import assert_equal
from tests.contract import CUDA
from tests.fmha_sm100.batch import assert_results, truth
from tests.fmha_sm100.test_callers import DIM, GROUP, HEADS, PAGE, TOPK, made, pages, positions, selected

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a GPU")]
STEPS = ((600, 3, 130, 257), (1200, 1, 128, 900), (129, 700, 5, 40))


class Step:
    """Runs scores, selection, selected pages and dense attention of a decode step, from buffers that stay where they are."""

    def __init__(self, width=16):
        self.q_lens = (1,) * 4
        qo, kv = torch.ones(4, dtype=torch.int32), torch.full((4,), PAGE, dtype=torch.int32)
        heads = {"num_kv_heads": HEADS, "page_size": PAGE, "device": "cuda"}
        self.proxy = fmha_sm100_plan(qo, kv, HEADS, **heads | {"num_kv_heads": 1, "output_maxscore": True})
        self.sparse = fmha_sm100_plan(qo, kv, HEADS * GROUP, kv_block_num=TOPK, **heads)
        self.dense = fmha_sm100_plan(qo, kv, HEADS * GROUP, **heads)
        self.table = torch.zeros(4 * width, dtype=torch.int32, device="cuda")
        self.valid = torch.zeros(4, dtype=torch.int32, device="cuda")
        self.width, self.scores = width, torch.empty(4, HEADS, self.proxy[3]["max_k_tiles"], device="cuda")
        self.blocks = torch.empty(4, HEADS, TOPK, dtype=torch.int32, device="cuda")
        self.out, self.full = (torch.empty(4, HEADS * GROUP, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self.tensors = None

    def write(self, p):
        """Writes another batch into the same buffers."""
        here = p.to("cuda")
        k, v, index_k, table, width = pages(here, PAGE, fixed=True)
        fresh = {"q": here.q, "index_q": here.index_q, "k": k, "v": v, "index_k": index_k}
        if self.tensors is None:
            room = {name: (x.shape[0] if "q" in name else 40, *x.shape[1:]) for name, x in fresh.items()}
            self.tensors = {name: x.new_zeros(room[name]) for name, x in fresh.items()}
        for name, x in fresh.items():
            self.tensors[name][: x.shape[0]].copy_(x)
        self.table.view(4, -1)[:, :width].copy_(table.view(4, -1)[:, : self.width])
        lens = torch.tensor(p.k_lens, dtype=torch.int32, device="cuda")
        for plan in (self.proxy, self.sparse, self.dense):
            plan[3]["kv_segment_lens"].copy_(lens)
            plan[3]["qo_offset"].copy_(lens - 1)
            plan[3]["kv_page_indptr"].copy_(torch.arange(5, device="cuda") * self.width)
        self.valid.copy_(positions(p) // PAGE + 1)
        for x in (self.out, self.full):
            x.fill_(torch.nan)
        torch.cuda.synchronize()

    def run(self):
        t = self.tensors
        self.scores.fill_(-torch.inf)
        options = {"kv_indices": self.table, "sm_scale": DIM**-0.5}
        fmha_sm100(t["index_q"], t["index_k"], None, self.proxy, max_score=self.scores, output_o=False, **options)
        sparse_topk_select(self.scores, TOPK, self.valid, force_end_blocks=1, output=self.blocks, max_score_layout="THK")
        fmha_sm100(t["q"], t["k"], t["v"], self.sparse, kv_block_indexes=self.blocks, out=self.out, **options)
        fmha_sm100(t["q"], t["k"], t["v"], self.dense, out=self.full, **options)

    def check(self, p):
        torch.cuda.synchronize()
        assert_equal("blocks", self.blocks, selected(p))
        assert_results((self.out,), truth(p, selected(p), PAGE))
        assert_results((self.full,), truth(p))


def batches():
    return [made((1,) * 4, k_lens) for k_lens in STEPS]


def test_capture_and_replay():
    """Captured for one batch, replayed for others; the replay allocates nothing."""
    first, *others = batches()
    step = Step()
    step.write(first)
    step.run()
    step.check(first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for p in (*others, first):
        step.write(p)
        held = torch.cuda.memory_allocated()
        graph.replay()
        assert torch.cuda.memory_allocated() == held
        step.check(p)


def test_no_launch_waits_for_the_device():
    p = batches()[1]
    step = Step()
    step.write(p)
    step.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check(p)


def test_two_streams_at_once():
    """Plans share nothing, so that two of them may run at once."""
    first, second = batches()[:2]
    steps, streams = (Step(), Step()), (torch.cuda.Stream(), torch.cuda.Stream())
    for step, p in zip(steps, (first, second), strict=True):
        step.write(p)
        step.run()
    torch.cuda.synchronize()
    for _ in range(20):
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step.run()
    for step, p in zip(steps, (first, second), strict=True):
        step.check(p)


def test_a_plan_on_the_cpu_cannot_be_captured():
    p = batches()[0]
    plan = fmha_sm100_plan(*(torch.tensor(x) for x in (p.q_lens, p.k_lens)), HEADS * GROUP, page_size=PAGE, device="cpu")
    k, v, _, table, _ = pages(p.to("cuda"), PAGE)
    q = p.q.cuda()
    out, _ = fmha_sm100(q, k, v, plan, kv_indices=table)
    assert_results((out,), truth(p))
    with pytest.raises(ValueError, match="plan_info must lie on cuda"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fmha_sm100(q, k, v, plan, kv_indices=table)
