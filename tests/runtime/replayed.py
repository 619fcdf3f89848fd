# SPDX-License-Identifier: MIT
"""Recorded launches fit other tensors, without a GPU: ``python -m tests.runtime.replayed``. Triton must not interpret."""

from __future__ import annotations

import contextlib
import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from openmsa import (
    AttentionPlan,
    DecodePlan,
    PagedIndexKeys,
    PagedKV,
    Sequences,
    dense_attention,
    msa_attention,
    select_blocks,
    sparse_attention,
)
from openmsa.decode.kernels import Kernels
from openmsa.kv_cache import E4M3, NVFP4
from openmsa.plan import LAYERS
from openmsa.runtime import kinds
from openmsa.runtime.addresses import ALIGNED, AmbiguousError, Places, Prepared, PreparedLaunch, PreparedZero
from openmsa.runtime.dispatch import Stage
from openmsa.runtime.kinds import Computed, Kinds, Launched, Zeroed, computes, listening, taping, tensors_in
from openmsa.runtime.recording import recording
from openmsa.runtime.replay import Preparation
from openmsa.runtime.variants import Variant

ROOT = Path(__file__).parents[2]

WORKSPACE = 1 << 40  # an address that no tensor has


class Watch(TorchDispatchMode):
    """Finds what PyTorch computes: all but views, allocations and memory that a tape knows to be set to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        tape = listening.tape
        known = tape and isinstance(tape[-1], Zeroed) and func._schema.name == "aten::zero_" and args[0] is tape[-1].memory
        if not (view or known or func._schema.name.split("::")[1].removeprefix("new_").startswith("empty")):
            self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@contextmanager
def prepared(outcome: Any = "nothing is launched") -> Iterator[list[tuple[Prepared, list[int]]]]:
    """Within this context calls are recorded on a machine that has no GPU; what would be replayed is appended to the list, with
    the addresses of its inputs. outcome: what `record` returns, a stand-in for a `Replay` or why there is none."""
    found: list[tuple[Prepared, list[int]]] = []

    def encoded(variant: Variant, place: int, descriptor: Any) -> list[Any]:
        return ["map", *descriptor.shape, *descriptor.strides]

    def record(steps: list[Callable[[], Any]], inputs: list[Tensor], own: bool = True, rows: int = 0, by_row: int = 0) -> Any:
        preparation = Preparation(inputs, own, rows, by_row)
        for step in steps:
            tape: list[Any] = []
            watch, before = Watch(), len(launches)
            with taping(tape), watch:
                step()
            assert not watch.found, watch.found
            made = iter(launches[before:])
            events = [
                event._replace(variant=variant(event, next(made))) if isinstance(event, Launched) else event for event in tape
            ]
            assert next(made, None) is None, "every launch is on the tape"
            assert preparation.add(events) is None
        found.append((preparation.made(), [x.data_ptr() for x in inputs]))
        return outcome

    patches = mock.patch.object(kinds, "record", record), mock.patch("openmsa.runtime.variants.encoded", encoded)
    with recording(90) as launches, patches[0], patches[1]:
        yield found


def counted() -> tuple[Any, list[list[int]]]:
    """Returns a stand-in for a `Replay`, and the list to which each of its runs appends its addresses."""
    replays: list[list[int]] = []
    return SimpleNamespace(workspace=4096, device=0, run=lambda addresses, workspace, rows: replays.append(addresses)), replays


def variant(event: Launched, launch: Any) -> Variant:
    """Returns the variant that a launch would have, as far as its parameters go."""
    places = [i for i, x in enumerate(event.arguments) if type(x).__name__ == "TensorDescriptor"]
    signature = tuple(launch.signature.values())[: len(event.arguments)]
    return Variant(event.kernel, print, 0, False, False, (4, 1, 0), (), tuple((i, None) for i in places), {}, signature)


def resolved(made: Prepared, addresses: list[int], rows: int | None = None) -> list[Any]:
    """Returns every launch with its numbers and its addresses, of inputs at these addresses. rows: how many the inputs by row
    have; None: as many as when they were recorded."""
    at = {
        "input": lambda index, offset: addresses[index] + offset,
        "own": lambda offset, _: WORKSPACE + offset,
        "kept": lambda address, _: address,
    }
    words = [at[kind](*where) for kind, *where in made.words]

    calls: list[Any] = []
    for call in made.calls:
        if isinstance(call, PreparedZero):
            calls.append((words[call.word], call.size))
            continue
        parameters, tensors = call.variant.parameters, [words[word] for word in call.words]
        first, numbers = len(call.given.numbers), [*call.given.numbers]
        for sized in call.sized:
            described = sized.of(made.rows if rows is None else rows, words[sized.word])
            assert described.base.data_ptr() == words[sized.word]
            numbers[sized.number] = described.shape[sized.dim]
            at_sizes = slice(start := sized.number - sized.dim, start + len(described.shape))
            assert numbers[at_sizes] == described.shape
        every = (*numbers, *(("at", x) for x in tensors))
        taken = [every[i] if i < first else (i - first, every[i]) for i in parameters.order]
        calls.append((call.variant.kernel.__name__, call.grid, parameters.formats, taken))
    return calls


def step(
    lengths: list[tuple[int, int]], heads: tuple[int, int], stored: Any = None, packed: bool = False, **options: Any
) -> Any:
    """Returns what runs one layer, on new tensors each time, and how many layers it is for."""
    new, keys = [n for n, _ in lengths], [n for _, n in lengths]
    pages = sum(-(-n // 128) for n in keys)
    cu, cu_k = (torch.tensor([0, *x], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32) for x in (new, keys))
    where = {"cu_seqlens_k": cu_k} if packed else {"seq_lens": cu_k.diff(), "page_size": 128}
    table = None if packed else torch.zeros(len(new), max(-(-n // 128) for n in keys), dtype=torch.int32, device="cuda")
    sizes = {"total_q": sum(new), "max_seqlen_q": max(new), "max_seqlen_k": max(keys)}
    plan = AttentionPlan(cu_seqlens_q=cu, page_table=table, **sizes, **where, **options)

    def run() -> None:
        shape = (sum(keys),) if packed else (pages,)
        size = () if packed else (128,)
        both = torch.zeros(*shape, heads[1], *size, 256, dtype=torch.bfloat16, device="cuda")
        index = torch.zeros(*shape, 1, *size, 128, dtype=torch.bfloat16, device="cuda")
        k, v = both[..., :128], both[..., 128:]
        if stored is not None:
            k, v = stored.quantize(k), stored.quantize(v)
        rows = torch.zeros(sum(new), (heads[0] + heads[1]) * 128, dtype=torch.bfloat16, device="cuda")  # of one projection
        q, index_q = rows[:, : heads[0] * 128].view(-1, heads[0], 128), rows[:, heads[0] * 128 :].view(-1, heads[1], 128)
        plan.run(q, k, v, index_q, index, out=torch.zeros(q.shape, dtype=q.dtype, device="cuda"))

    return run


def decode(batch: int, keys: int, heads: tuple[int, int]) -> Any:
    """Returns the same for a decode plan."""
    pages = -(-keys // 128)
    sizes = {"num_q_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 128, "page_size": 128, "max_pages": pages}
    plan = DecodePlan(max_batch=batch, **sizes)

    def run() -> None:
        table = torch.zeros(batch, pages, dtype=torch.int32, device="cuda")
        lens = torch.zeros(batch, dtype=torch.int32, device="cuda")
        k, v = (torch.zeros(batch * pages, heads[1], 128, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        index = torch.zeros(batch * pages, 1, 128, 128, dtype=torch.bfloat16, device="cuda")
        q, index_q = (torch.zeros(batch, n, 128, dtype=torch.bfloat16, device="cuda") for n in heads)
        plan.run(q, PagedKV(k, v, table, lens), index_q, PagedIndexKeys(index, table, lens))

    return run


def call(new: int, keys: int, heads: tuple[int, int], query_chunk: int | None = None) -> Any:
    """Returns the same for a call without a plan."""

    def run() -> None:
        q, index_q = (torch.zeros(new, n, 128, dtype=torch.bfloat16, device="cuda") for n in heads)
        k, v, index_k = (torch.zeros(keys, n, 128, dtype=torch.bfloat16, device="cuda") for n in (heads[1], heads[1], 1))
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (new, keys))
        seqs = Sequences(cu_q, cu_k, new, keys)
        msa_attention(q, k, v, index_q, index_k, 16, seqs, query_chunk=query_chunk)

    return run


def stage(name: str, new: int, keys: int, heads: tuple[int, int], paged: bool = False) -> Any:
    """Returns the same for a call of one stage."""

    def run() -> None:
        q, index_q = (torch.zeros(new, n, 128, dtype=torch.bfloat16, device="cuda") for n in heads)
        shape = (-(-keys // 128), heads[1], 128, 128) if paged else (keys, heads[1], 128)
        k, v = (torch.zeros(*shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        table = torch.zeros(1, -(-keys // 128), dtype=torch.int32, device="cuda")
        lens = torch.zeros(1, dtype=torch.int32, device="cuda")
        seqs = Sequences(max_seqlen_k=keys) if paged else None
        if name == "selection":
            select_blocks(index_q, PagedIndexKeys(k, table, lens) if paged else k, 16, seqs)
        else:
            blocks = torch.zeros(new, heads[1], 16, dtype=torch.int32, device="cuda")
            both = (PagedKV(k, v, table, lens), None) if paged else (k, v)
            if name == "dense attention":
                dense_attention(q, *both, seqs, return_lse=True)
            else:
                sparse_attention(q, *both, blocks, seqs, return_lse=name == "attention and lse")

    return run


CASES: dict[str, Callable[[], Any]] = {
    "few queries": lambda: step([(20, 3000)], (16, 1)),
    "a prefill": lambda: step([(4096, 4096)], (64, 4)),
    "a packed prefill": lambda: step([(3000, 3500), (0, 0), (1096, 1096)], (64, 4), packed=True),
    "packed": lambda: step([(700, 700), (0, 0), (1, 90)], (8, 2), packed=True),
    "chunks": lambda: step([(900, 9000)], (16, 1), query_chunk=256),
    "mixed": lambda: step([(1, 3000), (300, 2000), (7, 4000)], (16, 1)),
    "decode rows": lambda: step([(1, 3000), (4, 4000)], (16, 1)),
    "e4m3": lambda: step([(300, 2000)], (16, 1), E4M3),
    "nvfp4": lambda: step([(300, 2000)], (16, 1), NVFP4),
    "call": lambda: call(300, 2000, (16, 1)),
    "call in chunks": lambda: call(900, 9000, (16, 1), 256),
    "call of selection": lambda: stage("selection", 4096, 9000, (64, 4)),
    "call of selection in pages": lambda: stage("selection", 30, 3000, (16, 1), True),
    "call of attention": lambda: stage("attention", 4096, 9000, (64, 4)),
    "call of attention in pages": lambda: stage("attention and lse", 30, 3000, (16, 1), True),
    "call of dense attention": lambda: stage("dense attention", 4096, 9000, (64, 4)),
    "call of dense attention in pages": lambda: stage("dense attention", 30, 3000, (16, 1), True),
    "decode of one sequence": lambda: decode(1, 9000, (64, 4)),
    "decode of many": lambda: decode(32, 4000, (64, 4)),
}


def launches_fit_other_tensors(name: str) -> None:
    """Those of a first layer, at a second layer's addresses, are those that the second layer makes."""
    with prepared() as found:
        run = CASES[name]()
        run()
        run()
    (mine, _), (theirs, addresses) = found
    assert mine.calls
    assert resolved(mine, addresses) == resolved(theirs, addresses)
    assert any(kind == "input" for kind, _, _ in mine.words)
    assert not any(isinstance(call, PreparedLaunch) and call.given.tensors for call in mine.calls), "memory is held no longer"
    if "prefill" in name:  # Hopper's own kernel, whose descriptors begin at queries, keys and values
        launches = [call for call in mine.calls if isinstance(call, PreparedLaunch)]
        (call,) = [call for call in launches if call.variant.kernel.__name__ == "sm90_attend_kernel"]
        assert [mine.words[word][0] for word in call.words[-3:]] == ["input"] * len(call.given.maps) == ["input"] * 3


