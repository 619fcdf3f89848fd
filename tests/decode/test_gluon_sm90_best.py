# SPDX-License-Identifier: MIT
"""The Gluon kernel that takes the blocks of a decode step best first selects as the reference does and attends to what it has
selected, and serves the steps that it should."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, DecodePlan, PagedIndexKeys, PagedKV, select_blocks_from_scores
from openmsa.block_scores import gluon_sm90_few
from openmsa.block_scores.gluon_sm90_few import ABSENT
from openmsa.decode import gluon_sm90_best, kernels, memory, scored, triton_attend
from openmsa.decode import plan as decode
from openmsa.decode.gluon_sm90_best import launch, reads
from openmsa.decode.memory import _handed, best_pairs
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import Step
from openmsa.primitives.softmax import Partials
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention import reference, triton_decode_call
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from tests.hopper.marks import DEVICE, on_a_hopper_gpu, on_hopper
from tests.low_precision import spread

# name: lengths, tokens, KV heads, group, head dim, page size, topk, init, local, index heads, dtype, what is special
CASES = {
    "ragged": ((1, 127, 128, 129, 300, 1700), 1, 1, 16, 128, 128, 4, 0, 1, 1, "bf16", ""),
    "heads": ((257, 900, 1200), 1, 2, 16, 128, 128, 4, 0, 1, 2, "bf16", ""),
    "one selection": ((257, 900), 1, 2, 4, 128, 128, 3, 0, 1, 1, "fp16", ""),
    "empty sequences": ((0, 40, 0, 700), 2, 1, 8, 64, 128, 3, 0, 1, 1, "fp16", ""),
    "several tokens": ((3, 128, 131, 1027), 3, 2, 5, 128, 128, 4, 1, 2, 2, "bf16", ""),
    "wide pages": ((900, 1300), 1, 1, 16, 128, 512, 4, 0, 1, 1, "bf16", ""),
    "equal scores": ((2500, 1300), 1, 1, 16, 128, 128, 5, 0, 1, 1, "bf16", "ties"),
    "no scores": ((2500, 1300), 1, 1, 16, 64, 128, 5, 0, 1, 1, "bf16", "holes"),
    "nothing forced": ((2500, 60), 1, 1, 16, 128, 128, 5, 0, 0, 1, "fp16", "holes"),
    "first ones forced": ((2500, 60), 1, 1, 16, 64, 128, 5, 2, 0, 1, "fp16", ""),
    "all forced": ((2500, 60), 1, 1, 16, 64, 128, 3, 2, 1, 1, "fp16", ""),
    "one block": ((2500, 60), 1, 1, 1, 64, 128, 1, 0, 1, 1, "fp16", ""),
    "absent pages": ((700, 1300), 1, 1, 16, 128, 128, 5, 0, 1, 1, "bf16", "absent"),
    "heads inside of tokens": ((700, 1300), 1, 2, 16, 128, 128, 3, 0, 1, 1, "bf16", "engine"),
    "lengths that disagree": ((700, 1300, 0, 1, 900, 900), 2, 1, 16, 64, 128, 4, 0, 1, 1, "bf16", "disagree"),
    "narrow tables": ((1300, 1300, 300), 1, 1, 16, 64, 128, 4, 0, 1, 1, "bf16", "narrow"),
    "strided": ((700, 1300), 2, 2, 4, 64, 128, 4, 0, 1, 2, "bf16", "strided"),
    "far": ((40_000, 300), 1, 1, 2, 64, 128, 16, 0, 1, 1, "bf16", ""),
}


def step_of(lens, tokens, kv_heads, group, head_dim, page_size, topk, init, local, index_heads, dtype, special):
    """Returns the sizes of a plan, scores and a step on poisoned results."""
    p = problem(
        [tokens] * len(lens), lens, kv_heads=kv_heads, group=group, head_dim=head_dim, index_dim=16, index_heads=index_heads,
        dtype=torch.float16 if dtype == "fp16" else torch.bfloat16, offsets=[n - tokens for n in lens],
    ).to(DEVICE)  # fmt: skip
    kv, index_keys = paged(p, page_size)
    q, out = p.q, torch.full_like(p.q, torch.nan)
    if special == "engine":  # Keys and values of a token side by side, values in rows that are farther apart.
        pools = [torch.full((*kv.k.transpose(1, 2).shape[:3], width), torch.nan).to(kv.k) for width in (256, 384)]
        k, v = (pool.transpose(1, 2)[..., :128].copy_(x) for pool, x in zip(pools, (kv.k, kv.v), strict=True))
        kv = PagedKV(k, v, kv.page_table, kv.seq_lens)
    if special == "disagree":
        index_keys.seq_lens.copy_(torch.tensor([1300, 300, 700, 0, 0, 1]))
    if special == "narrow":
        tables = (cache.page_table[:, :width].contiguous() for cache, width in ((kv, 6), (index_keys, 8)))
        kv = PagedKV(kv.k, kv.v, next(tables), kv.seq_lens)
        index_keys = PagedIndexKeys(index_keys.keys, next(tables), index_keys.seq_lens)
    if special == "strided":
        q, out = (strided(x, 2) for x in (q, out))
    if special == "absent":
        kv.page_table[:, 1::2] = torch.tensor([-1, kv.k.shape[0]], dtype=torch.int32, device=DEVICE)[:, None]
    rows, num_blocks = (q.shape[0], index_heads), index_keys.capacity // 128
    scores = torch.randn(*rows, num_blocks, generator=torch.Generator().manual_seed(1))
    if special == "ties":
        scores = scores.mul(1.5).round()
        scores[..., ::2] *= -1  # Some zeros are negative.
    if special == "holes":
        scores[..., 1::3], scores[..., 2::5] = torch.nan, -torch.inf
    room = max(kv.page_table.shape[1], index_keys.page_table.shape[1]) * page_size // 128
    sizes = Sizes(tokens, kv_heads * group, kv_heads, head_dim, index_heads, 1, 16, page_size, room, topk, init, local, 128)
    step = Step(
        q, kv, p.index_q, index_keys, -0.7 if special == "ties" else 0.11,
        torch.full((*rows, topk), -7, dtype=torch.int32, device=DEVICE), out,
        torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=DEVICE),
    )  # fmt: skip
    return sizes, scores.to(DEVICE), step


def attended(sizes, step, blocks, dtype):
    """Returns output and lse of a step that reads these blocks, in `dtype`, as far as its keys go and its pages exist."""
    kv, group = step.kv, sizes.num_q_heads // sizes.num_kv_heads
    q, k, v, table, lens = (x.cpu() for x in (step.q, kv.k, kv.v, kv.page_table, kv.seq_lens))
    out, lse = torch.zeros(q.shape, dtype=dtype), torch.full(q.shape[:2], -torch.inf, dtype=dtype)
    for t in range(q.shape[0]):
        b, i = divmod(t, sizes.new_tokens)
        sees = min(int(lens[b]) - sizes.new_tokens + i + 1, table.shape[1] * sizes.page_size)
        for h in range(sizes.num_kv_heads):
            ids = blocks[t, h % sizes.index_heads].long()
            keys = (ids[ids >= 0, None] * 128 + torch.arange(128)).flatten()
            keys = keys[keys < sees]
            pages = table[b, keys // sizes.page_size]
            there = (pages >= 0) & (pages < k.shape[0])
            if there.any():
                at = pages[there].long(), h, keys[there] % sizes.page_size
                rows = slice(h * group, h * group + group)
                logits = q[t, rows].to(dtype) @ k[at].to(dtype).T * step.softmax_scale
                out[t, rows], lse[t, rows] = logits.softmax(-1) @ v[at].to(dtype), logits.logsumexp(-1)
    return out, lse


def sees(sizes, step):
    """Returns how many blocks each token of a step sees, by the lengths of its index keys."""
    lens, new = step.index_keys.seq_lens.cpu(), sizes.new_tokens
    seen = (lens[:, None] - new + 1 + torch.arange(new)).clamp(0, step.index_keys.capacity)
    return ((seen + 127) // 128).flatten().int()


def check(sizes, scores, step):
    """Compares the results of a step with plain PyTorch."""
    blocks = select_blocks_from_scores(
        scores.cpu().transpose(0, 1), sizes.topk, visible_blocks=sees(sizes, step),
        init_blocks=sizes.init_blocks, local_blocks=sizes.local_blocks,
    )  # fmt: skip
    assert_equal("blocks", step.blocks, blocks)
    (out, lse), truth = (attended(sizes, step, blocks, dtype) for dtype in (torch.float32, torch.float64))
    for name, *results in zip(("out", "lse"), (step.out, step.lse), (out.to(step.out.dtype), lse), truth, strict=True):
        assert_close(name, *(x.cpu() for x in results))


def partials_of(sizes, step, splits):
    """Returns poisoned memory for what programs of so many splits leave; none have come."""
    rows = step.q.shape[0] * sizes.num_kv_heads
    held = Partials.allocate(rows, rows * splits, 16, sizes.head_dim, step.q.dtype, DEVICE)
    held.rows.fill_(torch.nan)
    held.lse.fill_(torch.nan)
    return held


@on_hopper
@pytest.mark.parametrize("handed", [False, True], ids=["", "handed"])
@pytest.mark.parametrize(("pairs", "splits"), [(1, 1), (2, 1), (2, 2), (1, 3), (2, 16)])
@pytest.mark.parametrize("name", CASES)
def test_on_the_device(name, pairs, splits, handed):
    """Handed scores are absent in the end; words that are never written are neither waited for nor changed."""
    sizes, scores, step = step_of(*CASES[name])
    if pairs > sizes.topk:
        pytest.skip("a program has no more pairs than blocks")
    given = scores
    if handed:
        if sizes.index_heads != sizes.num_kv_heads:
            pytest.skip("programs of one row alone take the scores of a row")
        seen = sees(sizes, step)[:, None, None]
        written = torch.arange(scores.shape[2]) < seen - sizes.local_blocks
        written = written.expand(scores.shape).to(DEVICE)
        given = torch.where(written, scores.nan_to_num(-torch.inf, -torch.inf, -torch.inf), -7.0)
        scores = torch.where(written, given, torch.nan)
    partials = partials_of(sizes, step, splits)
    launch(sizes, given, step, False, pairs, splits, partials, handed)
    check(sizes, scores, step)
    assert not bool(partials.arrived.any())
    if handed:
        left = torch.where(written, absent(), -7.0)
        assert_equal("scores", given.view(torch.int32), left.view(torch.int32).cpu())


@on_hopper
@pytest.mark.parametrize("splits", [1, 2])
def test_scores_that_nobody_writes_do_not_hang_it(splits):
    """They are of blocks that are not selected."""
    sizes, scores, step = step_of(*CASES["ragged"])
    scores[:, 0, 1::2] = torch.nan
    written = torch.arange(scores.shape[2]) < sees(sizes, step)[:, None, None] - 1
    given = scores.masked_fill(~written.to(DEVICE) | scores.isnan(), absent())
    launch(sizes, given, step, False, 2, splits, partials_of(sizes, step, splits), True)
    check(sizes, scores, step)
    assert_equal("scores", given.view(torch.int32), torch.full(given.shape, ABSENT.value, dtype=torch.int32))


def absent():
    """Returns the number whose bits say that a score is not there."""
    return torch.tensor(ABSENT.value, dtype=torch.int32).view(torch.float32).to(DEVICE)


def pairs_and_splits(batch, sizes):
    """Returns the pairs of tiles of programs of a plan on an H200, and how many of these share a row."""
    heads, group = sizes.num_kv_heads, sizes.num_q_heads // sizes.num_kv_heads
    shape = (heads, group, sizes.head_dim, sizes.topk, sizes.block_size, sizes.page_size)
    cut = triton_decode_call.configure(batch * sizes.new_tokens, *shape, COMPILE_TARGETS[90])
    return best_pairs(cut, batch, sizes, COMPILE_TARGETS[90]), cut.splits


def test_what_plans_take_best_first():
    """No program has a single block where each other has one, too, and partials fit into the tiles of one program."""
    sizes = Sizes(1, 16, 1, 128, 1, 1, 128, 128, 2048, 16, 0, 1, 128)
    sms = COMPILE_TARGETS[90].num_sms
    assert sms == 132
    rows = {
        1: (0, 16),
        4: (0, 16),
        5: (2, 8),
        16: (2, 8),
        17: (2, 4),
        33: (2, 4),
        34: (2, 2),
        66: (2, 2),
        67: (2, 1),
        132: (2, 1),
    }
    assert {batch: pairs_and_splits(batch, sizes) for batch in rows} == rows
    assert pairs_and_splits(sms + 1, sizes) == (1, 1)
    assert pairs_and_splits(sms // 2 + 1, sizes._replace(new_tokens=2)) == (1, 1)
    assert pairs_and_splits(sms // 4 + 1, sizes._replace(num_kv_heads=4, num_q_heads=32)) == (1, 1)
    for topk in range(1, 20):
        pairs, splits = pairs_and_splits(7, sizes._replace(topk=topk))
        assert pairs == (min(2, topk) if topk == 1 or splits < topk else 0)
    assert pairs_and_splits(2, sizes._replace(topk=64)) == (2, 32)
    assert pairs_and_splits(1, sizes._replace(topk=128)) == (0, 64)
    for other in ({"num_q_heads": 32}, {"head_dim": 64}, {"block_size": 64}, {"page_size": 64}):
        assert pairs_and_splits(1000, sizes._replace(**other))[0] == 0


def test_what_it_reads():
    _, _, step = step_of(*CASES["ragged"])
    k, v, q = step.kv.k, step.kv.v, step.q
    wide = torch.zeros(*k.shape[:3], 136, dtype=k.dtype, device=DEVICE)
    inside = torch.zeros(k.shape[0], 128, 1, 136, dtype=k.dtype, device=DEVICE).transpose(1, 2)
    pools = {"strided": spread(k), "shifted": wide[..., 1:129], "heads at 272 bytes": inside[..., :128]}
    assert reads(q, wide[..., 8:], v)
    for name, pool in pools.items():
        assert not reads(q, pool, v), name
        assert not reads(q, k, pool), name
    assert not reads(q, *(E4M3.quantize(x, per="tensor") for x in (k, v)))
    assert not any(reads(other, k, v) for other in (q.half(), E4M3.quantize(q, per="head")))
    assert not reads(q.float(), k.float(), v.float())


def test_distances_in_a_tile_are_32_bits_wide():
    q = torch.empty(1, 16, 128, dtype=torch.bfloat16, device="meta")
    for row, is_read in (((1 << 24) - 8, True), (1 << 24, False)):
        pool = torch.empty_strided((3, 1, 128, 128), (0, 0, row, 1), dtype=q.dtype, device="meta")
        assert reads(q, pool, pool) == is_read


def test_another_kernel_serves_what_it_does_not_read(monkeypatch):
    _, scores, step = step_of(*CASES["ragged"])
    asked = []
    monkeypatch.setattr(kernels, "scores_of", lambda *given: (scores, None))
    monkeypatch.setattr(kernels, "score", lambda *given: (scores, asked.append(given[-1]) or given[-1] is not None))
    monkeypatch.setattr(triton_attend, "launch", lambda *given: asked.append("triton"))
    monkeypatch.setattr(gluon_sm90_best, "launch", lambda *given: asked.append(given[4:]))
    odd = step._replace(kv=PagedKV(spread(step.kv.k), step.kv.v, step.kv.page_table, step.kv.seq_lens))
    for pairs, hands_on, given in ((1, True, step), (2, True, step), (2, False, step), (0, False, step), (1, True, odd)):
        plan = SimpleNamespace(
            sizes=None, best=[pairs] * 9, hands_on=[hands_on] * 9, scores=None, handed="absent", partials=None, pdl=True
        )  # fmt: skip
        kernels.Kernels._two_launches(plan, SimpleNamespace(splits=3), given, None)
    assert asked == [
        "absent",
        (1, 3, None, True),
        "absent",
        (2, 3, None, True),
        None,
        (2, 3, None, False),
        None,
        "triton",
        None,
        "triton",
    ]


@on_hopper
@pytest.mark.parametrize("seed", range(12))
def test_scores_are_handed_from_one_kernel_to_the_other(seed, monkeypatch):
    """Steps of a plan, of any lengths, widths of tables and batches, use the same words: all that a step writes it takes, and
    results are bit for bit those of scores that are not handed on."""
    r, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    monkeypatch.setattr(gluon_sm90_few, "LEAST_BATCH", 1)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(scored, "runs_hopper_kernels", lambda device: True)
        monkeypatch.setattr(scored.devices, "facts", lambda device: COMPILE_TARGETS[90]._replace(num_sms=1))
    new, heads, page, most = r.choice([1, 1, 2, 3]), r.choice([1, 2]), r.choice([128, 256]), 4
    init, local, group = r.choice([0, 1, 2]), r.choice([0, 1, 2, 3]), r.choice([1, 4, 16])
    topk, pages = max(init + local, 1) + r.choice([0, 1, 3]), 1024 // page
    sizes = Sizes(new, heads * group, heads, 128, heads, r.choice([1, heads]), 64, page, 8, topk, init, local, 128)
    words = _handed(most, 1024, sizes, [1] * most, DEVICE)

    def some(*shape):
        return torch.randn(*shape, generator=gen).bfloat16().to(DEVICE)

    for _ in range(3):
        batch = r.randint(1, most)
        lens = [[r.choice([0, 1, 2, 127, 128, 129, r.randint(0, 1400)]) for _ in range(batch)] for _ in range(2)]
        lens = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lens[0], lens[r.randint(0, 1)])]
        widths, held = (r.randint(1, pages), r.randint(1, pages)), batch * pages
        tables = [torch.randperm(held, generator=gen)[: batch * w].view(batch, w).int().to(DEVICE) for w in widths]
        tables[0][:, :: r.choice([2, 99])] = -1
        index_keys = PagedIndexKeys(some(held, sizes.index_key_heads, page, 64), tables[0], lens[0])
        kv = PagedKV(some(held, heads, page, 128), some(held, heads, page, 128), tables[1], lens[1])
        rows, splits, results = batch * new, r.choice([1, 1, 2]), []
        q, index_q = some(rows, heads * group, 128), some(rows, heads, 64)
        starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * new
        for absent_words in (None, words):
            held_scores = torch.full((rows * (heads * 8 + 1),), torch.nan, device=DEVICE)
            scores, visible = scored.scores_of(index_q, index_keys, sizes, held_scores)
            ids = torch.full((rows, heads, topk), -7, dtype=torch.int32, device=DEVICE)
            lse = torch.full(q.shape[:2], torch.nan, device=DEVICE)
            step = Step(q, kv, index_q, index_keys, 0.1, ids, torch.full_like(q, torch.nan), lse)
            scores, handed = scored.score(index_q, index_keys, starts, sizes, scores, visible, False, absent_words)
            assert handed == (absent_words is not None)
            if handed:
                written = torch.arange(scores.shape[2]) < sees(sizes, step)[:, None, None] - local
                assert_equal("written", scores.view(torch.int32) != ABSENT.value, written.expand(scores.shape))
                assert int((words.view(torch.int32) != ABSENT.value).sum()) == int(written.expand(scores.shape).sum())
            launch(sizes, scores, step, False, min(r.choice([1, 2]), topk), splits, partials_of(sizes, step, splits), handed)
            results.append((ids, step.out, step.lse))
        assert bool((words.view(torch.int32) == ABSENT.value).all())
        for name, *given in zip(("blocks", "out", "lse"), *results, strict=True):
            assert_equal(name, given[0], given[1].cpu())


def test_a_failed_run_leaves_no_score_behind(monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    plan = DecodePlan(
        max_batch=2, num_q_heads=2, num_kv_heads=1, head_dim=16, index_dim=16, page_size=16, max_pages=4, block_size=16, topk=2,
        device=DEVICE,
    )  # fmt: skip
    p = problem([1, 1], [20, 9], kv_heads=1, group=2, head_dim=16, dtype=torch.bfloat16).to(DEVICE)
    caches, left = paged(p, 16), torch.ones(5, device=DEVICE)
    plan._kernels.handed = left

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan._kernels, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        plan.run(p.q, caches[0], p.index_q, caches[1])
    assert_equal("handed", left.view(torch.int32), torch.full((5,), ABSENT.value, dtype=torch.int32))


@pytest.mark.parametrize(
    ("batch", "changes", "count"),
    [
        (300, {}, 256 * 2048),
        (100, {"num_q_heads": 64, "num_kv_heads": 4, "index_heads": 4}, 100 * 4 * 2048),
        (34, {}, 34 * 2048),
        (33, {}, None),  # four programs share a row
        (15, {"num_q_heads": 160, "num_kv_heads": 10, "index_heads": 10}, None),
        (300, {"num_blocks": 4096}, None),
        (300, {"new_tokens": 17}, None),
        (300, {"num_q_heads": 64, "num_kv_heads": 4}, None),  # one index head for four KV heads
    ],
)
def test_memory_for_scores_that_are_handed_on(batch, changes, count):
    sizes = Sizes(1, 16, 1, 128, 1, 1, 128, 128, 2048, 16, 0, 1, 128)._replace(**changes)
    served = [pairs_and_splits(b + 1, sizes) for b in range(batch)]
    words = _handed(batch, 2048 * 128, sizes, [pairs > 0 and splits <= 2 for pairs, splits in served], torch.device("cpu"))
    assert (None if words is None else words.numel()) == count
    assert words is None or bool((words.view(torch.int32) == ABSENT.value).all())


@on_a_hopper_gpu
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "room"),
    [
        (150, 1, 1, 41),
        (150, 2, 1, 41),
        (100, 1, 1, 2048),
        (30, 1, 4, 300),
        (64, 1, 4, 41),
        (5, 1, 1, 300),
        (9, 3, 2, 300),
        (20, 1, 1, 2048),
        (40, 1, 1, 41),
    ],
)
def test_in_plans(batch, tokens, heads, room, monkeypatch):
    """A plan that takes blocks best first selects the same ones as one whose programs select first, in a graph of layers with
    other index queries, whether scores are handed on or not, and with other lengths at the next replay. They are handed on
    from 16 sequences on, if no more than two programs share a row, as they do from 34 rows on."""
    width, sizes = 40, {"num_q_heads": 16 * heads, "num_kv_heads": heads, "head_dim": 128, "page_size": 128}
    lens = [(37 * i) % (width * 128) for i in range(batch)]
    p = problem(
        [tokens] * batch, lens, kv_heads=heads, index_heads=heads, index_key_heads=1, group=16, head_dim=128,
        dtype=torch.bfloat16, offsets=[n - tokens for n in lens],
    )  # fmt: skip
    caches, q, index_q = paged(p.to(DEVICE), 128), p.q.to(DEVICE), p.index_q.to(DEVICE)
    layers, lengths = [index_q, -index_q, index_q.flip(0)], [torch.tensor(x) for x in (lens, [n // 2 for n in lens], lens)]
    launched, launch_best = [], gluon_sm90_best.launch
    monkeypatch.setattr(gluon_sm90_best, "launch", lambda *given: launched.append((given[4], given[-1])) or launch_best(*given))
    rows, every = batch * tokens * heads, []
    pairs = 1 if rows > 132 else 2
    for best, handed in ((pairs, batch >= 16 and rows >= 34), (pairs, False), (0, False)):
        plan = DecodePlan(max_batch=batch, **sizes, max_pages=room, new_tokens=tokens, device=DEVICE)
        assert plan._kernels.best[-1] == pairs
        assert plan._kernels.hands_on[-1] == (rows >= 34)
        plan._kernels.best = [best] * batch
        plan._kernels.handed = plan._kernels.handed if handed else None
        plan._kernels.shared = plan._kernels.shared._replace(cuts=[None] * batch)
        plan.run(q, caches[0], index_q, caches[1], out=torch.empty_like(q))
        assert launched == [(pairs, handed)] * (best > 0)
        results = [(torch.empty_like(plan.blocks), torch.empty_like(q), torch.empty_like(plan.lse)) for _ in layers]
        launched.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer, (ids, out, lse) in zip(layers, results, strict=True):
                plan.run(q, caches[0], layer, caches[1], out=out)
                ids.copy_(plan.blocks)
                lse.copy_(plan.lse)
        launched.clear()
        every.append([])
        for length in lengths:
            for cache in caches:
                cache.seq_lens.copy_(length)
            for result in itertools.chain(*results):
                result.fill_(-7)
            graph.replay()
            every[-1] += [tuple(x.clone() for x in result) for result in results]
        if handed:
            bits = plan._kernels.handed.view(torch.int32)
            assert_equal("handed", bits, torch.full(bits.shape, ABSENT.value, dtype=torch.int32))
    for given, apart, selecting_first in zip(*every, strict=True):
        assert_equal("blocks", given[0], selecting_first[0].cpu())
        for name, mine, its in zip(("blocks", "out", "lse"), given, apart, strict=True):
            assert_equal(name, mine, its.cpu())
    blocks, *tested = every[0][0]
    layout = caches[0].layout(p.to(DEVICE).seqs, q.shape[0], DEVICE)
    truth = reference.sparse_attention(q.double(), caches[0], None, blocks, layout, 128, 128**-0.5, True)
    for name, *given in zip(("out", "lse"), tested, every[2][0][1:], truth, strict=True):
        assert_close(name, *given)


@pytest.mark.parametrize(("batch", "served"), [(40, True), (33, False)])
def test_what_plans_hold(batch, served, monkeypatch):
    """A plan on an H200 hands scores on where two programs share a row, and has room for the partials of all rows."""
    monkeypatch.setattr(memory, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(memory.devices, "facts", lambda device: COMPILE_TARGETS[90])
    sizes = Sizes(1, 16, 1, 128, 1, 1, 128, 128, 300, 16, 0, 1, 128)
    held = memory.PlanMemory(sizes, batch, 300, torch.bfloat16, torch.device("cpu"))
    assert held.best == [pairs_and_splits(b + 1, sizes)[0] for b in range(batch)] == [0] * 4 + [2] * (batch - 4)
    assert held.hands_on == [False] * 33 + [True] * (batch - 33)
    assert (held.handed is not None) == served
    assert held.partials.rows.numel() >= 16 * 128 * max(b * pairs_and_splits(b, sizes)[1] for b in range(1, batch + 1))
    assert held.partials.arrived.numel() >= batch


@pytest.mark.parametrize(("hopper", "tokens", "last"), [(True, 1, 4), (True, 2, 2), (False, 1, 16)])
def test_one_launch_is_for_rows_that_are_not_taken_best_first(hopper, tokens, last, monkeypatch):
    """With 16 blocks a row it is left to up to four tokens times KV heads; elsewhere it serves steps of up to 264 outputs."""
    monkeypatch.setattr(memory, "runs_hopper_kernels", lambda device: hopper)
    monkeypatch.setattr(memory.devices, "facts", lambda device: COMPILE_TARGETS[90])
    sizes = Sizes(tokens, 16, 1, 128, 1, 1, 128, 128, 256, 16, 0, 1, 128)
    held = memory.PlanMemory(sizes, 17, 256, torch.bfloat16, torch.device("cpu"))
    assert [cut is not None for cut in held.one_launch] == [batch <= last for batch in range(1, 18)]
