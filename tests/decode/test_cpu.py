# SPDX-License-Identifier: MIT
"""One function serves a new token of a short context on a CPU as the stages do, and leaves to them what it does not serve."""

import pytest
import torch

from openmsa import E4M3, DecodePlan, Int8, PagedIndexKeys, PagedKV, Sequences, msa_attention, select_blocks
from openmsa.block_scores import cpu as scoring
from openmsa.decode import cpu as decode_cpu
from openmsa.decode import cpu_token
from openmsa.runtime.environment import c_compiler
from tests import instructions

OPTIONS = {"topk": 4, "block_size": 32}


@pytest.fixture(params=["C kernels", "PyTorch's operations"], autouse=True)
def kernels(request, monkeypatch):
    """Has tokens served by either."""
    if request.param == "PyTorch's operations":
        instructions.use_none(monkeypatch)
    elif c_compiler() is None:
        pytest.skip("the machine has no C compiler")


def tensors(length, heads=(6, 2), dims=(32, 48), index_heads=2, key_heads=1, dtype=torch.float32):
    made = ((1, heads[0], dims[0]), *[(length, heads[1], dims[0])] * 2, (1, index_heads, dims[1]), (length, key_heads, dims[1]))
    return [torch.randn(shape).to(dtype) for shape in made]