LENGTHS: dict[str, tuple[tuple[int, ...], Callable[[int], Any]]] = {
    "few queries": ((33, 34), lambda n: step([(n, 3000)], (16, 1))),
    "queries on a long prefix": ((337, 352, 341), lambda n: step([(n, 75000)], (16, 1))),
    "a prefill": ((4096, 4001, 3969), lambda n: step([(n, 4096)], (64, 4))),
    "a prefill of one KV head": ((8192, 7937), lambda n: step([(n, 8192)], (16, 1))),
    "a rest for KV-outer": ((2048, 1985, 1999), lambda n: step([(n, 47744)], (64, 4))),
    "as many tokens as a head has numbers": ((128, 127, 125), lambda n: step([(n, 4000)], (16, 1))),
    "chunks": ((897, 904, 900), lambda n: step([(n, 9000)], (16, 1), query_chunk=256)),
    "chunks of a prefill": ((6200, 6270), lambda n: step([(n, 9000)], (64, 4), query_chunk=4096)),
    "mixed": ((310, 311), lambda n: step([(1, 3000), (n - 11, 2000), (10, 4000)], (16, 1))),
    "multi-head": ((701, 704), lambda n: step([(n, 9000)], (4, 4))),
    "e4m3": ((300, 304), lambda n: step([(n, 2000)], (16, 1), E4M3)),
    "e4m3, a prefill": ((4096, 4001), lambda n: step([(n, 9000)], (64, 4), E4M3)),
    "nvfp4": ((300, 304), lambda n: step([(n, 2000)], (16, 1), NVFP4)),
    "a call": ((300, 304, 297), lambda n: call(n, 2000, (16, 1))),
    "a call of a prefill": ((4096, 4001), lambda n: call(n, 9000, (64, 4))),
    "a call in chunks": ((897, 904), lambda n: call(n, 9000, (16, 1), 256)),
}
"""Steps and calls whose numbers of queries are rounded up alike."""


