# SPDX-License-Identifier: MIT
"""Runs a `Case` through every public function and implementation that serves it, and raises AssertionError on a difference."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import replace

import torch

from openmsa import (
    E4M3,
    DecodePlan,
    PagedIndexKeys,
    PagedKV,
    block_scores,
    dense_attention,
    explain,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.block_topk import CERTIFIED_STAGE
from openmsa.explain import STAGES
from openmsa.kv_cache import Stored
from openmsa.runtime import dispatch
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal, compare
from openmsa.testing.inputs import packed_order, problem, random_blocks, strided
from tests import oracle
from tests.fuzz import truth
from tests.low_precision import codes_of, exact_index, quantized, stored_problem
from tests.products import multiplies_e4m3


def check_case(case, device="cpu", interpreted=False):
    """Checks a case and returns how often each (function, implementation) was compared. interpreted: only kernels run, on CPU
    tensors in Triton's interpreter."""
    run = Round(case, device, interpreted)
    parts = [run.scores, run.selection, run.dense, run.sparse]
    for part in parts if interpreted else [*parts, run.path, run.plan, run.cache]:
        part()
    return run.compared


@contextlib.contextmanager
def interpreter():
    """Lets Triton's kernels refuse CPU tensors for their dtype alone within the context, for Triton's interpreter."""

    def unless_read(*tensors, dtypes=(torch.float16, torch.bfloat16)):
        plain = [x for x in tensors if x is not None and getattr(x, "format", "plain") == "plain"]
        return None if all(x.dtype in dtypes for x in plain) else f"it needs {dtypes}"

    refused, dispatch.unless_cuda = dispatch.unless_cuda, unless_read
    try:
        yield
    finally:
        dispatch.unless_cuda = refused