def close(found, wanted, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.fixture
def served(monkeypatch):
    """Says for each call whether the one function served it."""
    seen = []
    function = cpu_token.attend_packed
    monkeypatch.setattr(cpu_token, "attend_packed", lambda *a: seen.append(found := function(*a)) or found)
    return seen


def reference(*given, **options):
    return msa_attention(*given, **OPTIONS | options, return_lse=True, impl="reference")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index_heads", [(2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("length", [1, 31, 32, 100, 128, 129, 200, 256, 700])
def test_a_token_of_a_packed_sequence(length, index_heads, dtype, served):
    given = tensors(length, index_heads=index_heads[0], key_heads=index_heads[1], dtype=dtype)
    seqs = Sequences.from_lengths([1], [length])
    for lengths in ({}, {"seqs": seqs}, {"init_blocks": 1, "local_blocks": 2}, {"local_blocks": 0}, {"softmax_scale": -0.3}):
        found = msa_attention(*given, **OPTIONS | lengths, return_lse=True)
        assert served.pop() is not None
        close(found, reference(*given, **lengths), dtype)
        assert found[0].dtype == dtype
        assert msa_attention(*given, **OPTIONS | lengths).equal(found[0])


@pytest.mark.parametrize("length", [1, 32, 60, 129, 230])
@pytest.mark.parametrize("local_blocks", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_index_whose_keys_are_the_keys_reads_them_once(length, local_blocks, dtype, served, monkeypatch):
    q, k, v, *_ = tensors(length, dtype=dtype)
    index_q = q.unflatten(1, (2, -1)).mean(2)
    monkeypatch.setattr(cpu_token, "score_few", None)
    options = OPTIONS | {"local_blocks": local_blocks}
    found = msa_attention(q, k, v, index_q, k.detach(), **options, return_lse=True)
    assert served.pop() is not None
    close(found, reference(q, k, v, index_q, k, local_blocks=local_blocks), dtype)


def test_an_index_of_the_keys_in_a_long_context(served):
    q, k, v, *_ = tensors(700)
    index_q = q.unflatten(1, (2, -1)).mean(2)
    close(msa_attention(q, k, v, index_q, k, **OPTIONS, return_lse=True), reference(q, k, v, index_q, k))
    assert served.pop() is not None


@pytest.mark.parametrize("shared", [False, True])
def test_autograd_can_save_the_results(shared, served):
    q, k, v, index_q, index_k = tensors(200)
    given = (q, k, v, q[:, :2], k) if shared else (q, k, v, index_q, index_k)
    found = msa_attention(*given, **OPTIONS, return_lse=True)
    assert served.pop() is not None
    weight = torch.ones((), requires_grad=True)
    sum((x * weight).sum() for x in found).backward()
    torch.testing.assert_close(weight.grad, sum(x.sum() for x in found))


def test_equal_keys_are_ties(served):
    q, k, v, *_ = tensors(350)
    k[:] = torch.randn(1, 2, 32)
    found = msa_attention(q, k, v, q[:, ::3].contiguous(), k, **OPTIONS, return_lse=True)
    assert served.pop() is not None
    close(found, reference(q, k, v, q[:, ::3].contiguous(), k))
    assert select_blocks(q[:, ::3], k, **OPTIONS)[0].tolist() == [[0, 1, 2, 10]] * 2


@pytest.mark.parametrize("name", ["q", "k", "v", "index_q", "index_k"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("shared", [False, True])
def test_values_that_are_not_finite(name, bad, shared):
    given = dict(zip(("q", "k", "v", "index_q", "index_k"), tensors(250), strict=True))
    given[name][0, 0, 5] = bad
    if shared:
        given |= {"index_q": given["q"][:, :2].clone(), "index_k": given["k"]}
    close(msa_attention(**given, **OPTIONS, return_lse=True), reference(*given.values()))


def test_what_it_does_not_serve_is_left_to_the_stages(served):
    given = tensors(100)
    q, k, v, index_q, index_k = given
    changes = [
        {"q": q.double(), "k": k.double(), "v": v.double()},
        {"q": q.expand(2, -1, -1), "index_q": index_q.expand(2, -1, -1)},
        {"k": E4M3.quantize(k), "v": E4M3.quantize(v)},
        {"index_k": Int8.quantize(index_k)},
        {"seqs": Sequences(q_offset=torch.tensor([50], dtype=torch.int32))},
    ]
    for change in changes:
        call = dict(zip(("q", "k", "v", "index_q", "index_k"), given, strict=True)) | change
        close(msa_attention(**call, **OPTIONS, return_lse=True), msa_attention(**call, **OPTIONS, return_lse=True, impl="cpu"))
        assert not any(served)
        served.clear()
    q.requires_grad_()
    msa_attention(*given, **OPTIONS).sum().backward()
    assert served == [None]
    assert q.grad is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"topk": 0}, "topk must be from 1 to 64, got 0"),
        ({"topk": True}, "topk must be an int, got bool"),
        ({"init_blocks": 4}, "init_blocks . local_blocks must be at most topk"),
        ({"softmax_scale": float("inf")}, "softmax_scale must be finite"),
        ({"softmax_scale": 1e39}, "softmax_scale must be finite in float32"),
        ({"return_lse": 1}, "return_lse must be True or False"),
        ({"check": 0}, "check must be True or False"),
        ({"certified": None}, "certified must be True or False"),
        ({"query_chunk": 0}, "query_chunk must be at least 1"),
        ({"seqs": Sequences(max_seqlen_q=0)}, "seqs.max_seqlen_q must be at least"),
        ({"seqs": Sequences(torch.tensor([0, 2]))}, "seqs.cu_seqlens_q must end at"),
        ({"seqs": 3}, "seqs must be an openmsa.Sequences"),
        ({"k": torch.zeros(99, 2, 32)}, "v.shape.0. must be 99"),
        ({"v": torch.zeros(100, 2, 32).half()}, "v must have the dtype"),
        ({"index_k": torch.zeros(100, 1, 32)}, "index_k.shape.2. must be 48"),
        ({"index_q": torch.zeros(1, 3, 48)}, "index_q.shape.1. must be num_kv_heads"),
        ({"q": torch.zeros(1, 5, 32)}, "num_kv_heads must divide"),
        ({"impl": "fast"}, "impl must be 'auto' or one of"),
        ({"q": torch.zeros(1, 0, 32)}, "num_q_heads must be at least 1"),
        ({"q": torch.zeros(1, 6, 32).to_sparse()}, "q must be a dense tensor"),
        ({"k": torch.zeros(100, 2, 32).to_sparse()}, "k must be a dense tensor"),
        ({"index_k": torch.zeros(100, 1, 48).to_sparse()}, "index_k must be a dense tensor"),
        ({"index_q": torch.nested.nested_tensor([torch.zeros(2, 48)])}, "index_q must be a dense tensor"),
        ({"index_k": torch.nested.nested_tensor([torch.zeros(1, 48)])}, "index_k must be a dense tensor"),
        ({"seqs": Sequences(torch.tensor([0, 1], device="meta"))}, "seqs.cu_seqlens_q must be on the device"),
    ],
)
def test_wrong_calls_of_one_token_are_refused(change, words):
    call = dict(zip(("q", "k", "v", "index_q", "index_k"), tensors(100), strict=True)) | OPTIONS | change
    with pytest.raises((ValueError, TypeError), match=words):
        msa_attention(**call)