def launches_fit_other_numbers_of_queries(name: str) -> None:
    """Those of a step, at another step's addresses and with its number of queries, are those that the other step makes."""
    counts, step_of = LENGTHS[name]
    with prepared() as found:
        for count in counts:
            step_of(count)()
    for mine, _ in found:
        for (theirs, addresses), count in zip(found, counts, strict=True):
            assert (theirs.rows, theirs.workspace) == (count, mine.workspace)
            assert resolved(mine, addresses, count) == resolved(theirs, addresses)
    if "a prefill" in name and "e4m3" not in name:
        assert any(call.sized for call in found[0][0].calls if isinstance(call, PreparedLaunch)), "queries come by descriptors"


def memory_is_found(name: str) -> None:
    """A plan's layers need a workspace; a decode plan's use memory of the plan alone; unsplit dense attention needs none."""
    with prepared() as found:
        CASES[name]()()
    kinds_of_words = {kind for made, _ in found for kind, _, _ in made.words}
    beside = set() if name == "call of dense attention" else {"kept" if "decode of" in name else "own"}
    assert kinds_of_words == {"input"} | beside, kinds_of_words
    assert all(made.workspace % ALIGNED == 0 for made, _ in found)


def known_kinds_are_not_recorded_again() -> None:
    """A plan's second layer, and a plan of a like step, find what was recorded; a layer of another kind does not."""
    replayed, replays = counted()
    with prepared(replayed) as found:
        first, second = (step([(300, 2000)], (16, 1)) for _ in range(2))
        first()
        assert (len(found), len(replays)) == (1, 0)
        first()
        second()
        assert (len(found), len(replays)) == (1, 2), (len(found), len(replays))
        assert replays[1] != replays[0]
        step([(300, 2001)], (16, 1))()
        assert (len(found), len(replays)) == (1, 3), "bounds are rounded"
        step([(300, 2049)], (16, 1))()
        assert (len(found), len(replays)) == (2, 3)
        step([(289, 2000)], (16, 1))()
        step([(304, 2000)], (16, 1))()
        assert (len(found), len(replays)) == (2, 5), "numbers of queries are rounded"
        step([(288, 2000)], (16, 1))()
        step([(305, 2000)], (16, 1))()
        assert (len(found), len(replays)) == (4, 5)
        run = decode(2, 4000, (64, 4))
        run()
        run()
        assert (len(found), len(replays)) == (5, 6)
        decode(2, 4000, (64, 4))()
        assert (len(found), len(replays)) == (6, 6), "memory of a decode plan is its own"


