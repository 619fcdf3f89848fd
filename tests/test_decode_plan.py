# SPDX-License-Identifier: MIT
"""Decode plans give the results of the stages, over steps updated in place, through the stages and through the kernels."""

import importlib.util

import pytest
import torch

from openmsa import E4M3, CertifiedKeys, DecodePlan, PagedIndexKeys, PagedKV, Sequences, select_blocks, sparse_attention
from openmsa.decode import plan as decode
from openmsa.testing.compare import assert_close, assert_equal, compare
from openmsa.testing.inputs import paged, problem, strided
from tests import oracle
from tests.low_precision import stored_problem
from tests.products import multiplies_e4m3

CUDA = torch.cuda.is_available()
HOW = ["stages"] if CUDA or importlib.util.find_spec("triton") is None else ["stages", "kernels"]
HOW += [pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else []
SHAPE = {"max_batch": 4, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "index_dim": 32, "topk": 4, "block_size": 32}
PAGE = 32
FORMS = ["plain", "certified"]


@pytest.fixture(params=HOW)
def device(request, monkeypatch):
    """Returns the device of a test; "kernels" runs the GPU's path on CPU tensors in the interpreter, where bounds of few
    certified keys come first too."""
    if request.param != "stages":
        monkeypatch.setattr("openmsa.decode.memory.BOUNDS_PAY", 0)
    if request.param == "kernels":
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    return "cuda" if request.param == "cuda" else "cpu"


def step(k_lens, new_tokens=1, dtype=torch.float16, seed=0, index_heads=2):
    """Draws a problem whose queries are the newest tokens; sequences shorter than that stay with fewer keys than queries."""
    return problem(
        [new_tokens] * len(k_lens), k_lens, kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=dtype,
        index_heads=index_heads, integer_index=True, shared_prefix=40, seed=seed,
    )  # fmt: skip


def moved(cache, device):
    return type(cache)(**{name: x.to(device) for name, x in vars(cache).items()})


def caches(p, device, form="plain", page=PAGE, seed=0):
    """Returns the caches of a problem. form: of the index keys."""
    kv, keys = paged(p, page, seed=seed)
    if form == "certified":
        keys.keys = CertifiedKeys.quantize(keys.keys)
    return moved(kv, device), moved(keys, device)


def poison(plan):
    """Overwrites what a run may not read before it writes it."""
    if hasattr(plan, "_kernels"):
        parts = plan._kernels.parts
        for x in (plan._kernels.scores, *_tensors(plan._kernels.certified), *_tensors(parts and parts.second.bounds)):
            x.fill_(torch.nan if x.is_floating_point() else -1)


@pytest.fixture
def by_host_code(monkeypatch):
    """Every run goes through the host's whole code, whose calls a test counts."""
    monkeypatch.setattr(
        "openmsa.runtime.kinds.Kinds.first", lambda self, call, steps, *others, **more: [step() for step in steps]
    )


def plan_of(p, device, **changes):
    return DecodePlan(**SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": p.q.dtype, "device": device} | changes)


def expected(p, dtype, **changes):
    """Returns the stages' references on packed keys in `dtype`."""
    options = {"topk": 4, "block_size": 32} | changes
    blocks = select_blocks(p.index_q.double(), p.index_k.double(), seqs=p.seqs, impl="reference", **options)
    q, k, v = (x.to(dtype) for x in (p.q, p.k, p.v))
    return blocks, *sparse_attention(q, k, v, blocks, p.seqs, block_size=32, return_lse=True, impl="reference")


def check(plan, p, out, **changes):
    blocks, truth, lse = expected(p, torch.float64, **changes)
    _, honest, honest_lse = expected(p, p.q.dtype, **changes)
    assert_equal("blocks", plan.blocks, blocks)
    assert_close("out", out, honest, truth)
    assert_close("lse", plan.lse, honest_lse.to(plan.lse.dtype), lse)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("new_tokens", [1, 3])
def test_agrees_with_the_stages(device, new_tokens, form):
    p = step((200, 0, 33, 1), new_tokens)
    kv, keys = caches(p, device, form)
    plan = plan_of(p, device, new_tokens=new_tokens)
    plan._out.fill_(torch.nan), plan._lse.fill_(torch.nan), plan._blocks.fill_(-7)
    poison(plan)
    check(plan, p, plan.run(p.q.to(device), kv, p.index_q.to(device), keys))


@pytest.mark.parametrize("form", FORMS)
def test_one_plan_serves_steps_and_layers_in_place(device, form):
    """One plan serves growing lengths, another page table and a smaller batch in the same tensors, queries of any strides, and
    a given `out`."""
    first, second = step((64, 90, 5, 128)), step((65, 91, 6, 129), seed=1)
    kv, keys = caches(first, device, form)
    plan = plan_of(first, device)
    poison(plan)
    check(plan, first, plan.run(first.q.to(device), kv, first.index_q.to(device), keys))
    new_kv, new_keys = caches(second, device, form, seed=3)
    kv.k, kv.v, keys.keys = new_kv.k, new_kv.v, new_keys.keys
    width = min(kv.page_table.shape[1], new_kv.page_table.shape[1])
    for cache in (kv, keys):
        cache.page_table[:, :width] = new_kv.page_table[:, :width]
        cache.seq_lens.copy_(new_kv.seq_lens)
    out = strided(torch.full_like(second.q, torch.nan), 2).to(device)
    poison(plan)
    returned = plan.run(strided(second.q, 2).to(device), kv, strided(second.index_q).to(device), keys, out=out)
    assert returned is out
    check(plan, second, out)
    third = step((77,), seed=2)
    kv, keys = caches(third, device, form)
    poison(plan)
    check(plan, third, plan.run(third.q.to(device), kv, third.index_q.to(device), keys))


@pytest.mark.parametrize("form", FORMS)
def test_forced_blocks_and_shared_selection(device, form):
    p = step((300, 260), 2, index_heads=1)
    kv, keys = caches(p, device, form)
    forced = {"init_blocks": 1, "local_blocks": 2}
    plan = plan_of(p, device, new_tokens=2, index_heads=1, **forced)
    check(plan, p, plan.run(p.q.to(device), kv, p.index_q.to(device), keys), **forced)


def test_bounds_of_few_keys_do_not_come_first(device, monkeypatch):
    """A plan that may see many holds memory for them, and a run on few leaves it alone."""
    if device == "cpu" and not decode.uses_kernels(torch.device("cpu")):
        pytest.skip("stages have no such choice")
    p = step((300, 200))
    kv, keys = caches(p, device, "certified")
    held = 2 * keys.page_table.shape[1] * PAGE * 32 * 2  # bytes of exact keys of both page tables
    for limit, max_batch, memory, first in ((held - 1, 2, True, True), (held, 2, False, False), (held, 4, True, False)):
        monkeypatch.setattr("openmsa.decode.memory.BOUNDS_PAY", limit)
        plan = plan_of(p, device, max_batch=max_batch, max_pages=keys.page_table.shape[1])
        poison(plan)
        check(plan, p, plan.run(p.q.to(device), kv, p.index_q.to(device), keys))
        workspace = plan._kernels.certified
        assert (workspace is not None) == memory
        assert (workspace is not None and bool((workspace.rescored >= 0).any())) == first


def test_a_plan_without_certified_keys_holds_no_memory_for_them(device):
    p = step((200, 0, 33, 1))
    plan = plan_of(p, device, certified_keys=False)
    kv, keys = caches(p, device)
    poison(plan)
    check(plan, p, plan.run(p.q.to(device), kv, p.index_q.to(device), keys))
    if hasattr(plan, "_kernels"):
        assert plan_of(p, device)._kernels.certified is not None
        assert plan._kernels.certified is None
        assert plan._kernels.parts is None
    _, certified = caches(p, device, "certified")
    with pytest.raises(ValueError, match="index_keys must not be CertifiedKeys"):
        plan.run(p.q.to(device), kv, p.index_q.to(device), certified)
    with pytest.raises(TypeError, match="certified_keys must be True or False, got int"):
        plan_of(p, device, certified_keys=1)


@pytest.mark.parametrize(
    ("k_lens", "page", "forced", "bounded"),
    [
        ((200, 7, 330), PAGE, {}, True),
        ((330,), 128, {}, False),
        ((200, 330), PAGE, {"init_blocks": 2, "local_blocks": 2}, False),
        ((330,), PAGE, {"topk": 13}, False),
        ((200, 330), PAGE, {"new_tokens": 8}, True),
        ((200, 330), PAGE, {"new_tokens": 9}, False),
    ],
    ids=["bounds first", "one launch", "no free place", "a place for each block", "16 rows", "18 rows"],
)
def test_when_bounds_of_certified_keys_come_first(device, k_lens, page, forced, bounded):
    """Either way the results are those of the exact keys, bit for bit."""
    tokens = forced.get("new_tokens", 1)
    p = problem([tokens] * len(k_lens), k_lens, kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=torch.bfloat16)
    plan = plan_of(p, device, page_size=page, **forced)
    results, used = [], []
    for form in FORMS:
        poison(plan)
        kv, keys = caches(p, device, form, page)
        out = plan.run(p.q.to(device), kv, p.index_q.to(device), keys)
        results.append([x.clone() for x in (plan.blocks, out, plan.lse)])
        workspace = getattr(getattr(plan, "_kernels", None), "certified", None)
        used.append(workspace is not None and bool((workspace.rescored >= 0).any()))
    for name, exact, certified in zip(("blocks", "out", "lse"), *results, strict=True):
        assert_equal(name, certified, exact)
    assert used == [False, bounded and hasattr(plan, "_kernels")]


LEAST_BYTES = "openmsa.decode.two_parts.LEAST_BYTES"
NEVER = 1 << 62
PARTS = {  # k_lens, new tokens, format of keys and values, changes of the plan
    "odd": ((200, 7, 330, 64), 1, "plain", {"max_batch": 5}),
    "one empty": ((96, 0, 310), 2, "plain", {}),
    "one each": ((120, 350), 1, "plain", {}),
    "e4m3": ((310, 330, 200, 90), 3, "e4m3", {}),
    "shared selection": ((300, 260, 31, 90, 8), 2, "plain", {"max_batch": 6, "index_heads": 1}),
}


@pytest.mark.parametrize("case", PARTS)
def test_two_parts_select_and_attend_as_one(device, monkeypatch, by_host_code, case):
    if device == "cpu" and not decode.uses_kernels(torch.device("cpu")):
        pytest.skip("stages are one part")
    from openmsa.block_topk.triton_certified import Selection

    k_lens, new_tokens, kv_format, changes = PARTS[case]
    p = step(k_lens, new_tokens, torch.bfloat16, index_heads=changes.get("index_heads", 2))
    results, bounded = [], []
    monkeypatch.setattr(Selection, "bound", counted(Selection.bound, bounded))
    monkeypatch.setattr("openmsa.decode.two_parts.Side.serves", lambda self: True)
    for least, parts in ((NEVER, 1), (0, 2)):
        monkeypatch.setattr(LEAST_BYTES, least)
        kv, keys = caches(p, device, "certified")
        if kv_format == "e4m3":
            kv.k, kv.v = (E4M3.quantize(x) for x in (kv.k, kv.v))
        plan = plan_of(p, device, new_tokens=new_tokens, **changes)
        for _ in range(2):
            poison(plan)
            out = plan.run(p.q.to(device), kv, p.index_q.to(device), keys)
            if kv_format == "plain":
                check(plan, p, out)
        results.append([x.clone() for x in (plan.blocks, out, plan.lse)])
        assert len(bounded) == 2 * parts
        bounded.clear()
    same = {config.splits for config in plan._kernels.attend[kv_format][: len(k_lens)]} == {1}
    for name, one, two in zip(("blocks", "out", "lse"), *results, strict=True):
        if same or name == "blocks":
            assert_equal(name, two, one)
        else:
            torch.testing.assert_close(two, one, rtol=2e-2, atol=2e-2)


def test_parts_may_be_split(device, monkeypatch):
    """Attention to the whole step is one program a row, that to either part two; counters are 0 again behind each run."""
    if device == "cpu" and not decode.uses_kernels(torch.device("cpu")):
        pytest.skip("stages are one part")
    from openmsa.decode import memory

    def attend(batch, sizes, facts, form):
        config = whole(batch, sizes, facts, form)
        splits = 1 if batch == 4 else 2
        return config._replace(splits=splits, tiles=config.tiles * config.splits // splits)

    whole = memory._attend
    monkeypatch.setattr(memory, "_attend", attend)
    monkeypatch.setattr(LEAST_BYTES, 0)
    monkeypatch.setattr("openmsa.decode.two_parts.Side.serves", lambda self: True)
    p = step((200, 7, 330, 64), 2)
    kv, keys = caches(p, device, "certified")
    plan = plan_of(p, device, new_tokens=2)
    partials = [plan._kernels.partials, plan._kernels.parts.second.partials]
    for _ in range(2):
        poison(plan)
        for x in partials:
            x.rows.fill_(torch.nan), x.lse.fill_(torch.nan)
        check(plan, p, plan.run(p.q.to(device), kv, p.index_q.to(device), keys))
        for x in partials:
            assert x.arrived.numel()
            assert not x.arrived.any()


@pytest.mark.parametrize("in_place", [False, True])
def test_only_graphs_are_made_of_two_parts(device, monkeypatch, in_place):
    """The first run outside of one loads their kernels, too, and results stay what they are, queries' memory given for them."""
    if device == "cpu" and not decode.uses_kernels(torch.device("cpu")):
        pytest.skip("stages are one part")
    from openmsa.block_topk.triton_certified import Selection

    p, bounded, results = step((200, 7, 330, 64)), [], []
    monkeypatch.setattr(Selection, "bound", counted(Selection.bound, bounded))
    monkeypatch.setattr(LEAST_BYTES, 0)
    monkeypatch.setattr("openmsa.decode.two_parts.InTurn.serves", lambda self: False)
    kv, keys = caches(p, device, "certified")
    plan = plan_of(p, device)
    for calls in (3, 1, 1):
        poison(plan)
        q = p.q.to(device).clone()
        out = plan.run(q, kv, p.index_q.to(device), keys, out=q if in_place else None)
        check(plan, p, out)
        results.append([x.clone() for x in (plan.blocks, out, plan.lse)])
        assert len(bounded) == calls
        bounded.clear()
    for a, b in zip(results[0], results[1], strict=True):
        assert_equal("again", b, a)


def counted(function, calls):
    def call(*arguments, **options):
        calls.append(function)
        return function(*arguments, **options)

    return call


def test_plans_share_no_memory(device, monkeypatch):
    monkeypatch.setattr(LEAST_BYTES, 0)
    p = step((64, 40))
    plans = [plan_of(p, device) for _ in range(2)]
    buffers = [{x.untyped_storage().data_ptr() for x in _tensors(plan) if x.untyped_storage().nbytes()} for plan in plans]
    assert buffers[0]
    assert not buffers[0] & buffers[1]
    kernels = getattr(plans[0], "_kernels", None)
    if kernels is not None:  # nor do the two parts of a step
        first, second = (
            {x.untyped_storage().data_ptr() for y in part for x in _tensors(y) if x.numel()}
            for part in ((kernels.certified, kernels.partials), (kernels.parts.second,))
        )
        assert second
        assert not first & second


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in vars(value).values() for x in _tensors(part)] if hasattr(value, "__dict__") else []


def test_an_empty_batch_returns_nothing(device):
    p = step((64,))
    kv, keys = (moved(cache, device) for cache in paged(p, PAGE))
    kv = PagedKV(kv.k, kv.v, kv.page_table[:0], kv.seq_lens[:0])
    keys = PagedIndexKeys(keys.keys, keys.page_table[:0], keys.seq_lens[:0])
    plan = plan_of(p, device)
    assert plan.run(p.q[:0].to(device), kv, p.index_q[:0].to(device), keys).shape == (0, 8, 64)


BAD = [
    ({"new_tokens": 17}, ValueError, "new_tokens must be from 1 to 16, got 17"),
    ({"num_kv_heads": 3}, ValueError, r"num_kv_heads must divide num_q_heads \(8\), got 3"),
    ({"index_heads": 4}, ValueError, r"index_heads must be num_kv_heads \(2\) or 1, got 4"),
    ({"topk": 2, "init_blocks": 2}, ValueError, r"init_blocks \+ local_blocks must be at most topk \(2\)"),
    ({"dtype": torch.int32}, TypeError, "dtype must be"),
    ({"head_dim": 40}, ValueError, "head_dim must be a multiple of 16"),
    ({"head_dim": 64.0}, TypeError, r"head_dim must be an int, got float \(64.0\)"),
    ({"index_dim": None}, TypeError, "index_dim must be an int, got NoneType"),
    ({"index_heads": True}, TypeError, "index_heads must be an int, got bool"),
    ({"device": "gpu"}, ValueError, "device must be a CUDA device or a CPU, got gpu"),
    ({"device": "meta"}, ValueError, "device must be a CUDA device or a CPU, got meta"),
]


@pytest.mark.parametrize(("changes", "error", "text"), BAD)
def test_bad_plans_are_refused(changes, error, text):
    with pytest.raises(error, match=text):
        plan_of(step((4,)), **{"device": "cpu"} | changes)


@pytest.mark.skipif(CUDA, reason="needs a machine without an NVIDIA GPU")
def test_a_missing_device_is_refused():
    for device in ("cuda", "cuda:3"):
        with pytest.raises(ValueError, match=f"device must be 'cpu' where PyTorch finds no CUDA device, got {device}"):
            plan_of(step((4,)), device)


def test_what_the_kernels_do_not_do_is_refused(monkeypatch):
    monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    with pytest.raises(NotImplementedError, match="dtype must be float16 or bfloat16"):
        plan_of(step((4,)), "cpu", dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="must be at most 64"):
        plan_of(step((4,)), "cpu", new_tokens=16, num_kv_heads=8)


def test_calls_that_do_not_fit_the_plan_are_refused():
    p = step((64, 40))
    kv, keys = paged(p, PAGE)
    plan = plan_of(p, "cpu")
    with pytest.raises(ValueError, match=r"q.shape\[0\] must be 2"):
        plan.run(p.q[:1], kv, p.index_q, keys)
    with pytest.raises(TypeError, match="q must have dtype"):
        plan.run(p.q.float(), kv, p.index_q, keys)
    with pytest.raises(ValueError, match=r"kv.batch must be from 0 to 1, got 2"):
        plan_of(p, "cpu", max_batch=1).run(p.q, kv, p.index_q, keys)
    with pytest.raises(ValueError, match="out must not be expanded"):
        plan.run(p.q, kv, p.index_q, keys, out=p.q[:1].expand_as(p.q))
    for name, given in (
        ("q", {"q": p.q.clone().requires_grad_()}),
        ("index_q", {"index_q": p.index_q.clone().requires_grad_()}),
    ):
        call = {"q": p.q, "kv": kv, "index_q": p.index_q, "index_keys": keys} | given
        with pytest.raises(ValueError, match=f"^{name} must not require a gradient, as a plan computes none"):
            plan.run(**call)
        with torch.no_grad():
            plan.run(**call)
    with pytest.raises(ValueError, match="max_pages"):
        plan_of(p, "cpu", max_pages=2).run(p.q, kv, p.index_q, keys)
    with pytest.raises(TypeError, match=r"kv must be an openmsa\.PagedKV"):
        plan.run(p.q, p.k, p.index_q, keys)
    with pytest.raises(ValueError, match=r"kv\.page_size must be 16"):
        plan_of(p, "cpu", page_size=16).run(p.q, kv, p.index_q, keys)
    keys.seq_lens = keys.seq_lens - torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"index_keys.seq_lens must be that of kv \(\[64, 40\]\), got \[64, 39\]"):
        plan.run(p.q, kv, p.index_q, keys)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("form", "parts"), [("plain", False), ("certified", False), ("certified", True)])