def caches(lengths, page, pages, given, dtype=torch.float32):
    """Returns caches of these lengths, whose other rows hold NaN, in shuffled pages."""
    table = torch.randperm(pages)[: len(lengths) * (pages // len(lengths))].view(len(lengths), -1).int()
    lens = torch.tensor(lengths, dtype=torch.int32)
    pools = [torch.full((pages, x.shape[1], page, x.shape[2]), torch.nan, dtype=dtype) for x in given]
    first = 0
    for b, n in enumerate(lengths):
        for i in range(n):
            for pool, x in zip(pools, given, strict=True):
                pool[table[b, i // page], :, i % page] = x[first + i]
        first += n
    return PagedKV(*pools[:2], table, lens), PagedIndexKeys(pools[2], table, lens.clone())


@pytest.mark.parametrize("local_blocks", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("page", "pages"), [(32, 24), (64, 12), (64, 90), (48, 18), (16, 48)])
@pytest.mark.parametrize("lengths", [(1,), (100, 131), (350,), (33, 64, 250)])
def test_a_plan_over_pages(lengths, page, pages, dtype, local_blocks, monkeypatch):
    total, options = sum(lengths), OPTIONS | {"local_blocks": local_blocks}
    _, k, v, _, index_k = tensors(total, dtype=dtype)
    q, index_q = torch.randn(len(lengths), 6, 32).to(dtype), torch.randn(len(lengths), 2, 48).to(dtype)
    kv, index_keys = caches(lengths, page, pages, (k, v, index_k), dtype)
    sizes = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "index_dim": 48, "dtype": dtype, "device": "cpu"}
    plan = DecodePlan(max_batch=4, page_size=page, max_pages=kv.page_table.shape[1], **sizes, **options)
    monkeypatch.setattr(decode_cpu, "sparse_attention", None)  # The stages are not asked.
    out = plan.run(q, kv, index_q, index_keys)
    seqs = Sequences.from_lengths([1] * len(lengths), lengths)
    close((out, plan.lse), reference(q, k, v, index_q, index_k, seqs=seqs, local_blocks=local_blocks), dtype)
    assert plan.blocks.equal(select_blocks(index_q, index_k, seqs=seqs, impl="reference", **options))


def test_a_step_that_the_stages_take_over_reads_its_queries():
    """Results may be written over the queries, and a score that is NaN is found after the first sequence was served."""
    lengths = (100, 131)
    _, k, v, _, index_k = tensors(sum(lengths))
    q, index_q = torch.randn(2, 6, 32), torch.randn(2, 2, 48)
    index_k[110] = torch.nan
    kv, index_keys = caches(lengths, 32, 24, (k, v, index_k))
    sizes = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "index_dim": 48, "dtype": torch.float32, "device": "cpu"}
    plan = DecodePlan(max_batch=2, page_size=32, max_pages=kv.page_table.shape[1], **sizes, **OPTIONS)
    expected = plan.run(q, kv, index_q, index_keys).clone()
    assert plan.run(q, kv, index_q, index_keys, out=q).equal(expected)


def test_pools_are_scored_where_they_lie_unless_they_hold_much_else(monkeypatch):
    instructions.use_none(monkeypatch)
    whole = []
    function = scoring._score_pool
    monkeypatch.setattr(scoring, "_score_pool", lambda *a: whole.append(len(a[2])) or function(*a))
    for pages in (8, 60):
        _, k, v, _, index_k = tensors(250)
        index_keys = caches((250,), 32, pages, (k, v, index_k))[1]
        index_keys.page_table = index_keys.page_table[:, :8].sort().values
        if pages == 60:
            index_keys.page_table = index_keys.page_table * 0 + torch.arange(8, dtype=torch.int32) * 7
        index_keys.keys.nan_to_num_()
        scoring.block_scores(torch.randn(1, 1, 48), index_keys, index_keys.layout(None, 1, torch.device("cpu")), 32)
    assert whole == [8]


@pytest.mark.parametrize("new_tokens", [1, 2])
def test_heads_of_a_pool_that_share_their_memory(new_tokens):
    """A pool whose heads are one tensor, expanded, is read as one that holds each head."""
    table, lens = torch.tensor([[2, 0, 1]], dtype=torch.int32), torch.tensor([90], dtype=torch.int32)
    one = [torch.randn(3, 1, 32, dim) for dim in (32, 32, 48)]
    sizes = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "index_dim": 48, "index_heads": 2, "index_key_heads": 2}
    plan = DecodePlan(
        max_batch=1, **sizes, page_size=32, max_pages=3, new_tokens=new_tokens, topk=2, block_size=32, dtype=torch.float32,
        device="cpu",
    )  # fmt: skip
    q, index_q = torch.randn(new_tokens, 6, 32), torch.randn(new_tokens, 2, 48)
    found = []
    for way in (lambda x: x.expand(-1, 2, -1, -1), lambda x: x.repeat(1, 2, 1, 1)):
        k, v, keys = map(way, one)
        out = plan.run(q, PagedKV(k, v, table, lens), index_q, PagedIndexKeys(keys, table, lens)).clone()
        found.append((plan.blocks.clone(), out, plan.lse.clone()))
    assert torch.equal(found[0][0], found[1][0])
    close(found[0][1:], found[1][1:])