def calls_of_like_lengths_are_of_one_kind() -> None:
    """A call of as many queries, rounded up, and of a cache that has grown, makes the launches of an earlier one."""
    replayed, replays = counted()
    with prepared(replayed) as found:
        pool = torch.zeros(40, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
        table = torch.zeros(1, 40, dtype=torch.int32, device="cuda")
        for new, keys, recorded, known in (
            (100, 2000, 1, 0),
            (97, 2040, 1, 1),
            (98, 1990, 1, 2),
            (101, 2000, 2, 2),
            (1, 2000, 3, 2),
        ):
            q, index_q = (torch.zeros(new, n, 64, dtype=torch.bfloat16, device="cuda") for n in (8, 2))
            lens = torch.full((1,), keys, dtype=torch.int32, device="cuda")
            cu = torch.tensor([0, new], dtype=torch.int32, device="cuda")
            caches = PagedKV(pool, pool.clone(), table, lens), PagedIndexKeys(pool.clone(), table, lens)
            msa_attention(q, caches[0], None, index_q, caches[1], seqs=Sequences(cu, None, new, keys))
            assert (len(found), len(replays)) == (recorded, known), (new, keys)
        for keys in range(2001, 2049):
            msa_attention(q, caches[0], None, index_q, caches[1], seqs=Sequences(cu, None, 1, keys))
        assert (len(found), len(replays)) == (3, 50), "one token after the other"


def the_oldest_kind_is_forgotten() -> None:
    """Past `MOST_KINDS` the kind that was recorded first is recorded again; the others stay known."""
    replayed, replays = counted()
    with prepared(replayed) as found, mock.patch.object(kinds, "MOST_KINDS", len(LAYERS._replays) + 2):
        for rows, recorded in ((400, 1), (500, 2), (600, 3), (500, 3), (600, 3), (700, 4), (600, 4)):
            step([(rows, 2000)], (16, 1))()
            assert len(found) == recorded, rows
        assert len(replays) == 3


def longest_lengths_belong_to_a_kind() -> None:
    """Calls that leave the longest lengths to be read are of one kind only where these are equal."""
    replayed, replays = counted()
    calls = (
        lambda q, k, seqs: msa_attention(q, k, k, q[:, :1], k, seqs=seqs),
        lambda q, k, seqs: select_blocks(q[:, :1], k, seqs=seqs),
        lambda q, k, seqs: sparse_attention(q, k, k, q.new_zeros(400, 1, 16, dtype=torch.int32), seqs),
        lambda q, k, seqs: dense_attention(q, k, k, seqs),
    )
    for call in calls:
        replays.clear()
        with prepared(replayed) as found:
            for new, keys, known in (
                (100, 2000, 0),
                (10, 2000, 0),
                (300, 2000, 1),
                (100, 500, 1),
                (390, 3500, 1),
                (10, 500, 2),
            ):
                q, k = (torch.zeros(n, heads, 128, dtype=torch.bfloat16, device="cuda") for n, heads in ((400, 16), (4000, 1)))
                starts = (torch.tensor([0, x, n], dtype=torch.int32, device="cuda") for x, n in ((new, 400), (keys, 4000)))
                call(q, k, Sequences(*starts))
                assert len(replays) == known, (new, keys, len(found))


def computations_are_on_the_tape() -> None:
    """The tape says so where a stage computes with PyTorch, in each of the calls that are compiled."""
    silent: set[str] = set()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def observed(owner: Any, *arguments: Any) -> Any:
            tape: list[Any] = []
            watch = Watch()
            with taping(tape), watch:
                result = run(owner, *arguments)
            if watch.found and not any(isinstance(event, Computed) for event in tape):
                silent.add(f"{getattr(owner, 'name', 'a decode plan')}: {sorted(watch.found)}")
            return result

        return observed

    sys.path.insert(0, str(ROOT / "scripts"))
    stage = mock.patch.object(Stage, "run", watched(Stage.run))
    plan = mock.patch.object(Kernels, "run", watched(Kernels.run))
    with stage, plan, recording(90):
        for call in importlib.import_module("compile_calls").CALLS:
            call.run()
    assert not silent, silent


def what_cannot_be_recorded_is_said() -> None:
    """PyTorch's computations and addresses beside the inputs have reasons."""
    x = torch.zeros(8, 4)
    ran: list[int] = []
    said = kinds.record([lambda: ran.append(1), lambda: computes("a sum"), lambda: ran.append(2)], [x])
    assert (said, ran) == ("its host code computes a sum with PyTorch", [1, 2])
    places = Places([x[:, :2], x[:, 1:]], True)
    assert places._place(x[3:, :2], x[3:, :2].data_ptr()) == ("input", 0, 48)
    assert places._place(x[3:, 1:], x[3:, 1:].data_ptr()) == ("input", 1, 48)
    with pytest.raises(AmbiguousError, match="beside its inputs"):
        places.word(x[2:, 3:])


def steps_share_a_workspace() -> None:
    """Each step's memory begins at the start of the workspace, also where it lies at an address of the step before."""
    held, given = (torch.zeros(300, dtype=torch.uint8) for _ in range(2))
    preparation = Preparation([given], True)
    for first, second in ((held, torch.zeros(2000, dtype=torch.uint8)), (torch.zeros(10, dtype=torch.uint8), held)):
        preparation.add([Zeroed(x) for x in (first, second[:7], given[1:])])
    made = preparation.made()
    words = [made.words[call.word] for call in made.calls if isinstance(call, PreparedZero)]
    assert words == [("own", 0, 0), ("own", 512, 0), ("input", 0, 1), ("own", 0, 0), ("own", 512, 0), ("input", 0, 1)]
    assert made.workspace == 512 + 2048
    assert made.kept == []


def known_calls_refuse_what_first_calls_refuse() -> None:
    """A call whose arguments equal those of a known one, but are of other types, is checked."""
    with prepared(counted()[0]) as found:
        shapes = ((300, 16), (2000, 1), (300, 1))
        q, k, index_q = (torch.zeros(n, heads, 128, dtype=torch.bfloat16, device="cuda") for n, heads in shapes)
        blocks = torch.zeros(300, 1, 1, dtype=torch.int32, device="cuda")
        calls: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
            (partial(sparse_attention, q, k, k, blocks), {"return_lse": 0}),
            (partial(dense_attention, q, k, k), {"return_out": 1, "return_lse": 0, "return_max_score": 0, "causal": 1}),
            (partial(select_blocks, index_q, k, topk=1), {"topk": True}),
            (partial(msa_attention, q, k, k, index_q, k, topk=1), {"topk": True, "return_lse": 0}),
        )
        for call, wrong in calls:
            call()
            before = len(found)
            call()
            assert len(found) == before, "the call is known"
            for argument, value in {**wrong, "check": 0, "block_size": 128.0}.items():
                with pytest.raises(TypeError, match=argument):
                    call(**{argument: value})