def test_a_captured_graph_reads_lengths_when_replayed(form, parts, monkeypatch, by_host_code):
    """Two plans on two streams, each in a graph; lengths change in place; nothing is allocated in between."""
    from openmsa.block_topk.triton_certified import Selection

    bounded = []
    monkeypatch.setattr("openmsa.decode.memory.BOUNDS_PAY", 0)
    monkeypatch.setattr(LEAST_BYTES, 0 if parts else NEVER)
    monkeypatch.setattr(Selection, "bound", counted(Selection.bound, bounded))
    p = step((128, 256, 31, 200), dtype=torch.bfloat16)
    runs = []
    for seed in (0, 1):
        kv, keys = caches(p, "cuda", form, seed=seed)
        plan, stream = plan_of(p, "cuda"), torch.cuda.Stream()
        q, index_q = p.q.cuda(), p.index_q.cuda()
        with torch.cuda.stream(stream):
            plan.run(q, kv, index_q, keys)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        bounded.clear()
        with torch.cuda.graph(graph, stream=stream):
            out = plan.run(q, kv, index_q, keys)
        assert len(bounded) == (2 if parts else form == "certified")
        runs.append((plan, graph, stream, kv, keys, (q, index_q), out))  # a graph does not keep its inputs
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(20):
        for _, graph, stream, *_ in runs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    for plan, *_, out in runs:
        check(plan, p, out)
    shorter = (128, 100, 0, 64)
    for plan, graph, stream, kv, keys, _, out in runs:
        for cache in (kv, keys):
            cache.seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        q = problem([1] * 4, shorter, kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=p.q.dtype)
        q.q.copy_(p.q), q.index_q.copy_(p.index_q)
        for name in ("k", "v", "index_k"):
            whole = getattr(p, name)
            getattr(q, name).copy_(torch.cat([whole[:128], whole[128:228], whole[415:479]]))
        check(plan, q, out)


