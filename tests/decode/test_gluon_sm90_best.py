# SPDX-License-Identifier: MIT
"""The Gluon kernel that takes the blocks of a decode step best first selects as the reference does and attends to what it has
selected, and serves the steps that it should."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, DecodePlan, PagedKV, select_blocks_from_scores
from openmsa.decode.gluon_sm90_best import launch
from openmsa.decode.memory import takes_best_first
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention import reference
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from tests.hopper.marks import DEVICE, on_a_hopper_gpu, on_hopper
from tests.low_precision import spread

# name: lengths, tokens, KV heads, group, head dim, page size, topk, init, local, index heads, dtype, scores
CASES = {
    "ragged": ((1, 127, 128, 129, 300, 1700), 1, 1, 16, 128, 128, 4, 0, 1, 1, "bf16", "normal"),
    "heads": ((257, 900, 1200), 1, 2, 16, 128, 128, 4, 0, 1, 2, "bf16", "normal"),
    "one selection": ((257, 900), 1, 2, 4, 128, 128, 3, 0, 1, 1, "fp16", "normal"),
    "empty sequences": ((0, 40, 0, 700), 2, 1, 8, 64, 128, 3, 0, 1, 1, "fp16", "normal"),
    "several tokens": ((3, 128, 131, 1027), 3, 2, 5, 64, 128, 4, 1, 2, 2, "bf16", "normal"),
    "wide pages": ((900, 1300), 1, 1, 16, 128, 512, 4, 0, 1, 1, "bf16", "normal"),
    "equal scores": ((2500, 1300), 1, 1, 16, 64, 128, 5, 0, 1, 1, "bf16", "ties"),
    "no scores": ((2500, 1300), 1, 1, 16, 64, 128, 5, 0, 1, 1, "bf16", "holes"),
    "nothing forced": ((2500, 60), 1, 1, 16, 64, 128, 5, 0, 0, 1, "fp16", "holes"),
    "all forced": ((2500, 60), 1, 1, 16, 64, 128, 3, 2, 1, 1, "fp16", "normal"),
    "one block": ((2500, 60), 1, 1, 1, 64, 128, 1, 0, 1, 1, "fp16", "normal"),
    "absent pages": ((700, 1300), 1, 1, 16, 128, 128, 5, 0, 1, 1, "bf16", "absent"),
    "far": ((40_000, 300), 1, 1, 2, 64, 128, 16, 0, 1, 1, "bf16", "normal"),
}


def step_of(lens, tokens, kv_heads, group, head_dim, page_size, topk, init, local, index_heads, dtype, kind):
    """Returns a problem, the sizes of its plan, scores and a step on poisoned results."""
    p = problem(
        [tokens] * len(lens), lens, kv_heads=kv_heads, group=group, head_dim=head_dim, index_dim=16, index_heads=index_heads,
        dtype=torch.float16 if dtype == "fp16" else torch.bfloat16, offsets=[n - tokens for n in lens],
    ).to(DEVICE)  # fmt: skip
    kv, index_keys = paged(p, page_size)
    rows, num_blocks = (p.q.shape[0], index_heads), kv.page_table.shape[1] * page_size // 128
    scores = torch.randn(*rows, num_blocks, generator=torch.Generator().manual_seed(1))
    if kind == "ties":
        scores = scores.mul(1.5).round()
        scores[..., ::2] *= -1  # Some zeros are negative.
    if kind == "holes":
        scores[..., 1::3], scores[..., 2::5] = torch.nan, -torch.inf
    if kind == "absent":
        kv.page_table[:, 1::2] = torch.tensor([-1, kv.k.shape[0]], dtype=torch.int32, device=DEVICE)[:, None]
    sizes = Sizes(
        tokens, kv_heads * group, kv_heads, head_dim, index_heads, 1, 16, page_size, num_blocks, topk, init, local, 128
    )
    step = Step(
        p.q, kv, p.index_q, index_keys, -0.7 if kind == "ties" else 0.11,
        torch.full((*rows, topk), -7, dtype=torch.int32, device=DEVICE), torch.full_like(p.q, torch.nan),
        torch.full(p.q.shape[:2], torch.nan, dtype=torch.float32, device=DEVICE),
    )  # fmt: skip
    return p, sizes, scores.to(DEVICE), step


def check(p, sizes, scores, step):
    """Compares the results of a step with those of the references, for which keys of absent pages are not selected."""
    table, pages = step.kv.page_table, step.kv.k.shape[0]
    kv = PagedKV(step.kv.k, step.kv.v, table.clamp(0, pages - 1), step.kv.seq_lens)
    lengths = kv.layout(p.seqs, p.q.shape[0], DEVICE)
    visible = lengths.visible_blocks(p.q.shape[0], 128).int()
    blocks = select_blocks_from_scores(
        scores.cpu().transpose(0, 1), sizes.topk, visible_blocks=visible.cpu(), init_blocks=sizes.init_blocks,
        local_blocks=sizes.local_blocks,
    )  # fmt: skip
    assert_equal("blocks", step.blocks, blocks)
    blocks, owner = blocks.to(DEVICE), torch.arange(p.q.shape[0], device=DEVICE) // sizes.new_tokens
    page = table[owner[:, None, None], (blocks.clamp(min=0) * 128 // sizes.page_size).long()]
    read = blocks.masked_fill((page < 0) | (page >= pages), -1)
    truth, honest = (
        reference.sparse_attention(x, kv, None, read, lengths, 128, step.softmax_scale, True) for x in (step.q.double(), step.q)
    )
    for name, *results in zip(("out", "lse"), (step.out, step.lse), honest, truth, strict=True):
        assert_close(name, *results)


@on_hopper
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name):
    p, sizes, scores, step = step_of(*CASES[name])
    assert launch(sizes, scores, step)
    check(p, sizes, scores, step)


def test_what_plans_take_best_first():
    sizes, h200 = Sizes(1, 16, 1, 128, 1, 1, 128, 128, 2048, 16, 0, 1, 128), COMPILE_TARGETS[90]
    assert takes_best_first(h200.num_sms + 1, sizes, h200)
    assert not takes_best_first(h200.num_sms, sizes, h200)
    assert takes_best_first(h200.num_sms // 2 + 1, sizes._replace(new_tokens=2), h200)
    assert takes_best_first(h200.num_sms // 4 + 1, sizes._replace(num_kv_heads=4, num_q_heads=32), h200)
    for other in ({"num_q_heads": 32}, {"head_dim": 64}, {"block_size": 64}, {"page_size": 64}):
        assert not takes_best_first(1000, sizes._replace(**other), h200)


def test_what_it_does_not_read():
    _, sizes, scores, step = step_of(*CASES["ragged"])
    kv, q = step.kv, step.q
    strided = PagedKV(spread(kv.k), kv.v, kv.page_table, kv.seq_lens)
    stored = PagedKV(E4M3.quantize(kv.k, per="tensor"), E4M3.quantize(kv.v, per="tensor"), kv.page_table, kv.seq_lens)
    others = (step._replace(kv=strided), step._replace(kv=stored), step._replace(q=q.half()))
    assert not any(launch(sizes, scores, other) for other in (*others, step._replace(q=E4M3.quantize(q, per="head"))))
    assert step.out.isnan().all()


@on_a_hopper_gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_in_plans(tokens):
    """A plan of more rows than multiprocessors selects the same blocks as one whose programs select first, also in a graph."""
    batch, width, sizes = 150, 40, {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 128, "page_size": 128}
    lens = [(37 * i) % (width * 128) for i in range(batch)]
    p = problem(
        [tokens] * batch, lens, kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16, offsets=[n - tokens for n in lens]
    )
    caches, q, index_q = paged(p.to(DEVICE), 128), p.q.to(DEVICE), p.index_q.to(DEVICE)
    results = []
    for best in (True, False):
        plan = DecodePlan(max_batch=batch, **sizes, max_pages=width + 1, new_tokens=tokens, device=DEVICE)
        assert plan._kernels.best[-1]
        plan._kernels.best = [best] * batch
        plan._kernels.shared = plan._kernels.shared._replace(cuts=[None] * batch)
        out = torch.empty_like(q)
        plan.run(q, caches[0], index_q, caches[1], out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                plan.run(q, caches[0], index_q, caches[1], out=out)
        out.fill_(torch.nan)
        graph.replay()
        results.append((plan.blocks.clone(), out, plan.lse.clone()))
    assert_equal("blocks", results[0][0], results[1][0].cpu())
    lengths = caches[0].layout(p.to(DEVICE).seqs, q.shape[0], DEVICE)
    truth = reference.sparse_attention(q.double(), caches[0], None, results[0][0], lengths, 128, 128**-0.5, True)
    for name, *given in zip(("out", "lse"), results[0][1:], results[1][1:], truth, strict=True):
        assert_close(name, *given)
