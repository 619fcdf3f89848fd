# SPDX-License-Identifier: MIT
"""Every public function is an operator in traced graphs: `torch.library.opcheck` accepts it, and what is compiled or exported
gives what eager calls give."""

import gc
import io
import shutil

import pytest
import torch

import openmsa
from openmsa import (
    E4M3,
    MXFP4,
    AttentionPlan,
    CertifiedKeys,
    DecodePlan,
    Int8,
    PagedIndexKeys,
    PagedKV,
    Sequences,
    block_scores,
    dense_attention,
    index_loss,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.operators.operator import OPERATORS, flat
from openmsa.operators.packing import pack, unpack
from openmsa.runtime.tracing import FUNCTIONS, TRACED

BLOCK = {"block_size": 16}
COMPILER = "inductor" if shutil.which("g++") or shutil.which("c++") else "aot_eager"
FORMATS = [("plain", "plain"), ("e4m3", "int8"), ("nvfp4", "mxfp4"), ("plain", "certified")]


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend)


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def agree(found, expected):
    """Results agree bit for bit, strides and dtypes too."""
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.stride() == y.stride()
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def packed(q_lens, k_lens):
    """Returns q, k, v, index_q, index_k and the starts of both."""
    total_q, total_k = sum(q_lens), sum(k_lens)
    shapes = ((total_q, 4, 32), (total_k, 2, 32), (total_k, 2, 32), (total_q, 2, 32), (total_k, 1, 32))
    starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (q_lens, k_lens))
    return *(torch.randn(shape) for shape in shapes), *starts


def caches(batch, format="plain", index_format="plain", pages=6):
    table = torch.randperm(batch * pages).int().view(batch, pages)
    kv = PagedKV.allocate(table, batch * pages, 2, 16, 32, format=format)
    return kv, PagedIndexKeys.allocate(table, batch * pages, 1, 16, 32, format=index_format)


def tokens(batch, new):
    """Returns new k, v and index keys, and q and index_q."""
    heads = (2, 2, 1, 4, 2)
    return tuple(torch.randn(batch * new, h, 32) for h in heads)


def calls():
    """Returns arguments of a call for each operator."""
    q, k, v, index_q, index_k, cu_q, cu_k = packed((10, 0, 21), (20, 5, 40))
    seqs = Sequences(cu_q, cu_k, 21, 40)
    blocks = select_blocks(index_q, index_k, 3, seqs, **BLOCK)
    kv, keys = caches(3)
    kv.append(*tokens(3, 20)[:2])
    keys.append(tokens(3, 20)[2])
    plan = plan_of(new_tokens=2)
    layers = AttentionPlan(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, total_q=31, max_seqlen_q=21, max_seqlen_k=40, topk=3, **BLOCK)
    own = {"seqs": seqs, **BLOCK}
    rows, index_rows, counts = tokens(3, 2)[3], tokens(3, 2)[4], torch.zeros(31, 2, dtype=torch.int32)
    certified = {"topk": 3, "certified": True, "rescored": counts}
    return {
        "block_scores": {"index_q": index_q, "index_k": index_k, **own},
        "block_scores of lengths": {"index_q": index_q, "index_k": index_k, "seqs": Sequences(cu_q, cu_k), **BLOCK},
        "select_blocks": {"index_q": index_q, "index_k": MXFP4.quantize(index_k), "topk": 3, **own},
        "select_blocks into": {"index_q": index_q, "index_k": CertifiedKeys.quantize(index_k), **certified, **own},
        "select_blocks_from_scores": {"scores": block_scores(index_q, index_k, **own), "topk": 3, **own},
        "sparse_attention": {"q": q, "k": k, "v": v, "blocks": blocks, "return_lse": True, **own},
        "sparse_attention of e4m3": {
            "q": E4M3.quantize(q),
            "k": E4M3.quantize(k),
            "v": E4M3.quantize(v),
            "blocks": blocks,
            **own,
        },
        "dense_attention": {"q": q, "k": k, "v": v, "softmax_scale": 0.25, "return_max_score": True, **own},
        "index_loss": {"q": q, "k": k, "index_q": index_q, "index_k": index_k, "blocks": blocks, "coefficient": 0.5, **own},
        "msa_attention": {"q": q, "k": k, "v": v, "index_q": index_q, "index_k": index_k, "topk": 3, **own},
        "append_kv": {"self": kv, "k": k[:6], "v": v[:6]},
        "append_index_keys": {"self": keys, "keys": index_k[:6]},
        "dequantize": {"self": MXFP4.quantize(index_k), "dtype": torch.bfloat16},
        "fill": {"self": Int8.allocate(tuple(index_k.shape)), "values": index_k},
        "plan_select": {"self": layers, "index_q": index_q, "index_k": index_k, "topk": 3},
        "plan_attend": {"self": layers, "q": q, "k": k, "v": v, "blocks": blocks},
        "plan_attend into": {"self": layers, "q": q, "k": k, "v": v, "blocks": blocks, "out": torch.zeros(31, 4, 32)},
        "run_decode_plan": {"self": plan, "q": rows, "kv": kv, "index_q": index_rows, "index_keys": keys},
    }