def test_default_lengths_are_those_of_the_stages():
    """A plan is `select_blocks` then `sparse_attention` with the newest tokens as queries."""
    p = step((100, 64), 2)
    kv, keys = paged(p, PAGE)
    plan = plan_of(p, "cpu", new_tokens=2)
    out = plan.run(p.q, kv, p.index_q, keys)
    seqs = Sequences(cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32), max_seqlen_q=2)
    blocks = select_blocks(p.index_q, keys, 4, seqs, block_size=32)
    assert_equal("out", out, sparse_attention(p.q, kv, None, blocks, seqs, block_size=32))


def assert_best(blocks, p, factors):
    """No block left out scores above one that was chosen, beyond the rounding of honest scores; the newest one is chosen."""
    truth, honest = oracle.block_scores(p, 32), oracle.honest_scores(p, 32, **factors)
    slack = 2 * compare(honest, honest, truth).bound
    for row, _, last in oracle.rows(p):
        for head, chosen in enumerate(blocks[row].tolist()):
            scores, chosen = truth[head, row, : last // 32 + 1], [block for block in chosen if block >= 0]
            assert len(set(chosen)) == min(4, len(scores))
            assert chosen[-1] == len(scores) - 1
            others = [block for block in range(len(scores)) if block not in chosen]
            assert not others or scores[others].max() <= scores[chosen[:-1]].min() + slack


FORMATS = [
    *(("e4m3", "int8", "plain"), ("nvfp4", "nvfp4", "plain"), ("e4m3", "e4m3", "e4m3")),
    *(("plain", "certified", "plain"), ("nvfp4", "certified", "plain")),
]


@pytest.mark.parametrize(("key_format", "index_format", "queries"), FORMATS)
def test_formats_of_caches(device, key_format, index_format, queries):
    """Results are the selection of the stored index keys and the attention of the stored keys, as the stages' references give
    them."""
    p = problem([1, 1], [200, 33], kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=torch.bfloat16)
    stored = stored_problem(p, key_format, index_format, "paged", PAGE, queries)
    moved_ = stored.to(device)
    plan = plan_of(p, device)
    out = plan.run(moved_.q, moved_.kv[0], moved_.index_q, moved_.index_k)
    options = {"block_size": 32, "impl": "reference"}
    blocks = select_blocks(stored.numbers.index_q, stored.numbers.index_k, 4, stored.numbers.seqs, **options)
    factors = stored.factors("index_q", "index_k", device)
    if factors and multiplies_e4m3(torch.device(device)):  # whose scores are rounded: as good as the best, up to that
        blocks = plan.blocks.cpu()
        assert_best(blocks, stored.numbers, factors)
    assert_equal("blocks", plan.blocks, blocks)
    truth, honest = (
        sparse_attention(x.q, x.k, x.v, blocks, x.seqs, return_lse=True, **options)
        for x in (stored.numbers, stored.honest(torch.bfloat16))
    )
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", plan.lse, honest[1].to(plan.lse.dtype), truth[1])


def test_formats_that_the_kernels_do_not_read_are_refused(monkeypatch):
    monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    p = step((64,), dtype=torch.bfloat16)
    kv, keys = paged(p, PAGE)
    plan = plan_of(p, "cpu")
    with pytest.raises(NotImplementedError, match="beside keys stored as"):
        plan.run(E4M3.quantize(p.q), kv, p.index_q, keys)
    kv, certified = caches(p, "cpu", "certified")
    queries = E4M3.quantize(p.index_q)
    with pytest.raises(NotImplementedError, match=r"index_q must be plain \(torch.bfloat16\) beside certified .*, got e4m3"):
        plan.run(p.q, kv, queries, certified)
    certified.keys = CertifiedKeys.quantize(certified.keys.exact, torch.float16)
    with pytest.raises(ValueError, match=r"index_keys.dtype must be torch.bfloat16 in this plan, got torch.float16"):
        plan.run(p.q, kv, p.index_q, certified)