def in_orders(numbers):
    """Returns the numbers of a case with the dimensions of queries and keys in several orders, whose products are the same but
    for rounding: of the few rows that some cases have, one order alone may err far less than a sum of so many terms may."""
    order = torch.arange(numbers.q.shape[-1])
    orders = (order, order.flip(0), order.roll(len(order) // 2))
    return [replace(numbers, q=numbers.q[..., at], k=numbers.k[..., at]) for at in orders]


class Round:
    """Holds the operands of a case, on the device and as float64 numbers, and makes the comparisons."""

    def __init__(self, case, device, interpreted=False):
        self.case, self.device, self.interpreted, self.compared = case, device, interpreted, Counter()
        self.known = {}  # the truths of attention by their arguments
        self.dtype = getattr(torch, case.dtype)
        p = problem(
            case.q_lens, case.k_lens, kv_heads=case.kv_heads, group=case.group, index_heads=case.index_heads,
            index_key_heads=case.index_key_heads, head_dim=case.head_dim, index_dim=case.index_dim, dtype=self.dtype,
            offsets=case.offsets, integer_index=case.whole, shared_prefix=case.shared_prefix, seed=case.seed,
        )  # fmt: skip
        scale = None
        if case.whole and case.index_keys != "plain":
            p = exact_index(p, case.index_keys, case.seed)
            scale = {"e4m3": 0.5, "nvfp4": 1.0}.get(case.index_keys.split()[0])
        s = stored_problem(p, case.keys, case.index_keys, case.storage, case.page_size, case.queries, scale)
        if case.whole and case.queries == "e4m3":
            index_q = E4M3.quantize(p.index_q, 0.5)
            codes = s.codes | {"index_q": codes_of(index_q)}
            s = replace(s, index_q=index_q, numbers=replace(s.numbers, index_q=p.index_q.double()), codes=codes)
        self.numbers, self.stored, self.here = s.numbers, s, s.to(device)
        if case.storage != "flat":
            q, index_q = (strided(x, 2) if isinstance(x, torch.Tensor) else x for x in (self.here.q, self.here.index_q))
            self.here = replace(self.here, q=q, index_q=index_q)
        self.near = torch.bfloat16 if case.queries == "e4m3" else self.dtype  # the dtype of honest numbers
        self.last = truth.last_keys(p)
        self.visible = self.last.clamp(min=-1).div(case.block_size, rounding_mode="floor") + 1
        self.chosen = {"init_blocks": case.init_blocks, "local_blocks": case.local_blocks}

    def run(self, function, *args, **kwargs):
        """Yields (implementation, name, result) of each implementation that serves the call, with poisoned outputs, and checks
        that a second call gives the same."""
        stages = [STAGES[select_blocks], STAGES[sparse_attention]] if function is msa_attention else [STAGES[function]]
        if kwargs.get("certified"):
            stages[0] = CERTIFIED_STAGE
        tables = [{row.name: row.path for row in stage.table} for stage in stages]
        names = [name for name in tables[-1] if all(name in table for table in tables)]
        if self.interpreted:
            names = [name for name in names if ".triton_" in tables[-1][name]]
        elif function is msa_attention and self.device != "cpu":
            names.insert(0, "auto")  # Its stages may run kernels of different names.
        for impl in names:
            explanation = explain(function, *args, impl=impl, **kwargs)
            if any(stage.chosen is None for stage in (explanation if function is msa_attention else (explanation,))):
                continue
            name = f"{function.__name__} {impl}"
            with PoisonedOutputs():
                results = function(*args, impl=impl, **kwargs)
            if self.device != "cpu" or self.case.seed % 4 == 0:
                repeated = function(*args, impl=impl, **kwargs)
                for first, again in zip(_tuple(results), _tuple(repeated), strict=True):
                    assert_equal(f"{name} again", again, first)
            self.compared[function.__name__, impl] += 1
            yield impl, name, results

    @functools.cached_property
    def index_truth(self):
        """Returns the scores in float64 and as honest PyTorch gives them, and the sums of the magnitudes of their terms."""
        operands = self.numbers.index_q, self.numbers.index_k, self.numbers, self.case.block_size
        factors = self.stored.factors("index_q", "index_k", self.device)
        honest = oracle.honest_scores(self.stored.honest(self.near), self.case.block_size, **factors)
        return truth.scores(*operands), honest.float(), truth.magnitudes(*operands)

    def scores(self):
        here = self.here
        for _, name, found in self.run(block_scores, here.index_q, here.index_k, here.seqs, block_size=self.case.block_size):
            exact, honest, magnitudes = self.index_truth
            if self.case.whole:
                assert_equal(name, found, exact.to(found.dtype))
            else:
                assert_close(name, found, honest, exact, magnitudes=magnitudes)

    def selected(self, name, blocks):
        """Compares a selection from the index branch with the truth."""
        case, (exact, honest, magnitudes) = self.case, self.index_truth
        if case.whole:
            assert_equal(name, blocks, truth.selection(exact, self.visible, case.topk, **self.chosen))
            return
        slack = 2 * compare(honest, honest, exact, magnitudes=magnitudes).bound
        truth.assert_selected(name, blocks, exact, self.visible, slack, case.topk, **self.chosen)

    def selection(self):
        case, here = self.case, self.here
        options = {"block_size": case.block_size, **self.chosen}
        for certified in (False, True) if case.index_keys == "certified" else (False,):
            arguments = (here.index_q, here.index_k, case.topk, here.seqs)
            for _, name, blocks in self.run(select_blocks, *arguments, certified=certified, **options):
                self.selected(f"{name}{' certified' * certified}", blocks)
        given = self.index_truth[0].float().permute(2, 0, 1).contiguous().to(self.device).permute(1, 2, 0)
        expected = truth.selection(given.cpu(), self.visible, case.topk, **self.chosen)
        for _, name, blocks in self.run(select_blocks_from_scores, given, case.topk, here.seqs, **options):
            assert_equal(name, blocks, expected)
        visible = self.visible.int().to(self.device)
        options = self.chosen | {"visible_blocks": visible}
        for _, name, blocks in self.run(select_blocks_from_scores, given, case.topk, **options):
            assert_equal(f"{name} visible_blocks", blocks, expected)

    def attended(self, name, results, blocks, causal=True):
        """Compares out and lse with the truth."""
        blocks = None if blocks is None else blocks.cpu()
        near = self.near
        scales = getattr(getattr(self.here.kv[0], "v", None), "scale", None)
        by_page = self.case.keys.startswith("e4m3") and scales is not None and scales.dim() == 2
        if by_page and "dense" not in name and (self.interpreted or self.device != "cpu"):
            near = torch.bfloat16  # Triton's prefill kernels weigh values that have a scale a page in bfloat16.
        key = causal, near, blocks if blocks is None else blocks.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.attention_truth(blocks, causal, near)
        for which, tested, near, right in zip(("out", "lse"), results, *self.known[key], strict=True):
            assert_close(f"{name} {which}", tested, near.to(tested.dtype), right)

    def attention_truth(self, blocks, causal, near):
        """Returns (out, lse) as honest PyTorch gives them, and in float64."""
        case = self.case
        options = {"blocks": blocks, "block_size": case.block_size, "scale": case.scale, "causal": causal}
        exact = truth.attention(self.numbers, torch.float64, **options)
        factors = self.stored.factors("q", "k", self.device)
        if factors and multiplies_e4m3(torch.device(self.device)):  # Such kernels round weights to E4M3 too.
            honest = [truth.attention(self.numbers, torch.float32, factors=factors, form="e4m3", **options)]
        else:
            orders = in_orders(self.stored.honest(near))
            honest = [truth.attention(x, near, form=form, **options) for x in orders for form in ("normalised", "raw")]
        return [truth.worse(near, right) for near, right in zip(zip(*honest, strict=True), exact, strict=True)], exact

    def dense(self):
        case, here = self.case, self.here
        options = {"causal": case.causal, "softmax_scale": case.scale, "block_size": case.block_size}
        for _, name, results in self.run(dense_attention, here.q, *here.kv, here.seqs, return_lse=True, **options):
            self.attended(name, results, None, case.causal)
        options |= {"return_out": False, "return_max_score": True}
        exact = honest = magnitudes = None
        for _, name, found in self.run(dense_attention, here.q, *here.kv, here.seqs, **options):
            if exact is None:
                operands = self.numbers.q, self.numbers.k, self.numbers, case.block_size, case.causal
                exact, magnitudes = truth.scores(*operands), truth.magnitudes(*operands)
                near = self.stored.honest(self.near)
                honest = oracle.honest_scores(near, case.block_size, near.q, near.k, case.causal)
            assert_close(f"{name} max_score", found, honest.to(found.dtype), exact, magnitudes=magnitudes)

    def sparse(self):
        case, here = self.case, self.here
        heads = 1 if case.index_heads == 1 else case.kv_heads
        blocks = random_blocks(self.numbers, case.topk, case.block_size, heads, case.seed).to(self.device)
        options = {"block_size": case.block_size, "softmax_scale": case.scale, "return_lse": True}
        for _, name, results in self.run(sparse_attention, here.q, *here.kv, blocks, here.seqs, **options):
            self.attended(name, results, blocks)
        count = -(-max(case.k_lens, default=0) // case.block_size)
        if 0 < count <= 64:  # every block: dense attention
            blocks = torch.arange(count, dtype=torch.int32, device=self.device).flip(0).expand(sum(case.q_lens), 1, count)
            for _, name, results in self.run(sparse_attention, here.q, *here.kv, blocks, here.seqs, **options):
                self.attended(f"{name} on all blocks", results, None)

    def path(self):
        case, here = self.case, self.here
        options = {"block_size": case.block_size, "softmax_scale": case.scale, "return_lse": True}
        arguments = (here.q, *here.kv, here.index_q, here.index_k, case.topk, here.seqs)
        found = {}
        for impl, name, results in self.run(msa_attention, *arguments, **options, **self.chosen):
            chosen = self.chosen | {"block_size": case.block_size, "impl": impl}
            blocks = found[impl] = select_blocks(here.index_q, here.index_k, case.topk, here.seqs, **chosen)
            self.attended(name, results, blocks)
        if case.chunk is not None:
            for impl, name, results in self.run(msa_attention, *arguments, query_chunk=case.chunk, **options, **self.chosen):
                self.attended(f"{name} in chunks", results, found[impl])
        plain = {case.queries, case.keys, case.index_keys} == {"plain"}
        if plain and case.storage == "flat" and len(case.q_lens) > 1:
            self.reordered(arguments, options)

    def reordered(self, arguments, options):
        """Checks that sequences in another order give the same results in that order."""
        case, here = self.case, self.here
        order = [*range(1, len(case.q_lens)), 0]
        rows, keys = packed_order(case.q_lens, order), packed_order(case.k_lens, order)
        seqs = self.numbers.permuted(order).to(self.device).seqs
        moved = (here.q[rows], *(x[keys] for x in here.kv), here.index_q[rows], here.index_k[keys], case.topk, seqs)
        first = {impl: results for impl, _, results in self.run(msa_attention, *arguments, **options, **self.chosen)}
        for impl, name, results in self.run(msa_attention, *moved, **options, **self.chosen):
            for which, result, whole in zip(("out", "lse"), results, first[impl], strict=True):
                assert_equal(f"{name} {which} reordered", result, whole[rows.to(self.device)])

    def plan(self):
        """Checks a `DecodePlan` where the case is a decode step that it takes."""
        case, here = self.case, self.here
        if not case.decodes:
            return
        try:
            plan = DecodePlan(
                max_batch=len(case.q_lens) + 1, num_q_heads=case.kv_heads * case.group, num_kv_heads=case.kv_heads,
                head_dim=case.head_dim, page_size=case.page_size, max_pages=max(here.kv[0].page_table.shape[1], 1),
                new_tokens=case.q_lens[0], index_heads=case.index_heads, index_key_heads=case.index_key_heads,
                index_dim=case.index_dim, topk=case.topk, block_size=case.block_size, softmax_scale=case.scale,
                dtype=self.dtype, device=self.device, **self.chosen,
            )  # fmt: skip
            plan._out.fill_(torch.nan), plan._lse.fill_(torch.nan), plan._blocks.fill_(-7)
            out = plan.run(here.q, here.kv[0], here.index_q, here.index_k)
        except NotImplementedError:  # A plan on a GPU refuses some formats and sizes.
            return
        first = [x.clone() for x in (out, plan.lse, plan.blocks)]
        out = plan.run(here.q, here.kv[0], here.index_q, here.index_k)
        for name, x, y in zip(("out", "lse", "blocks"), (out, plan.lse, plan.blocks), first, strict=True):
            assert_equal(f"DecodePlan {name} again", x, y)
        self.selected("DecodePlan", plan.blocks)
        self.attended("DecodePlan", (out, plan.lse), plan.blocks)
        self.compared["DecodePlan", "plan"] += 1

    def cache(self):
        """Checks that what is appended in pieces comes back as the format rounds it."""
        case = self.case
        if not case.paged or not case.q_lens:
            return
        p, table = self.numbers, self.here.kv[0].page_table
        if case.shared_prefix:  # Tokens of two sequences would share a place.
            table = torch.arange(table.numel(), dtype=torch.int32, device=self.device).flip(0).view_as(table)
        sizes = (table.numel() + 2 + len(case.k_lens),)
        kv = PagedKV.allocate(table, *sizes, case.kv_heads, case.page_size, case.head_dim, self.dtype, case.keys.split()[0])
        index = (case.index_key_heads, case.page_size, case.index_dim, self.dtype, case.index_keys.split()[0])
        keys = PagedIndexKeys.allocate(table, *sizes, *index)
        middle = [n // 2 for n in case.k_lens]
        for first, last in ((None, middle), (middle, case.k_lens)):
            starts = [0] * len(case.k_lens) if first is None else first
            rows = [
                sum(case.k_lens[:b]) + torch.arange(low, high) for b, (low, high) in enumerate(zip(starts, last, strict=True))
            ]
            rows, counts = torch.cat(rows), [high - low for low, high in zip(starts, last, strict=True)]
            cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)
            new = [x.to(self.dtype)[rows].to(self.device) for x in (p.k, p.v, p.index_k)]
            kv.append(new[0], new[1], cu)
            keys.append(new[2], cu)
        found = (*kv.gather()[:2], keys.gather()[0])
        for name, got, x, form in zip(
            ("k", "v", "index_k"), found, (p.k, p.v, p.index_k), (case.keys, case.keys, case.index_keys), strict=True
        ):
            x, scale = x.to(self.dtype).to(self.device), 1.0 if form.split()[0] in ("e4m3", "nvfp4") else None
            put = x if form == "plain" else quantized(x, form.split()[0], scale)
            expected = put.dequantize() if isinstance(put, Stored) else put
            assert_equal(f"cache of {form} {name}", got, expected)
        self.compared["cache", "append"] += 1


def _tuple(results):
    return results if isinstance(results, tuple) else (results,)
