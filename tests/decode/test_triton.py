# SPDX-License-Identifier: MIT
"""The decode layer of one launch is right with its three kinds of programs in turn, in the interpreter without a GPU."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from openmsa import DecodePlan  # noqa: E402
from openmsa.block_topk.triton_ids import chosen_ids, load_words, select  # noqa: E402
from openmsa.decode import memory, triton_layer  # noqa: E402
from openmsa.decode import plan as decode  # noqa: E402
from openmsa.decode.memory import MOST_SPLITS, configure  # noqa: E402
from openmsa.decode.sizes import Sizes  # noqa: E402
from openmsa.decode.triton_layer import ATTEND, EVERY, MERGE, SCORE, Step, Words  # noqa: E402
from openmsa.runtime import devices  # noqa: E402
from openmsa.runtime.devices import COMPILE_TARGETS  # noqa: E402
from openmsa.sparse_attention import triton_decode_walk  # noqa: E402
from openmsa.testing.compare import assert_close, assert_equal  # noqa: E402
from openmsa.testing.inputs import paged, problem  # noqa: E402
from tests import oracle  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
M3 = Sizes(1, 64, 4, 128, 4, 1, 128, 128, 256, 16, 0, 1, 128)


@triton.jit
def _select_kernel(
    words, out, seen, num_blocks, REPS: tl.constexpr, TOPK: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr
):  # fmt: skip
    low = tl.minimum(seen, INIT)
    high = tl.maximum(seen - LOCAL, low)
    row, _ = load_words(words, tl.full([], 1, tl.int32), low, high, num_blocks, REPS, False)
    o_k = tl.arange(0, TOPK)
    tl.store(out + o_k, chosen_ids(select(row, seen, REPS, TOPK, INIT, LOCAL), o_k, REPS))


SCORES = {
    "normal": lambda n: torch.randn(n),
    "ties": lambda n: torch.randint(-2, 3, (n,)).float(),
    "zeros of both signs": lambda n: torch.where(torch.rand(n) < 0.5, 0.0, -0.0),
    "few": lambda n: torch.where(torch.rand(n) < 0.05, torch.randn(n), -torch.inf),
    "huge": lambda n: torch.randn(n) * 1e38 * 3,
    "infinite": lambda n: torch.where(torch.rand(n) < 0.2, torch.inf, torch.randn(n)),
    "tiny": lambda n: torch.randn(n) * 1e-42,
    "one value": lambda n: torch.full((n,), -3.5),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize(
    ("num_blocks", "topk", "init", "local"), [(256, 16, 0, 1), (100, 8, 2, 2), (20, 32, 0, 0), (64, 4, 2, 2)]
)
def test_selection_is_exact(name, num_blocks, topk, init, local):
    torch.manual_seed(num_blocks)
    scores = SCORES[name](num_blocks)
    for seen in (num_blocks, num_blocks - 1, 3, 0):
        words = (torch.ones(num_blocks, dtype=torch.int64) << 32) | (scores.view(torch.int32).long() & 0xFFFFFFFF)
        out = torch.full((topk,), -7, dtype=torch.int32, device=DEVICE)
        reps = max(triton.next_power_of_2(num_blocks) // 32, 1)
        _select_kernel[(1,)](words.to(DEVICE), out, seen, num_blocks, reps, topk, init, local)
        expected = torch.tensor(oracle.select(scores.tolist(), seen, topk, init, local), dtype=torch.int32)
        assert_equal(f"ids of {seen}", out.cpu(), expected)


CASES = [  # new_tokens, kv_heads, group, head_dim, index_heads, block, page, topk, keys, tiles, share
    (1, 2, 4, 64, 2, 64, 128, 4, 32, 1, 1),
    (3, 2, 3, 32, 1, 32, 128, 5, 32, 2, 2),
    (1, 1, 20, 48, 1, 256, 256, 2, 64, 3, 4),
]


def _layer(p, kv, index_keys, tokens, dim, block, topk, cut):
    """Returns blocks, output and lse of one layer; cut: keys and tiles of an attention program, tiles of a scoring program."""
    heads, index_heads = kv.num_heads, p.index_q.shape[1]
    kv, index_keys = (type(c)(**{name: x.to(DEVICE) for name, x in vars(c).items()}) for c in (kv, index_keys))
    sizes = Sizes(
        tokens, p.q.shape[1], heads, dim, index_heads, 1, 32, kv.page_size, kv.capacity // block, topk, 0, 1, block
    )  # fmt: skip
    config = _config(sizes, 3, *cut)
    splits = 3 * tokens * sizes.num_q_heads * config.attend.splits
    words = Words.allocate(3 * tokens * index_heads * sizes.num_blocks, splits, dim, DEVICE)
    blocks = torch.full((3 * tokens, index_heads, topk), -7, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(p.q, torch.nan, device=DEVICE)
    lse = torch.full(p.q.shape[:2], torch.nan, device=DEVICE)
    step = Step(p.q.to(DEVICE), kv, p.index_q.to(DEVICE), index_keys, 0.2, blocks, out, lse)
    for kind in (EVERY,) if CUDA else (SCORE, ATTEND, MERGE):
        triton_layer.launch(config, sizes, words, step, kind=kind.value)
    return blocks.cpu(), out.cpu(), lse.cpu()


@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim", "index_heads", "block", "page", "topk", "keys", "tiles", "share"), CASES
)
def test_programs_against_the_truth(tokens, heads, group, dim, index_heads, block, page, topk, keys, tiles, share):
    """Programs agree with the truth on ragged and empty sequences, in several splits, with tiles of several blocks and blocks
    of several tiles, and with NaN where no key is."""
    k_lens = (3 * block + 5, 0, block - 1)
    p = problem(
        [tokens] * 3, k_lens, kv_heads=heads, group=group, head_dim=dim, index_dim=32, index_heads=index_heads,
        integer_index=True, dtype=torch.float16,
    )  # fmt: skip
    blocks, out, lse = _layer(p, *paged(p, page), tokens, dim, block, topk, (keys, tiles, share))
    expected = oracle.select_blocks(p, oracle.block_scores(p, block), block, topk, 0, 1)
    assert_equal("blocks", blocks, expected.to(torch.int32))
    reads = oracle.reads_of_blocks(expected, block)
    truth, honest = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", lse, honest[1], truth[1])


def test_caches_that_disagree_about_their_lengths():
    """The fewer keys count, and no program waits for scores that none makes."""
    p = problem([1] * 3, (600, 200, 70), kv_heads=1, group=16, head_dim=64, index_dim=32, index_heads=1, dtype=torch.float16)
    results = []
    for lens in (((600, 70, 70), (300, 200, 0)), ((300, 70, 0), (300, 70, 0))):
        caches = paged(p, 128)
        for cache, own in zip(caches, lens, strict=True):
            cache.seq_lens.copy_(torch.tensor(own, dtype=torch.int32))
        results.append(_layer(p, *caches, 1, 64, 64, 3, (64, 1, 2)))
    for name, one, other in zip(("blocks", "out", "lse"), *results, strict=True):
        assert_equal(name, one, other)


def _config(sizes, batch, keys, tiles, share):
    """Returns a configuration made by hand, so that small problems are cut as large ones are."""
    base = configure(1, sizes._replace(page_size=256), COMPILE_TARGETS[90])
    tokens, total = batch * sizes.new_tokens, triton_layer.Tile.of(sizes.block_size).count(sizes.num_blocks)
    splits = -(-sizes.topk * sizes.block_size // (keys * tiles))
    row_tiles = triton_decode_walk.row_tiles(sizes.num_q_heads // sizes.num_kv_heads, sizes.head_dim)[1]
    attend = base.attend._replace(keys=keys, tiles=triton.next_power_of_2(tiles), splits=splits, num_stages=2)
    return base._replace(
        attend=attend,
        score_tiles=share,
        score_splits=-(-total // share),
        scoring=batch * -(-total // share),
        attending=tokens * sizes.num_kv_heads * row_tiles * splits,
        merging=tokens * sizes.num_q_heads * base.merge_parts if splits > 1 else 0,
    )


def test_the_choice_is_a_pure_function_of_sizes():
    hopper = COMPILE_TARGETS[90]
    one = configure(1, M3, hopper)
    assert (one.scoring, one.attending, one.merging, one.attend.keys, one.attend.tiles) == (128, 128, 128, 64, 1)
    two, four = configure(2, M3, hopper), configure(4, M3, hopper)
    assert (two.scoring, two.attending, two.merging, two.attend.keys, two.attend.tiles) == (256, 256, 256, 64, 1)
    assert (four.scoring, four.attending, four.merging, four.attend.keys, four.attend.tiles) == (128, 128, 256, 128, 2)
    assert [configure(b, M3, hopper) is not None for b in (1, 2, 4, 8, 32)] == [True, True, True, False, False]
    room = configure(1, M3._replace(num_blocks=2048), hopper)
    assert room.strided
    assert not one.strided
    assert (room.score_splits, room.score_tiles, room.reps) == (128, 16, one.reps)
    assert configure(4, M3._replace(num_blocks=2048), hopper).strided
    assert configure(5, M3._replace(num_blocks=2048, num_q_heads=16, num_kv_heads=1), hopper) is None
    assert configure(1, M3._replace(num_blocks=2049), hopper) is None
    many = configure(1, M3._replace(topk=64, num_q_heads=16, num_kv_heads=1), hopper)
    assert many.attend.splits <= MOST_SPLITS
    assert configure(1, M3._replace(page_size=16), hopper) is None
    assert configure(1, M3._replace(page_size=64), hopper) is None


STRIDED = [  # new_tokens, index_heads, block, page, topk, init, local
    (1, 2, 32, 128, 4, 0, 1),
    (3, 1, 64, 128, 5, 1, 2),
    (2, 2, 256, 256, 3, 0, 1),
    (1, 1, 128, 128, 3, 2, 1),  # every block of a selection is forced
]


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize(("tokens", "index_heads", "block", "page", "topk", "init", "local"), STRIDED)
def test_scoring_in_strides_gives_the_same_bits(monkeypatch, tokens, index_heads, block, page, topk, init, local, ties):
    """Rows that each warp holds and rows that a program holds, ragged and empty sequences, also where blocks have equal scores;
    and caches of which the shorter one counts."""
    if not CUDA:
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
        monkeypatch.setattr(devices, "_INTERPRETED", COMPILE_TARGETS[90])  # whose rows fit one launch
    lens = (57 * block + 5, 0, block - 1, 12 * block)
    p = problem(
        [tokens] * 4, lens, kv_heads=2, group=4, head_dim=64, index_dim=32, index_heads=index_heads, integer_index=True,
        dtype=torch.float16, seed=block,
    )  # fmt: skip
    if ties:
        p.index_q.zero_()[..., 0] = 1
        p.index_k.zero_()[..., 0] = -(torch.arange(len(p.index_k)) // block * 5 % 7 // 2)[:, None]
    caches = [type(c)(**{name: x.to(DEVICE) for name, x in vars(c).items()}) for c in paged(p, page)]
    for cache in caches:
        table = torch.full((4, 64 * block // page), -1, dtype=torch.int32, device=DEVICE)
        table[:, : cache.page_table.shape[1]] = cache.page_table
        cache.page_table = table

    def results(plan):
        out = torch.full_like(p.q, torch.nan, device=DEVICE)
        plan.run(p.q.to(DEVICE), caches[0], p.index_q.to(DEVICE), caches[1], out=out)
        return plan.blocks.cpu().clone(), out.cpu(), plan.lse.cpu().clone()

    plans = []
    for most, near in ((0, 256), (12, 32)):
        monkeypatch.setattr(memory, "STRIDED_TOKENS", most)
        monkeypatch.setattr(memory, "LAYER_BLOCKS", near)
        plan = DecodePlan(
            max_batch=4, num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=page, max_pages=64 * block // page,
            new_tokens=tokens, index_heads=index_heads, index_dim=32, topk=topk, block_size=block, init_blocks=init,
            local_blocks=local, certified_keys=False, dtype=torch.float16, device=DEVICE,
        )  # fmt: skip
        assert plan._kernels.one_launch[3].strided == (most > 0)
        plans.append(plan)
    for name, one, other in zip(("blocks", "out", "lse"), *map(results, plans), strict=True):
        assert_equal(name, one, other)
    found = []
    for cut in ((0, 1), (1, 0), (1, 1)):
        for cache, by in zip(caches, cut, strict=True):
            cache.seq_lens[0] = lens[0] - 9 * block * by
        found.append(results(plans[1]))
    for shorter in found[:2]:
        for name, one, other in zip(("blocks", "out", "lse"), shorter, found[2], strict=True):
            assert_equal(name, one, other)
