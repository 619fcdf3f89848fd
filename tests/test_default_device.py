# SPDX-License-Identifier: MIT
"""A default device of PyTorch is not asked for: calls with CPU tensors compute on the CPU whatever it is."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

import fmha_sm100
from fmha_sm100.sparse import quantize_kv_bf16_to_nvfp4_128x4
from openmsa import (
    AttentionPlan,
    HostDecodePlan,
    HostKV,
    PagedIndexKeys,
    PagedKV,
    Sequences,
    dense_attention,
    index_loss,
    sparse_attention,
)
from openmsa.operators.operator import OPERATORS
from openmsa.operators.packing import pack
from openmsa.runtime.matmul import has_onednn_linear
from openmsa.runtime.tracing import FUNCTIONS
from tests.fmha_sm100.batch import batch, lengths, pages, selection
from tests.fmha_sm100.sparse_cases import case
from tests.fmha_sm100.sparse_cases import lengths as bounds
from tests.fmha_sm100.test_fp4_indexer import setup
from tests.operators.test_operators import BLOCK, calls, packed, plan_of, tokens

ROOT = Path(__file__).parents[1]


@pytest.fixture
def meta():
    """Returns what calls a function while the default device is "meta", whose tensors hold no values."""
    has_onednn_linear.cache_clear()

    def run(function, *args, **kwargs):
        torch.set_default_device("meta")
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_default_device(None)

    yield run
    has_onednn_linear.cache_clear()


def agree(found, expected):
    """All tensors in these results are bit for bit the same, and on the CPU."""
    found, expected = ([leaf for leaf in tree_leaves(x) if isinstance(leaf, torch.Tensor)] for x in (found, expected))
    assert len(found) == len(expected)
    assert found
    for x, y in zip(found, expected, strict=True):
        assert x.device == y.device == torch.device("cpu")
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", calls())
def test_public_functions(meta, name):
    results = []
    for run in (meta, lambda function, *args, **kwargs: function(*args, **kwargs)):
        torch.manual_seed(0)
        arguments = calls()[name]
        operator = f"openmsa::{name.split()[0]}"
        if operator in FUNCTIONS:
            function = FUNCTIONS[operator]
            known = inspect.signature(function).parameters
            result = run(function, **{key: x for key, x in arguments.items() if key in known})
        else:
            plan = arguments["self"]
            result = run(plan.run, *(x for key, x in arguments.items() if key != "self"))
        tensors, written, *_ = pack(arguments, OPERATORS[operator].writes)
        results.append((() if result is None else result, tensors, written))
    agree(*results)


def both(meta, function, *arguments):
    """What the function returns and writes is the same with the default device "meta" and without."""
    mine, theirs = ([x.clone() if isinstance(x, torch.Tensor) else x for x in arguments] for _ in range(2))
    agree((meta(function, *mine), mine), (function(*theirs), theirs))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients(meta, causal):
    q, k, v, index_q, index_k, *_ = (x.requires_grad_() if x.is_floating_point() else x for x in packed((10, 21), (20, 40)))
    blocks = torch.tensor([0, 1, -1], dtype=torch.int32).expand(31, 2, 3)

    def run(q, k, v, index_q, index_k):
        seqs = Sequences.from_lengths([10, 21], [20, 40])
        out = sparse_attention(q, k, v, blocks, seqs, **BLOCK) + dense_attention(q, k, v, seqs, causal=causal)
        loss = out.square().sum() + index_loss(q.detach(), k.detach(), index_q, index_k, blocks, seqs, **BLOCK)
        return torch.autograd.grad(loss, (q, k, v, index_q, index_k))

    both(meta, run, q, k, v, index_q, index_k)


def test_caches_and_plans_are_made_where_they_are_told(meta):
    table, new = torch.randperm(12).int().view(2, 6), tokens(2, 20)
    q, index_q = tokens(2, 1)[3:]

    def run(table, k, v, index_k, q, index_q):
        kv = PagedKV.allocate(table, 12, 2, 16, 32, format="e4m3")
        keys = PagedIndexKeys.allocate(table, 12, 1, 16, 32, format="int8")
        kv.append(k, v)
        keys.append(index_k)
        host = HostKV.of(kv, cache_blocks=24, block_size=16, topk=3)
        sizes = {"max_batch": 4, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "index_dim": 32, "topk": 3, **BLOCK}
        over_host = HostDecodePlan(**sizes, page_size=16, max_pages=6, dtype=torch.float32, device="cpu")
        found = plan_of().run(q, kv, index_q, keys), over_host.run(q, host, index_q, keys)
        return found, kv.seq_lens, keys.seq_lens

    both(meta, run, table, *new[:3], q, index_q)
    k, v, index_k, q, index_q = tokens(2, 1)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)

    def attend(q, k, v, index_q, index_k):
        plan = AttentionPlan(
            cu_seqlens_q=starts, cu_seqlens_k=starts, total_q=2, max_seqlen_q=1, max_seqlen_k=1, topk=2, **BLOCK
        )
        return plan.attend(q, k, v, plan.select(index_q, index_k))

    both(meta, attend, q, k, v, index_q, index_k)


def test_drop_in_functions(meta):
    p, q, (k, v, _, table, _) = batch("mixed"), batch("mixed").q, pages(batch("mixed"), 16)
    blocks = selection(p, 16)

    def dense(q, k, v):
        plan = fmha_sm100.fmha_sm100_plan(*lengths_, 4, 2, output_maxscore=True)
        out, score, lse = fmha_sm100.fmha_sm100(q, k, v, plan, return_lse=True)
        return out, lse, fmha_sm100.sparse_topk_select(score, 2)

    def of_pages(q, k, v, table, blocks):
        plan = fmha_sm100.fmha_sm100_plan(*lengths_, 4, 2, page_size=16, kv_block_num=3)
        return fmha_sm100.fmha_sm100(q, k, v, plan, table, blocks)[0]

    lengths_ = lengths(p)
    both(meta, dense, q, p.k, p.v)
    both(meta, of_pages, q, k, v, table, blocks)


def test_drop_in_functions_of_selections(meta):
    p, blocks = case(block_size=16)
    own = bounds(p, "cpu")
    (k, v), options = quantize_kv_bf16_to_nvfp4_128x4(p.k, p.v), own | {"blk_kv": 16, "causal": True}
    topk = blocks.shape[2]
    scales = (k.scale_128x4, v.scale_128x4, k.global_scale, v.global_scale)

    def run(q, k, v, k_data, v_data, blocks, *scales):
        rows = fmha_sm100.build_k2q_csr(blocks, own["cu_seqlens_q"], own["cu_seqlens_k"], 16, total_k=len(k))
        plain = fmha_sm100.sparse_atten_func(q, k, v, *rows, topk, **options)
        return plain, fmha_sm100.sparse_atten_nvfp4_kv_func(q, k_data, v_data, *scales, *rows, topk, **options)

    both(meta, run, p.q, p.k, p.v, k.data, v.data, blocks.transpose(0, 1), *scales)
    scored = setup((3, 2), (130, 200), 2, 1, "mxfp4")[1] | {"scale_layout": "public"}
    both(meta, lambda: fmha_sm100.fp4_indexer_block_scores(**scored))


@pytest.mark.parametrize(
    "path", sorted(p for package in ("openmsa", "fmha_sm100") for p in (ROOT / package).rglob("*.py")), ids=lambda p: p.name
)
def test_every_creation_names_its_device(path):
    names = {f"torch.{function.__name__}" for function in _device_constructors()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
            given = {keyword.arg for keyword in node.keywords}  # None is what stands behind two stars.
            assert given & {"device", None}, f"line {node.lineno}: {ast.unparse(node)}"