def references_are_not_recorded() -> None:
    """A reference computes with PyTorch, with whatever lengths: every call runs it."""
    with recording(90):
        q, k = (torch.ones(n, heads, 128, dtype=torch.bfloat16, device="cuda") for n, heads in ((40, 16), (200, 1)))
        blocks = torch.zeros(40, 1, 2, dtype=torch.int32, device="cuda")
        for seqs in (None, Sequences(q_offset=torch.zeros(1, dtype=torch.int32, device="cuda"))):
            calls = (
                lambda seqs=seqs: select_blocks(q[:, :1], k, 2, seqs, impl="reference"),
                lambda seqs=seqs: sparse_attention(q, k, k, blocks, seqs, impl="reference"),
                lambda seqs=seqs: dense_attention(q, k, k, seqs, impl="reference"),
            )
            for call in calls:
                first, second = call(), call()
                assert first.data_ptr() != second.data_ptr()
                assert first.tolist() == second.tolist()
                tape: list[Any] = []
                with taping(tape), mock.patch.object(kinds, "taping", contextlib.nullcontext):
                    call()
                assert any(isinstance(event, Computed) for event in tape)


def kinds_tell_tensors_apart() -> None:
    """What a kernel is compiled for, and which tensors share memory, belong to the kind; addresses do not."""
    look = Kinds().look
    x = torch.zeros(64, 8, dtype=torch.float16)
    same = look(x, None, 3).kind
    assert look(torch.ones(64, 8, dtype=torch.float16), None, 3).kind == same
    others = (x[:32], x.t(), x.float(), x.view(8, 64), torch.zeros(65 * 8, dtype=torch.float16)[8 - 4 : 516].view(64, 8))
    for other in others:
        assert look(other, None, 3).kind != same
    assert look(x, None, 4).kind != same
    one = enum.IntEnum("One", {"first": 1, "second": 2})
    numbers = (1, True, 1.0, 2, np.float64(1), np.float64(2), one.first, one.second, "a", None)
    assert len({look(number).kind for number in numbers}) == len(numbers)
    assert len({look(Sequences(max_seqlen_k=number)).kind for number in numbers}) == len(numbers)
    for refused in (x.to_sparse(), torch.nested.nested_tensor([x, x[:1]])):
        assert look(refused).replay is None, "checks refuse it"
    assert look(x, x, 3).kind != look(x, x.clone(), 3).kind
    assert look(E4M3.quantize(x[None])).kind != look(E4M3.quantize(x[None], per="tensor")).kind
    rows = E4M3.quantize(torch.ones(70, 2, 64, dtype=torch.float16))
    by_row = look(3, by_row=(x[:40], rows[:40]), rows=40)
    assert by_row.kind == look(3, by_row=(x[:50], rows[:50]), rows=50).kind
    assert (by_row.rows, by_row.by_row) == (40, 1 + len(list(tensors_in(rows))))
    for fewer, less in ((x[:39], rows[:40]), (x[:40], rows[:39]), (x[0, 0], rows[:40])):
        assert look(3, by_row=(fewer, less), rows=40).kind != by_row.kind, "so many rows are checked"
    pool = torch.zeros(50, 8, dtype=torch.float16)
    assert look(pool[:40], by_row=(x[:40],), rows=40).kind != look(pool, by_row=(x[:50],), rows=50).kind, "pools have pages"


def main() -> int:
    """Runs all checks."""
    for name in CASES:
        launches_fit_other_tensors(name)
        memory_is_found(name)
        print(f"{name}: ok", flush=True)
    for name in LENGTHS:
        launches_fit_other_numbers_of_queries(name)
        print(f"{name}, other numbers of queries: ok", flush=True)
    known_kinds_are_not_recorded_again()
    calls_of_like_lengths_are_of_one_kind()
    the_oldest_kind_is_forgotten()
    longest_lengths_belong_to_a_kind()
    what_cannot_be_recorded_is_said()
    computations_are_on_the_tape()
    kinds_tell_tensors_apart()
    steps_share_a_workspace()
    known_calls_refuse_what_first_calls_refuse()
    references_are_not_recorded()
    return 0


if __name__ == "__main__":
    sys.exit(main())
