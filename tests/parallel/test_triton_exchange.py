# SPDX-License-Identifier: MIT
"""The kernels of the symmetric exchange do what the collectives do: in the interpreter every rank puts its words, then each
gets them."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from openmsa.block_topk.triton_certified import Selection
from openmsa.parallel import ContextDecodePlan, chain, exchange, symmetric, triton_exchange
from openmsa.parallel.exchange import Choice
from openmsa.parallel.ranks import Ranks
from openmsa.parallel.symmetric import Symmetric
from openmsa.parallel.triton_exchange import FIRST_LAUNCH, Mailbox, Reach
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import problem
from tests.parallel import cases
from tests.runtime.uninterpreted import passes

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="one process has one rank on a GPU; see tests/multi_gpu"),
]


def mailboxes(ranks, words):
    """Returns one mailbox a rank, and a function that makes the counters those of launch `n`."""
    memory = [torch.zeros(words, dtype=torch.int64) for _ in range(ranks)]
    peers = torch.tensor([x.data_ptr() for x in memory])
    counters = [torch.full((1,), FIRST_LAUNCH) for _ in range(ranks)]

    def open_launch(n):
        for counter in counters:
            counter.fill_(FIRST_LAUNCH * n)

    return [Mailbox(peers, x, counter) for x, counter in zip(memory, counters, strict=True)], open_launch


def candidates(ranks, heads, tokens, blocks, topk, visible, page_blocks, seed):
    """Scores of all blocks of the sequences, with ties, infinities and NaN, and what each rank holds and offers of them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(heads, tokens, blocks, generator=generator)
    scores[0] = scores[0].round() * 0.0 + scores[0].round().clamp(-1, 1)
    scores[:, 0, ::3] = torch.nan
    scores[:, 1 % tokens, 1::4] = torch.inf
    scores[:, 2 % tokens, ::2] = -0.0
    seen = torch.arange(blocks) < visible[:, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    block = torch.arange(blocks)
    for rank in range(ranks):
        held = block[block // page_blocks % ranks == rank]
        own = scores[:, :, held].contiguous()
        best = own.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).argsort(dim=-1, descending=True, stable=True)
        best = best[..., :topk].masked_fill(~(own.gather(-1, best[..., :topk]) > -torch.inf), -1)
        best = torch.nn.functional.pad(best, (0, topk - best.shape[-1]), value=-1)
        yield own, best.transpose(0, 1).int().contiguous(), scores


@pytest.mark.parametrize(
    ("ranks", "heads", "topk", "init", "local", "page_blocks"),
    [(2, 2, 4, 0, 1, 1), (3, 1, 5, 1, 2, 2), (4, 2, 16, 0, 0, 1), (2, 1, 1, 1, 0, 1), (1, 2, 8, 3, 3, 4), (8, 1, 16, 2, 1, 1)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_choose(ranks, heads, topk, init, local, page_blocks, fused):
    """Every rank chooses the best of all candidates. fused: whether the kernel that finds the candidates also sends them."""
    from openmsa.block_topk import reference

    tokens, choice = 5, Choice(topk, init, local, page_blocks)
    room = tokens * heads + 1
    mail, open_launch = mailboxes(ranks, triton_exchange.choice_words(room, topk, ranks))
    for launch, blocks in enumerate((40, 23, 2 * ranks * page_blocks), 1):
        visible = torch.tensor([blocks, blocks - 1, max(blocks - 7, 0), 1, 0], dtype=torch.int32)
        offers = list(candidates(ranks, heads, tokens, blocks, topk, visible, page_blocks, launch))
        wanted = reference.select_from_scores(offers[0][2], topk, visible, init, local)
        results = [[torch.full((tokens, heads, topk), -77, dtype=torch.int32) for _ in range(2)] for _ in range(ranks)]
        for put in (True, False):
            open_launch(launch)
            for rank, (scores, ids, _) in enumerate(offers):
                to = (*results[rank], mail[rank], room, choice, Reach(rank, ranks, 0), put, not put)
                if fused:
                    of_rank = torch.arange(blocks)
                    of_rank = of_rank[of_rank // page_blocks % ranks == rank]
                    held = (of_rank < visible[:, None]).sum(1, dtype=torch.int32)
                    triton_exchange.launch_select(scores, held, visible, *to)
                else:
                    triton_exchange.launch_choose(scores, ids, visible, *to)
        page, in_page = wanted // page_blocks, wanted % page_blocks
        for rank, (blocks_of_all, mine) in enumerate(results):
            assert_equal("blocks", blocks_of_all, wanted)
            own = torch.where((wanted >= 0) & (page % ranks == rank), page // ranks * page_blocks + in_page, topk * 1000)
            own = own.sort(-1).values
            assert_equal("mine", mine, own.masked_fill(own == topk * 1000, -1).int())


def test_launches_alternate_between_halves():
    """What a rank that is ahead puts does not reach the words of the launch before."""
    choice, room = Choice(2, 0, 0, 1), 1
    mail, open_launch = mailboxes(2, triton_exchange.choice_words(room, 2, 2))
    first, second = (torch.tensor([[[x, x + 1.0]]]) for x in (1.0, 5.0))
    ids, visible = torch.tensor([[[0, 1]]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    results = [torch.empty(1, 1, 2, dtype=torch.int32) for _ in range(2)]

    def step(rank, launch, scores, put):
        open_launch(launch)
        reach = Reach(rank, 2, 0)
        triton_exchange.launch_choose(scores, ids, visible, *results, mail[rank], room, choice, reach, put=put, get=not put)

    step(0, 1, first, True)
    step(1, 1, second, True)
    step(1, 2, first * 100, True)  # rank 1 is one launch ahead
    step(0, 1, first, False)
    assert results[0].tolist() == [[[1, 3]]]  # the blocks of rank 1, whose scores were 5 and 6
    step(0, 2, second, True)
    step(0, 2, second, False)
    assert results[0].tolist() == [[[1, 3]]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "tokens", "heads", "dim"), [(2, 3, 2, 64), (3, 1, 5, 80), (1, 2, 1, 16), (4, 1, 3, 128)])
@pytest.mark.parametrize("half_the_bytes", [False, True])
def test_merge(ranks, tokens, heads, dim, dtype, half_the_bytes):
    generator = torch.Generator().manual_seed(dim)
    parts = torch.randn(ranks, tokens, heads, dim, generator=generator).to(dtype)
    lses = torch.randn(ranks, tokens, heads, generator=generator) * 3
    lses[0, 0, 0] = -torch.inf  # a rank that holds none of the row's blocks
    parts[0, 0, 0] = 0
    lses[:, -1, -1] = -torch.inf  # a row that sees nothing
    parts[:, -1, -1] = 0
    truth = exchange.merge_partials(parts.double(), lses.double())
    honest = exchange.merge_partials(parts.float(), lses)
    room = tokens * heads + 3
    words = triton_exchange.blend_words if half_the_bytes else triton_exchange.merge_words
    launch_one = triton_exchange.launch_blend if half_the_bytes else triton_exchange.launch_merge
    mail, open_launch = mailboxes(ranks, words(room, dim, ranks))
    for box in mail if half_the_bytes else ():
        box.words.fill_(-1)
    results = [(torch.full_like(parts[0], torch.nan), torch.full_like(lses[0], torch.nan)) for _ in range(ranks)]
    for launch in (1, 2, 3):
        for put in (True, False):
            open_launch(launch)
            for rank in range(ranks):
                of_rank = (parts[rank] if launch == 3 else -parts[rank]).contiguous()
                reach = Reach(rank, ranks, 0)
                launch_one(of_rank, lses[rank].contiguous(), *results[rank], mail[rank], room, reach, put=put, get=not put)
    for out, lse in results:
        assert_close("out", out, honest[0].to(dtype), truth[0])
        assert_close("lse", lse, honest[1], truth[1])
        assert_equal("out of rank 0", out, results[0][0])
    assert not half_the_bytes or all((box.words == -1).all() for box in mail)


def test_results_that_look_like_empty_words_arrive():
    """A NaN whose bits are those of an empty word is sent as another NaN."""
    part = torch.full((1, 1, 16), -1, dtype=torch.int16).view(torch.bfloat16)
    lse = torch.full((1, 1), -1, dtype=torch.int32).view(torch.float32)
    mail, open_launch = mailboxes(2, triton_exchange.blend_words(1, 16, 2))
    for box in mail:
        box.words.fill_(-1)
    out, out_lse = torch.zeros_like(part), torch.zeros_like(lse)
    open_launch(1)
    triton_exchange.launch_blend(part, lse, out, out_lse, mail[0], 1, Reach(0, 2, 0), put=True, get=False)
    assert (mail[1].words.view(torch.int32) != -1).sum() == (4 + 1) * 2
    triton_exchange.launch_blend(part, lse, out, out_lse, mail[1], 1, Reach(1, 2, 0), put=False, get=True)
    assert out.isnan().all()


def test_wide_numbers_are_refused():
    """Words carry float32 scores and 16-bit results; other dtypes are not rounded in silence."""
    kernels, lse = Symmetric(Ranks(None, 0, 2), torch.device("cpu"), 1.0), torch.zeros(1, 2)
    for dtype in (torch.float32, torch.float64):
        part = torch.zeros(1, 2, 16, dtype=dtype)
        with pytest.raises(NotImplementedError, match=f"q has no 16-bit results, got {dtype}"):
            kernels.merge(part, lse, part, lse)
    ids, seen = torch.zeros(1, 1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"scores are not float32, got torch.float64"):
        kernels.choose(torch.zeros(1, 1, 2, dtype=torch.float64), ids, seen, Choice(2, 0, 1, 1))


def test_memory_that_graphs_write_to_is_kept(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(symmetric, "_Room", lambda group, device, words, rows, start: (words, rows))
    kernels = Symmetric(Ranks(object(), 0, 2), torch.device("cpu"), 1.0)
    few, many = kernels._room("merge", 9, 2), kernels._room("merge", 9, 8)
    assert (few, many) == ((9, 2), (9, 8))
    assert kernels._room("merge", 9, 2) is few
    assert kernels._room("merge", 9, 8) is many


def test_many_candidates_are_refused():
    assert triton_exchange.refuse_choice(16, 8) is None
    assert "must be at most 256, got 512" in triton_exchange.refuse_choice(64, 4)


@pytest.mark.parametrize(("new", "index"), [(1, "plain"), (2, "plain"), (1, "certified")])
def test_a_chain_of_launches_gives_what_stages_give(monkeypatch, new, index):
    """One rank runs the four launches of a layer, or six by way of bounds, and finds what the stages find."""
    lens, options = (300, 40, 0, 129), {"topk": 3, "block_size": 16, "init_blocks": 1}
    p = problem([new] * 4, lens, dtype=torch.bfloat16, **cases.SMALL)
    kv, keys = cases.spread_caches(p, 0, 1, 32, ("plain", index))
    arguments = {"seq_lens": torch.tensor(lens, dtype=torch.int32), "page_table": kv.page_table, "page_size": 32}
    plan = ContextDecodePlan(**arguments, new_tokens=new, **options)
    blocks, lse = plan.select(p.index_q, keys.keys), torch.empty(p.q.shape[:2])
    out = plan.attend(p.q, kv.k, kv.v, lse=lse)

    def room(self, use, words, rows):
        mail = mailboxes(1, words * rows)[0][0]
        mail.words.fill_(-(use == "blend"))
        return SimpleNamespace(mail=mail, rows=rows)

    monkeypatch.setattr(Symmetric, "_room", room)
    monkeypatch.setattr(chain, "CHAINED", True)
    monkeypatch.setattr(chain, "BOUNDS_PAY", 0)
    monkeypatch.setattr(chain.SCORING, "choice", lambda *_: SimpleNamespace(name="triton"))
    plan._chain = chain.Chain(Symmetric(Ranks(None, 0, 1), torch.device("cpu"), 1.0), plan._token_lens, 16)
    counted, score_open = [], Selection.score_open
    monkeypatch.setattr(Selection, "score_open", lambda *a: counted.append(score_open(*a)))
    assert_equal("blocks", plan.select(p.index_q, keys.keys), blocks)
    assert len(counted) == (index == "certified")
    chained_lse = torch.full_like(lse, torch.nan)
    chained = plan.attend(p.q, kv.k, kv.v, lse=chained_lse)
    torch.testing.assert_close(chained, out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(chained_lse, lse, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not version("triton").startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_all_ranks_round_sums_alike():
    """See `tests.parallel.compiled`, in a process whose kernels are not interpreted."""
    passes("tests.parallel.compiled")
