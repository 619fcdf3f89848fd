# SPDX-License-Identifier: MIT
"""An attention plan gives what `msa_attention` gives, layer after layer, on every device, and in CUDA graphs and streams."""

import itertools

import pytest
import torch

from openmsa import E4M3, NVFP4, AttentionPlan, CertifiedKeys, PagedIndexKeys, PagedKV, Sequences, msa_attention
from openmsa.attention import CALLS
from openmsa.plan import LAYERS
from openmsa.runtime import launch_graph
from tests.contract import DEVICES

LENGTHS = {
    "prefill": [(300, 300), (41, 41)],
    "chunked": [(60, 500), (130, 333)],
    "few": [(20, 700)],
    "decode": [(1, 300), (1, 7), (1, 511)],
    "mixed": [(1, 300), (0, 0), (150, 400), (5, 5), (9, 3), (1, 90)],
}
PAGE = 32


class Layers:
    """Layers of one step: lengths are shared, queries and caches are each layer's own."""

    def __init__(self, lengths, device, packed=False, form="plain", heads=(8, 2), dim=64, dtype=None, spare=0):
        self.device, self.packed, self.form, self.heads, self.dim = device, packed, form, heads, dim
        self.dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        self.new, self.keys = [n for n, _ in lengths], [n for _, n in lengths]
        self.cu, self.cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(device) for n in (self.new, self.keys))
        self.lens = self.cu_k.diff().int()
        counts = [-(-n // PAGE) for n in self.keys]
        self.pages = sum(counts) + 3
        self.table = torch.full((len(lengths), max(counts) + spare), -1, dtype=torch.int32)
        order = iter(torch.randperm(self.pages).tolist())
        for b, n in enumerate(counts):
            self.table[b, :n] = torch.tensor([next(order) for _ in range(n)], dtype=torch.int32)
        self.table = self.table.to(device)

    def plan(self, **options):
        sizes = {"total_q": sum(self.new), "max_seqlen_q": max(self.new), "max_seqlen_k": max(self.keys)}
        where = {"cu_seqlens_k": self.cu_k}
        if not self.packed:
            where = {"page_table": self.table, "seq_lens": self.lens, "page_size": PAGE}
        return AttentionPlan(**{"cu_seqlens_q": self.cu, "topk": 4, "block_size": 32} | sizes | where | options)

    def layer(self):
        """Returns q, k, v, index_q, index_k with NaN wherever no key lies."""
        (q_heads, kv_heads), total = self.heads, sum(self.new)
        q, index_q = (
            torch.randn(total, n, d, device=self.device, dtype=self.dtype) for n, d in ((q_heads, self.dim), (kv_heads, 32))
        )
        rows = (sum(self.keys), kv_heads) if self.packed else (self.pages, kv_heads, PAGE)
        both = torch.randn(*rows, 2 * self.dim, device=self.device, dtype=self.dtype)
        index = torch.randn(*(n if i != 1 else 1 for i, n in enumerate(rows)), 32, device=self.device, dtype=self.dtype)
        k, v = both[..., : self.dim], both[..., self.dim :]
        if self.form == "e4m3":
            k, v, index = (E4M3.quantize(x, scale) for x, scale in ((k, 0.1), (v, 0.2), (index, 0.3)))
        elif self.form == "nvfp4":
            k, v, index = (NVFP4.quantize(x) for x in (k, v, index))
        elif self.form == "certified":
            index = CertifiedKeys.quantize(index)
        return q, k, v, index_q, index

    def expected(self, q, k, v, index_q, index, **options):
        lengths = Sequences(self.cu, self.cu_k if self.packed else None, max(self.new), max(self.keys))
        keys = (k, v, index_q, index)
        if not self.packed:
            keys = (PagedKV(k, v, self.table, self.lens), None, index_q, PagedIndexKeys(index, self.table, self.lens))
        options = {"block_size": 32, "return_lse": True, "certified": self.form == "certified"} | options
        return msa_attention(q, *keys, 4, lengths, **options)


def poisoned(q):
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
    return out, torch.full(q.shape[:2], torch.nan, dtype=torch.float32, device=q.device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("packed", [False, True], ids=["paged", "packed"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_layer_is_that_of_a_call(device, packed, lengths):
    step = Layers(LENGTHS[lengths], device, packed)
    plan = step.plan()
    for _ in range(3):
        layer = step.layer()
        out, lse = poisoned(layer[0])
        assert plan.run(*layer, out=out, lse=lse) is out
        expected, expected_lse = step.expected(*layer)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert torch.equal(plan.run(*layer), expected), "out and lse may be left out"
        q, k, v, index_q, index = layer
        assert torch.equal(plan.attend(q, k, v, plan.select(index_q, index)), expected)
    assert plan.not_recorded == ()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["e4m3", "nvfp4", "certified"])
@pytest.mark.parametrize("lengths", ["chunked", "mixed"])
def test_formats(device, form, lengths):
    step = Layers(LENGTHS[lengths], device, form=form)
    plan = step.plan(certified=form == "certified")
    for _ in range(3):
        layer = step.layer()
        assert torch.equal(plan.run(*layer), step.expected(*layer)[0])


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_queries_change_nothing(device):
    step = Layers(LENGTHS["mixed"], device)
    plan = step.plan(query_chunk=37)
    for _ in range(3):
        layer = step.layer()
        assert torch.equal(plan.run(*layer), step.expected(*layer, query_chunk=37)[0])
    assert plan.not_recorded == ()


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_several_kinds_share_a_plan(device):
    steps = [
        Layers(LENGTHS["chunked"], device, heads=heads, dim=dim) for heads, dim in (((8, 2), 64), ((4, 4), 32), ((16, 1), 64))
    ]
    for step in steps[1:]:
        step.table, step.pages = steps[0].table, steps[0].pages
    plan = steps[0].plan()
    for step in (*steps, *steps, *steps[::-1]):
        layer = step.layer()
        assert torch.equal(plan.run(*layer), step.expected(*layer)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [None, 37])
def test_refresh_follows_the_tensors(device, chunk):
    """Lengths, starts and pages that change in place, within the bounds, are those of the next layers."""
    step = Layers([(40, 200), (90, 300), (1, 64)], device, spare=1)
    plan = step.plan(max_seqlen_q=131, max_seqlen_k=320, query_chunk=chunk)
    plan.run(*step.layer())
    step.new, step.keys = [90, 1, 40], [150, 310, 70]
    step.cu.copy_(torch.tensor([0, 90, 91, 131]))
    step.lens.copy_(torch.tensor(step.keys))
    step.table[:, :10] = torch.randperm(step.pages)[: 3 * 5].repeat(2).view(3, 10).to(device)  # pages may be shared
    plan.refresh()
    for _ in range(2):
        layer = step.layer()
        assert torch.equal(plan.run(*layer), step.expected(*layer, query_chunk=chunk)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [None, 37])
def test_padding_is_neither_read_nor_written(device, chunk):
    """Queries past the last start, as a graph has them where a batch is smaller, on every device."""
    step = Layers([(90, 300), (40, 200), (1, 64)], device)
    plan = step.plan(total_q=131, query_chunk=chunk)
    for last in (131, 100, 90, 131):
        cut = [min(start, last) for start in (0, 90, 130, 131)]
        step.new = [stop - start for start, stop in itertools.pairwise(cut)]
        step.cu.copy_(torch.tensor(cut))
        plan.refresh()
        q, k, v, index_q, index = step.layer()
        padded = [torch.cat((x, x.new_full((131 - last, *x.shape[1:]), torch.nan))) for x in (q, index_q)]
        out, lse = poisoned(padded[0])
        plan.run(padded[0], k, v, padded[1], index, out=out, lse=lse)
        for got, wanted in zip((out, lse), step.expected(q, k, v, index_q, index, query_chunk=chunk), strict=True):
            assert torch.equal(got[:last], wanted)
            assert got[last:].isnan().all()
    step.cu[-1] += 1
    if device == "cpu":
        with pytest.raises(ValueError, match="total_q must be at least 132, got 131"):
            plan.refresh()


@pytest.mark.parametrize("device", DEVICES)
def test_no_queries(device):
    step = Layers([(0, 40), (0, 0)], device)
    assert step.plan().run(*step.layer()).shape == (0, 8, 64)


def test_bad_input_is_named():
    step = Layers(LENGTHS["chunked"], "cpu")
    q, k, v, index_q, index = step.layer()
    memory = torch.zeros_like(q)
    inside = memory.view(-1)[: index.numel()].view_as(index)
    plan = step.plan()
    for change, error, message in (
        ({"total_q": -1}, ValueError, "total_q must be at least 0, got -1"),
        ({"total_q": 2**31}, ValueError, "total_q must be from 0 to 2147483647, got 2147483648"),
        ({"page_size": 2**31}, ValueError, "page_size must be from 1 to 2147483647, got 2147483648"),
        ({"topk": 0}, ValueError, "^topk must be from 1 to 64, got 0"),
        ({"block_size": 7}, ValueError, "^block_size must be from 16 to 256, got 7"),
        ({"local_blocks": 65}, ValueError, "init_blocks \\+ local_blocks must be at most topk"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale must be a float, got str"),
        ({"max_seqlen_q": 2}, ValueError, "^max_seqlen_q must be at least the longest sequence"),
        ({"max_seqlen_k": "9"}, TypeError, "^max_seqlen_k must be an int, got str"),
        ({"q_offset": torch.ones(2)}, TypeError, "^q_offset must have dtype torch.int32 or torch.int64, got torch.float32"),
        ({"total_q": 189}, ValueError, r"^total_q must be at least 190, got 189"),
        ({"seq_lens": None}, ValueError, "seq_lens must be given beside page_table"),
        ({"page_table": None}, ValueError, "cu_seqlens_k alone must be given where page_table is None"),
        ({"page_size": None}, TypeError, "page_size must be an int"),
        ({"seq_lens": step.lens[:1]}, ValueError, r"seq_lens.shape\[0\] must be 2"),
        ({"seq_lens": step.lens.long()}, TypeError, "seq_lens must have dtype torch.int32"),
        ({"impl": "fastest"}, ValueError, "impl must be 'auto' or one of"),
        ({"cu_seqlens_q": [0, 190]}, TypeError, "cu_seqlens_q must be a torch.Tensor"),
        ({"certified": torch.ones(3)}, TypeError, "certified must be True or False, got Tensor"),
        ({"query_chunk": 0}, ValueError, "query_chunk must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=message):
            step.plan(**change)
    for call, message in (
        (lambda: plan.run(q[0, 0, 0], k, v, index_q, index), r"q must have more than 0 dimensions, got shape \(\)"),
        (
            lambda: plan.run(q, k, v, index_q, index[:, :, :16]),
            r"index_k.shape\[2\] must be 32 \(page_size of the plan\), got 16",
        ),
        (lambda: plan.run(q, k[:, :, :16], v[:, :, :16], index_q, index), r"k.shape\[2\] must be 32 \(page_size of the plan\)"),
        (lambda: plan.run(q[:9], k, v, index_q, index), r"q.shape\[0\] must be 190 \(total_q of the plan\), got 9"),
        (lambda: plan.select(index_q[:9], index), r"index_q.shape\[0\] must be 190"),
        (lambda: plan.select(index_q[..., :16], index), r"^index_k.keys.shape\[3\] must be 16 \(index_dim of index_q\)"),
        (lambda: plan.run(q, k, v, index_q, index, out=q), "out must share no memory with the inputs"),
        (lambda: plan.run(q, k, v, index_q, inside, out=memory), "out must share no memory with the inputs"),
        (lambda: plan.run(q, k, v, index_q, inside, lse=memory.view(-1)[: 190 * 8].view(190, 8)), "lse must share no memory"),
        (lambda: plan.run(q, k, v, index_q, index, out=torch.empty(190, 8, 32)), r"out must have shape \(190, 8, 64\)"),
        (lambda: plan.run(q, k[:, :, :7], v, index_q, index), r"v must have the shape of k"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    blocks = plan.select(index_q, index)
    for wrong, name in (
        (lambda: plan.attend(None, k, v, blocks), "q"),
        (lambda: plan.attend(q.tolist(), k, v, blocks), "q"),
        (lambda: plan.attend(None, k, v, blocks, out=torch.empty_like(q)), "q"),
        (lambda: plan.attend(q, None, v, blocks), "k"),
        (lambda: plan.attend(q, k, None, blocks), "v"),
        (lambda: plan.attend(q, k, v, None), "blocks"),
        (lambda: plan.run(None, k, v, index_q, index), "q"),
        (lambda: plan.run(q, k, v, None, index), "index_q"),
        (lambda: plan.select(index_q, None), "index_k"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor.*, got (NoneType|list)"):
            wrong()
    kept = dict(plan._blocks)
    for heads in (0, 3, 1 << 16):
        few = torch.empty(190, 1, 32).expand(-1, heads, -1)
        with pytest.raises(ValueError, match="index_heads"):
            plan.select(few, index.expand(-1, 5, -1, -1))
        with pytest.raises(ValueError, match=r"index_k must have shape \[num_pages"):
            plan.select(few, index[0])
    assert plan._blocks == kept, "memory for queries that were refused"
    with pytest.raises(NotImplementedError, match="a plan computes no gradients"):
        plan.run(q.requires_grad_(), k, v, index_q, index)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_graphs_and_streams(lengths):
    """A graph of `refresh` and two layers follows its tensors; layers run on any stream."""
    step = Layers(LENGTHS[lengths], "cuda")
    plan, layers = step.plan(), [step.layer() for _ in range(2)]
    outs = [torch.empty_like(layer[0]) for layer in layers]
    for layer in layers:
        plan.run(*layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.refresh()
        for layer, out in zip(layers, outs, strict=True):
            plan.run(*layer, out=out)
    for _ in range(2):
        for layer, new, out in zip(layers, [step.layer() for _ in layers], outs, strict=True):
            for old, x in zip(layer, new, strict=True):
                old.copy_(x)
            out.fill_(torch.nan)
        graph.replay()
        for layer, out in zip(layers, outs, strict=True):
            assert torch.equal(out, step.expected(*layer)[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = plan.run(*layers[0])
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(out, step.expected(*layers[0])[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_calls_on_several_streams_share_no_memory():
    """`msa_attention` replays launches of calls before; each call has memory of its own."""
    step = Layers([(700, 3000), (50, 900)], "cuda")
    layers = [step.layer() for _ in range(6)]
    expected = [step.expected(*layer)[0].clone() for layer in layers]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for turn in range(4):
        for i, layer in enumerate(layers):
            with torch.cuda.stream(streams[(turn + i) % 3]):
                outs.append((i, step.expected(*layer)[0]))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected[i]) for i, out in outs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
def test_known_calls_in_chunks(packed):
    """`msa_attention` makes the launches of all its chunks again, and computes their lengths anew."""
    known = len(CALLS._replays)
    first, other = (Layers(lengths, "cuda", packed) for lengths in ([(700, 3000), (50, 900)], [(690, 2990), (60, 910)]))
    for step in (first, first, other):
        step.new, layer = first.new, step.layer()  # Bounds are those of the first, so that the kind is the same.
        step.keys = first.keys
        result = step.expected(*layer, query_chunk=200)
        host = step.expected(*layer, query_chunk=200, check=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, host, strict=True))
    assert len(CALLS._replays) == known + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_layers_are_graphs_of_launches(monkeypatch):
    """Layers of kinds that take turns on two streams, where some kinds share a graph; a layer is captured in between."""
    monkeypatch.setattr(launch_graph, "RUNS_BEFORE", 0)  # Each run takes the graph of its form.
    monkeypatch.setattr(launch_graph, "_graphs", {})
    kinds = [*LENGTHS.values(), [(310, 310), (40, 40)], [(61, 490), (120, 350)], [(1, 250), (1, 9), (1, 500)]]
    steps = [Layers(lengths, "cuda") for lengths in kinds]
    streams = [torch.cuda.Stream() for _ in range(2)]
    plans = [[step.plan() for _ in streams] for step in steps]  # A plan's layers follow each other.
    layers = [[step.layer() for _ in range(3)] for step in steps]
    expected = [[step.expected(*layer, check=True)[0] for layer in of] for step, of in zip(steps, layers, strict=True)]
    runs = [(turn % 3, i, s) for turn in range(5) for i in range(len(kinds)) for s in range(2)]
    outs = [torch.full_like(layers[i][j][0], torch.nan) for j, i, _ in runs]
    captured, again = torch.cuda.CUDAGraph(), torch.empty_like(layers[0][1][0])
    torch.cuda.synchronize()
    both = list(zip(runs, outs, strict=True))
    for half in (both[: len(both) // 2], both[len(both) // 2 :]):
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000)  # Launches wait, so that nodes change while the graph has not run.
        for (j, i, s), out in half:
            with torch.cuda.stream(streams[s]):
                plans[i][s].run(*layers[i][j], out=out)
        torch.cuda.synchronize()
        with torch.cuda.graph(captured, stream=streams[0]):
            plans[0][0].run(*layers[0][1], out=again)
        captured.replay()
        torch.cuda.synchronize()
        assert torch.equal(again, expected[0][1])
        captured.reset()
    assert all(torch.equal(out, expected[i][j]) for (j, i, _), out in both)
    assert 2 < len(launch_graph._graphs) < 2 * len(kinds), "some kinds share a graph"
    assert all(wanted.graph for wanted in launch_graph._graphs.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("heads", [(64, 4), (16, 1)])
@pytest.mark.parametrize("chunk", [None, 1024])
def test_steps_of_like_numbers_of_queries_make_the_same_launches(heads, chunk, monkeypatch):
    """Their plans share what was recorded, and read and write the queries of their own, in whatever order they come."""
    monkeypatch.setattr(launch_graph, "RUNS_BEFORE", 1)
    pages, first = 90, 448  # The second sequence has 1,537 to 1,600 queries, which are rounded up alike.
    table = torch.randperm(pages, device="cuda").view(2, -1).int()
    lens = torch.tensor([5000, 5760], dtype=torch.int32, device="cuda")
    known = len(LAYERS._replays)
    for total in (2048, 1999, 2048, 2040, 1985, 1985, 1985):
        cu = torch.tensor([0, first, total], dtype=torch.int32, device="cuda")
        plan = AttentionPlan(
            cu_seqlens_q=cu,
            total_q=total,
            max_seqlen_q=total - first,
            max_seqlen_k=5760,
            page_table=table,
            seq_lens=lens,
            page_size=128,
            query_chunk=chunk,
        )
        for _ in range(2):
            kv = torch.randn(pages, heads[1], 128, 256, dtype=torch.bfloat16, device="cuda")
            index = torch.randn(pages, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
            rows = torch.randn(2100, sum(heads), 128, dtype=torch.bfloat16, device="cuda")  # of one projection
            rows[total:] = torch.nan
            q, index_q = rows[:total, : heads[0]], rows[:total, heads[0] :]
            out, lse = poisoned(rows[:, : heads[0]])
            plan.run(q, kv[..., :128], kv[..., 128:], index_q, index, out=out[:total], lse=lse[:total])
            keys = (PagedKV(kv[..., :128], kv[..., 128:], table, lens), None, index_q, PagedIndexKeys(index, table, lens))
            seqs = Sequences(cu, None, total - first, 5760)
            options = {"return_lse": True, "query_chunk": chunk, "check": True}  # Checked calls make no known launches.
            for got, wanted in zip((out, lse), msa_attention(q, *keys, 16, seqs, **options), strict=True):
                assert torch.equal(got[:total], wanted)
                assert got[total:].isnan().all()
        assert plan.not_recorded == ()
    assert len(LAYERS._replays) == known + (1 if chunk is None else 2), "a last chunk of 961 to 992 queries is of another kind"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_calls_of_like_lengths_make_the_same_launches():
    """Calls over a cache that grows, with numbers of queries that are rounded up alike, one token among them."""
    pages = 90
    table = torch.randperm(pages, device="cuda").view(2, -1).int()
    known = len(CALLS._replays)
    for new, keys in ((2048, 5760), (1999, 5640), (2048, 5700), (1985, 5761), (1, 5633), (1, 5760), (1, 5700)):
        kv = torch.randn(pages, 4, 128, 256, dtype=torch.bfloat16, device="cuda")
        index = torch.randn(pages, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
        first = min(448, new)  # The second sequence has 1,537 to 1,600 queries, or none.
        cu = torch.tensor([0, first, new], dtype=torch.int32, device="cuda")
        lens = torch.tensor([5000, min(keys, 5760)], dtype=torch.int32, device="cuda")
        q, index_q = (torch.randn(new, n, 128, dtype=torch.bfloat16, device="cuda") for n in (64, 4))
        caches = (PagedKV(kv[..., :128], kv[..., 128:], table, lens), None, index_q, PagedIndexKeys(index, table, lens))
        seqs = Sequences(cu, None, max(first, new - first), keys)
        results = [msa_attention(q, *caches, 16, seqs, return_lse=True, check=check) for check in (True, False, False)]
        for result in results[1:]:
            for got, wanted in zip(result, results[0], strict=True):
                assert torch.equal(got, wanted)
    assert len(CALLS._replays) == known + 2