def plan_of(**sizes):
    return DecodePlan(
        max_batch=4,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=32,
        page_size=16,
        max_pages=6,
        index_dim=32,
        topk=3,
        block_size=16,
        dtype=torch.float32,
        device="cpu",
        **sizes,
    )


@pytest.mark.parametrize("case", calls())
def test_opcheck(case):
    arguments = calls()[case]  # which keeps plans alive
    operator = OPERATORS[f"openmsa::{case.split()[0]}"]
    plan, buffers = arguments["self"] if case == "run_decode_plan" else None, []
    if plan is not None:
        arguments["out"], buffers = torch.zeros(6, 4, 32), [plan._blocks[:6], plan._lse[:6]]
    tensors, written, *numbers = pack(arguments, operator.writes)
    if written:
        buffers += [x for x in flat(operator.results(**arguments)) if not any(x is own for own in written)]
    # PyTorch compares no float8 tensors, which its test of the schema does.
    float8 = any(x.dtype == torch.float8_e4m3fn for x in tensors + written)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")[float8:]
    node = operator.packet.into if written else operator.packet.default
    lists = (tensors, written + buffers) if written else (tensors,)
    torch.library.opcheck(node, (*lists, *numbers), test_utils=tests)


def test_each_public_function_is_an_operator():
    functions = (block_scores, select_blocks, select_blocks_from_scores, sparse_attention, dense_attention, index_loss)
    for function in (*functions, msa_attention, PagedKV.append, PagedIndexKeys.append):
        assert function.__wrapped__ in FUNCTIONS.values(), function
    functions, operators = ({name for name in table if name.startswith("openmsa::")} for table in (FUNCTIONS, OPERATORS))
    assert functions | {"openmsa::run_decode_plan"} == operators
    assert {f"openmsa::{case.split()[0]}" for case in calls()} == operators


def test_eager_calls_pass_the_operators_by(monkeypatch):
    monkeypatch.setattr("openmsa.runtime.tracing.TRACED", {})
    q, k, v, index_q, index_k, _, _ = packed((5,), (40,))
    assert msa_attention(q, k, v, index_q, index_k, 2, **BLOCK).shape == q.shape
    assert TRACED


def test_a_step_compiles():
    """Caches, a selection and attention compile to one graph, for batches and lengths of several sizes."""
    step = compiled(append_and_attend, COMPILER)
    for batch, new in ((3, 5), (2, 7), (4, 9)):
        mine, theirs = caches(batch, "e4m3", "int8"), caches(batch, "e4m3", "int8")
        for cache, other in zip(mine, theirs, strict=True):
            other.page_table.copy_(cache.page_table)
        for _ in range(2):
            new_tokens = tokens(batch, new)
            agree(step(*mine, *new_tokens), append_and_attend(*theirs, *new_tokens))
        for cache, other in zip(mine, theirs, strict=True):
            assert torch.equal(cache.seq_lens, other.seq_lens)
    assert graphs() == 1


def append_and_attend(kv, keys, k, v, index_k, q, index_q):
    kv.append(k, v)
    keys.append(index_k)
    new = q.shape[0] // kv.batch
    seqs = Sequences(torch.arange(kv.batch + 1, dtype=torch.int32) * new, None, new)
    return msa_attention(q, kv, None, index_q, keys, 3, seqs, certified=keys.format == "certified", **BLOCK)


@pytest.mark.parametrize(("format", "index_format"), FORMATS)
def test_each_format_compiles(format, index_format):
    step = compiled(append_and_attend)
    for batch, new in ((3, 5), (2, 7)):
        mine, theirs = (caches(batch, format, index_format) for _ in range(2))
        for cache, other in zip(mine, theirs, strict=True):
            other.page_table.copy_(cache.page_table)
        new_tokens = tokens(batch, new)
        agree(step(*mine, *new_tokens), append_and_attend(*theirs, *new_tokens))
    assert graphs() == 1


def test_halves_of_one_pool_compile():
    """Keys and values that share memory are written through a graph."""
    pool = torch.zeros(18, 2, 2, 16, 32)
    kv, keys = caches(3)
    other, other_keys = caches(3)
    other.page_table.copy_(kv.page_table)
    halves = PagedKV(pool[:, 0], pool[:, 1], kv.page_table, kv.seq_lens)
    new_tokens = tokens(3, 5)
    agree(compiled(append_and_attend)(halves, keys, *new_tokens), append_and_attend(other, other_keys, *new_tokens))
    assert torch.equal(pool[:, 0], other.k)
    assert torch.equal(pool[:, 1], other.v)


def test_stages_compile_where_only_tensors_say_the_lengths():
    def stages(q, k, v, index_q, index_k, cu_q, cu_k):
        seqs = Sequences(cu_q, cu_k)
        scores = block_scores(index_q, index_k, seqs, **BLOCK)
        blocks = select_blocks_from_scores(scores, 3, seqs, **BLOCK)
        out, lse = sparse_attention(q, k, v, blocks, seqs, return_lse=True, **BLOCK)
        return scores, blocks, out, lse, *dense_attention(q, k, v, seqs, return_max_score=True, causal=False, **BLOCK)

    traced = compiled(stages)
    for lens in (((10, 30), (20, 50)), ((7, 20, 14), (7, 30, 34)), ((0, 3, 0, 40), (9, 100, 8, 40))):
        arguments = packed(*lens)
        agree(traced(*arguments), stages(*arguments))
    assert graphs() == 1


def test_formats_are_made_in_a_graph():
    def numbers(x):
        return E4M3.quantize(x, 0.5).dequantize() + Int8.quantize(x).dequantize()

    x = torch.randn(10, 2, 32)
    agree(compiled(numbers)(x), numbers(x))


def test_a_decode_plan_compiles():
    plan = plan_of(new_tokens=2)

    def step(kv, keys, q, index_q, out):
        return plan.run(q, kv, index_q, keys, out=out) * 2, plan.lse + 1, plan.blocks + 0

    for given in (False, True):
        run = compiled(step)
        for batch in (3, 2):
            kv, keys = caches(batch)
            new = tokens(batch, 20)
            kv.append(*new[:2])
            keys.append(new[2])
            *_, q, index_q = tokens(batch, 2)
            out = torch.zeros(q.shape) if given else None
            found = run(kv, keys, q, index_q, out)
            agree((plan._out[: 2 * batch] if out is None else out) * 2, found[0])
            agree(found, step(kv, keys, q, index_q, None))
            agree((plan.lse + 1, plan.blocks), found[1:])


def test_a_plan_of_layers_compiles():
    """Each layer has a selection of its own, although the plan holds one at a time."""
    q, k, v, index_q, index_k, cu_q, cu_k = packed((10, 0, 21), (20, 5, 40))
    plan = AttentionPlan(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, total_q=31, max_seqlen_q=21, max_seqlen_k=40, topk=3, **BLOCK)

    def layers(q, k, v, index_q, index_k):
        first, second = (plan.select(x, index_k).clone() for x in (index_q, -index_q))
        return plan.attend(q, k, v, first), plan.attend(q, k, v, second), plan.run(q, k, v, index_q, index_k), second

    agree(compiled(layers)(q, k, v, index_q, index_k), layers(q, k, v, index_q, index_k))


def test_a_plan_must_live():
    plan = plan_of()
    form = pack({"self": plan})
    del plan
    gc.collect()
    with pytest.raises(ValueError, match=r"DecodePlan \d+ must live in this process"):
        unpack(*form)


class Layer(torch.nn.Module):
    def forward(self, q, k, v, index_q, index_k, cu_q, cu_k):
        seqs = Sequences(cu_q, cu_k)
        out = msa_attention(q, k, v, index_q, index_k, 3, seqs, softmax_scale=0.2, **BLOCK)
        return out, block_scores(index_q, index_k, seqs, **BLOCK)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_layer_is_saved_and_loaded(strict):
    arguments = packed((10, 30), (20, 50))
    total_q, total_k, batch = (torch.export.Dim(name, min=2) for name in ("total_q", "total_k", "batch"))
    sizes = (total_q, total_k, total_k, total_q, total_k, batch, batch)
    exported = torch.export.export(Layer(), arguments, dynamic_shapes=tuple({0: size} for size in sizes), strict=strict)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    layer = torch.export.load(file).module()
    for lens in (((10, 30), (20, 50)), ((7, 20, 14), (7, 30, 34))):
        arguments = packed(*lens)
        agree(layer(*arguments), Layer()(*arguments))


def test_gradients_are_those_of_eager_calls():
    def loss(q, k, v, index_q, index_k, cu_q, cu_k):
        seqs = Sequences(cu_q, cu_k, 30, 60)
        out, lse = msa_attention(q, k, v, index_q, index_k, 3, seqs, return_lse=True, **BLOCK)
        return (out * lse[..., None]).sum() + dense_attention(q, k, v, seqs).square().sum()

    traced = compiled(loss)
    for lens in (((10, 30), (20, 50)), ((7, 20, 14), (7, 30, 34))):
        arguments = packed(*lens)
        sources = [x.requires_grad_() for x in arguments[:3]]
        found, expected = (torch.autograd.grad(f(*arguments), sources) for f in (traced, loss))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert graphs() == 1


def test_gradients_of_the_index_loss_are_those_of_eager_calls():
    def loss(q, k, v, index_q, index_k, cu_q, cu_k):
        seqs = Sequences(cu_q, cu_k, 30, 60)
        blocks = select_blocks(index_q.detach(), index_k.detach(), 3, seqs, **BLOCK)
        selected = index_loss(q, k, index_q, index_k, blocks, seqs, return_loss=False, **BLOCK)
        return 2 * selected + index_loss(q, k, index_q, index_k, seqs=seqs)

    traced = compiled(loss)
    arguments = packed((10, 30), (20, 50))
    sources = [x.requires_grad_() for x in arguments[3:5]]
    found, expected = (torch.autograd.grad(f(*arguments), sources) for f in (traced, loss))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_missing_gradients_raise_the_eager_sentence():
    q, k, v, *_ = packed((5,), (40,))
    k, v = E4M3.quantize(k), E4M3.quantize(v)
    out = compiled(lambda q: dense_attention(q, k, v, impl="cpu"))(q.requires_grad_())
    with pytest.raises(NotImplementedError, match="it computes gradients for packed tensors alone, got a E4M3"):
        out.sum().backward()


def test_wrong_arguments_stop_the_trace():
    q, k, v, *_ = packed((5,), (40,))
    with pytest.raises(Exception, match=r"q must have shape \[total_q, num_q_heads, head_dim\]"):
        compiled(lambda q: dense_attention(q, k, v))(q[None])
    with pytest.raises(Exception, match="seqs must be a tensor, a number or an object of openmsa"):
        compiled(lambda q: dense_attention(q, k, v, {1, 2}))(q)
    with pytest.raises(Exception, match="return_out, return_lse or return_max_score must be True, got False for all three"):
        torch.compile(lambda q: dense_attention(q, q, q, return_out=False), fullgraph=True)(torch.randn(4, 2, 16))


def test_packing_round_trip():
    q, k, _, _, index_k, cu_q, _ = packed((5,), (40,))
    cache, keys = caches(2)
    keys.seq_lens = cache.seq_lens
    given = {
        "q": E4M3.quantize(q, 0.5),
        "k": [k, k, (index_k, None)],
        "cache": cache,
        "keys": keys,
        "seqs": Sequences(cu_q, max_seqlen_q=5),
        "plan": {"rows": cu_q, "tiles": -1, "name": "it's"},
        "numbers": (1, 2.5, True, torch.bfloat16, torch.device("cpu")),
    }
    tensors, written, ints, floats, form = pack(given, ("cache.seq_lens", "plan"))
    assert [x is y for x, y in zip(written, (cache.seq_lens, cu_q), strict=True)] == [True, True]
    assert not any(x is y for x in tensors for y in written)
    assert ints == [5, -1, 1]
    assert floats == [2.5]
    made = unpack(tensors, written, ints, floats, form)
    assert made["q"].data is given["q"].data
    assert made["q"].scale is given["q"].scale
    assert made["k"][0] is k
    assert made["k"][1] is k
    assert made["k"][2] == (index_k, None)
    assert made["cache"].seq_lens is made["keys"].seq_lens is cache.seq_lens
    assert type(made["keys"]) is PagedIndexKeys
    assert made["seqs"].cu_seqlens_q is cu_q
    assert made["seqs"].max_seqlen_q == 5
    assert made["plan"] == given["plan"]
    assert made["numbers"] == given["numbers"]


def test_operators_are_registered_by_the_package():
    assert openmsa.operators.OPERATORS is OPERATORS
