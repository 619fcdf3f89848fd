# SPDX-License-Identifier: MIT
"""`fmha_sm100` agrees with the float64 oracle: dense, scores, selected pages; storage, buffers, offsets, plans changed in
place."""

import pytest
import torch

from fmha_sm100 import call
from fmha_sm100.api import _fmha_sm100, _fmha_sm100_plan, fmha_sm100, fmha_sm100_plan
from fmha_sm100.sparse_fmha_adapter import sparse_fmha, sparse_fmha_plan
from openmsa.testing.inputs import problem, strided
from tests.contract import DEVICES
from tests.fmha_sm100.batch import (
    assert_results,
    assert_scores,
    batch,
    lengths,
    pages,
    per_query_head,
    selection,
    truth,
)

devices = pytest.mark.parametrize("device", DEVICES)
kinds = pytest.mark.parametrize("kind", ["decode", "prefill"])


def dtype_of(device):
    return torch.float32 if device == "cpu" else torch.bfloat16


def planned(p, device, page_size=-1, **options):
    heads = {"num_kv_heads": p.k.shape[1], "device": device, "page_size": page_size} | options
    offset = torch.tensor(p.offsets, dtype=torch.int32)
    return fmha_sm100_plan(*lengths(p), p.q.shape[1], qo_offset=offset, **heads)


@devices
@pytest.mark.parametrize("page_size", [None, 16, 64, 256])
@pytest.mark.parametrize("storage", ["plain", "interleaved"])
def test_dense(device, page_size, storage):
    p = batch(dtype=dtype_of(device))
    here = p.to(device)
    if page_size is None:
        k, v, table = here.k, here.v, None
        if storage == "interleaved":
            k, v = strided(k), strided(v, 2)
    else:
        k, v, _, table, _ = pages(here, page_size, storage == "interleaved")
    plan = planned(p, device, page_size or -1)
    out, scores, lse = fmha_sm100(strided(here.q), k, v, plan, kv_indices=table, return_lse=True)
    assert scores is None
    assert_results((out, lse), truth(p))


@devices
@kinds
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("heads", ["kv", "query", "one"])
def test_selected_pages(device, kind, page_size, heads):
    """Selected pages may come in any order, with gaps and unseen pages, for each KV head, each query head or for all, with one
    plan or two."""
    p = batch("mixed" if kind == "prefill" else "short", dtype_of(device))
    here = p.to(device)
    k, v, _, table, _ = pages(here, page_size, interleaved=True)
    count = {"kv": p.k.shape[1], "query": p.q.shape[1], "one": 1}[heads]
    blocks = selection(p, page_size, heads=count)
    options = {"kv_indices": table, "kv_block_indexes": blocks.to(device), "return_lse": True}
    expected = per_query_head(p, blocks, page_size) if heads == "query" else truth(p, blocks, page_size)
    for splits in (False, True):
        plan = planned(p, device, page_size, kv_block_num=3, split_prefill_decode=splits)
        assert plan[:3] == ((True, 1, 6) if splits and kind == "prefill" else (False, 0, len(p.q_lens)))
        rows = p.q_lens[0] if plan[0] else sum(p.q_lens) if kind == "decode" else len(p.q_lens)
        assert plan[3]["kv_segment_lens"].numel() == rows
        out, scores, lse = fmha_sm100(here.q, k, v, plan, **options)
        assert scores is None
        assert_results((out, lse), expected)


@devices
def test_selected_blocks_of_packed_keys(device):
    p = batch(dtype=dtype_of(device))
    here, blocks = p.to(device), selection(p, 64)
    plan = planned(p, device, kv_block_num=3, block_size=64)
    out, _, lse = fmha_sm100(here.q, here.k, here.v, plan, kv_block_indexes=blocks.to(device), return_lse=True)
    assert_results((out, lse), truth(p, blocks, 64))


@devices
@pytest.mark.parametrize("page_size", [None, 32])
@pytest.mark.parametrize("layout", ["new", "HKT", "THK", "wide THK"])
def test_scores_alone(device, page_size, layout):
    """Tiles that a query sees are written; the others keep what they held or become -inf."""
    p = batch(dtype=dtype_of(device))
    here = p.to(device)
    k, table = here.index_k, None
    if page_size is not None:
        _, _, k, table, _ = pages(here, page_size, interleaved=True)
    heads, total = p.index_q.shape[1], p.q.shape[0]
    options = {"num_kv_heads": 1, "output_maxscore": True, "page_size": page_size or -1, "device": device}
    plan = _fmha_sm100_plan(*lengths(p), heads, qo_offset=torch.tensor(p.offsets), **options)
    assert plan["max_k_tiles"] == 128
    plan["max_k_tiles"] = 7
    shapes = {"HKT": (heads, 7, total), "THK": (total, heads, 7), "wide THK": (total + 3, heads, 7)}
    buffer = None if layout == "new" else torch.full(shapes[layout], 77.0, device=device)
    given = buffer[3:] if layout == "wide THK" else buffer
    out, scores = _fmha_sm100(here.index_q, k, k, plan, table, max_score=given, output_o=False)
    assert out is None
    if layout == "new":
        assert scores.shape == (heads, 7, total)
    else:
        assert scores is given
    found = scores.transpose(1, 2) if layout in ("new", "HKT") else scores.transpose(0, 1)
    assert_scores("max_score", found, p, elsewhere=-torch.inf if layout == "new" else 77.0)
    if layout == "wide THK":
        assert bool((buffer[:3] == 77).all())


@devices
@pytest.mark.parametrize("page_size", [None, 64])
def test_scores_beside_the_output(device, page_size):
    p = batch(dtype=dtype_of(device))
    here = p.to(device)
    k, v, _, table, _ = (here.k, here.v, None, None, None) if page_size is None else pages(here, page_size)
    plan = planned(p, device, page_size or -1, output_maxscore=True, block_size=64)
    out, scores, lse = fmha_sm100(here.q, k, v, plan, kv_indices=table, return_lse=True)
    assert_results((out, lse), truth(p))
    assert_scores("max_score", scores.transpose(1, 2), p, p.q, p.k, 64)
    only_lse = fmha_sm100(here.q, k, v, plan, kv_indices=table, output_o=False, return_lse=True)
    assert only_lse[0] is None
    assert_results((out, only_lse[2]), truth(p))
    without = fmha_sm100(here.q, k, v, plan, kv_indices=table, output_maxscore=False, max_score=scores)
    assert without[1] is None
    assert torch.equal(without[0], out)


@devices
@pytest.mark.parametrize("path", ["dense", "sparse decode", "sparse prefill", "packed keys"])
def test_buffers_are_used(device, path):
    """out and lse with strides of their own; what is returned is what was given."""
    p = batch("short", dtype_of(device))
    here, page_size = p.to(device), 64
    k, v, _, table, _ = pages(here, page_size)
    blocks = selection(p, page_size) if "sparse" in path else None
    options = {"kv_block_num": 3, "sparse_kernel_mode": path.split()[-1]} if "sparse" in path else {}
    if path == "packed keys":
        k, v, table, page_size = here.k, here.v, None, -1
    plan = planned(p, device, page_size, **options)
    total, heads, dim = p.q.shape
    out = here.q.new_full((heads, total + 2, 2 * dim), torch.nan)[:, 1:-1, ::2].transpose(0, 1)
    lse = torch.full((heads, total), torch.nan, device=device).T
    found = fmha_sm100(
        *(here.q, k, v, plan),
        kv_indices=table,
        kv_block_indexes=None if blocks is None else blocks.to(device),
        out=out,
        lse=lse,
    )
    assert found[0] is out
    assert found[2] is lse
    assert_results((out, lse), truth(p, blocks, page_size))


@devices
def test_kernels_write_into_the_buffers(device, monkeypatch):
    """What the stages are given is the caller's memory, unless it is strided or shared with an input."""
    seen, p = [], batch(dtype=dtype_of(device))
    for stage in (call.DENSE, call.SPARSE, call.SCORING):
        monkeypatch.setattr(stage, "run", lambda impl, x, run=stage.run: seen.append(x) or run(impl, x))
    here, blocks = p.to(device), selection(p, 32).to(device)
    k, v, index_k, table, _ = pages(here, 32)
    out, lse = torch.empty_like(here.q), torch.empty(here.q.shape[:2], device=device)
    for options, arguments in (({}, {}), ({"kv_block_num": 3, "split_prefill_decode": False}, {"kv_block_indexes": blocks})):
        plan = planned(p, device, 32, **options)
        fmha_sm100(here.q, k, v, plan, kv_indices=table, out=out, lse=lse, o_scale=2.0, **arguments)
        assert seen[-1].out is out
        assert seen[-1].lse is lse
        assert_results((out / 2, lse), truth(p, blocks if arguments else None, 32))
        q = here.q.clone()
        fmha_sm100(q, k, v, plan, kv_indices=table, out=q, **arguments)
        assert seen[-1].out is None
        assert_results((q,), truth(p, blocks if arguments else None, 32))
    plan = fmha_sm100_plan(*lengths(p), 2, num_kv_heads=1, page_size=32, output_maxscore=True, device=device)
    for shape in ((2, 128, len(p.q)), (len(p.q), 2, 128)):
        given = torch.full(shape, -torch.inf, device=device)
        fmha_sm100(here.index_q, index_k, None, plan, kv_indices=table, max_score=given, output_o=False)
        assert seen[-1].scores.data_ptr() == given.data_ptr()


@devices
@kinds
def test_adapter(device, kind):
    p = batch("mixed" if kind == "prefill" else "decode", dtype_of(device))
    here, blocks = p.to(device), selection(p, 16, topk=5)
    k, v, _, table, _ = pages(here, 16)
    plan = sparse_fmha_plan(*lengths(p), p.q.shape[1], p.k.shape[1], page_size=16, kv_block_num=5, device=device)
    assert plan["MM-SA-Nv"] is True
    out = torch.empty_like(here.q)
    found = sparse_fmha(here.q, k, v, plan, out=out, kv_indices=table, kv_block_indexes=blocks.to(device))
    assert found[0] is out
    assert found[1] is None
    assert_results((out,), truth(p, blocks, 16))


def changed(p, k_lens):
    """Returns the same queries over the first keys of each request, now `k_lens` of them."""
    pieces = [x.split(list(p.k_lens)) for x in (p.k, p.v, p.index_k)]
    k, v, index_k = (torch.cat([x[:n] for x, n in zip(piece, k_lens, strict=True)]) for piece in pieces)
    offsets = tuple(n - q for n, q in zip(k_lens, p.q_lens, strict=True))
    return type(p)(**{**vars(p), "k": k, "v": v, "index_k": index_k, "k_lens": tuple(k_lens), "offsets": offsets})


@devices
@pytest.mark.parametrize("path", ["dense", "packed keys", "scores", "decode", "prefill"])
@pytest.mark.parametrize("fixed", [False, True], ids=["packed table", "fixed table"])
def test_plans_changed_in_place(device, path, fixed):
    """Lengths, offsets and page positions are read at launch: planned for short requests, then written."""
    p = batch("short" if path == "decode" else "mixed", dtype_of(device))
    here, page_size = p.to(device), 32
    k, v, index_k, table, width = pages(here, page_size, fixed=fixed)
    sparse = path in ("decode", "prefill")
    now = tuple(max(n - 7 * (b % 3), 0) for b, n in enumerate(p.k_lens))
    after = changed(p, now)
    small = torch.tensor([min(n, 5) for n in p.k_lens])
    options = {"kv_block_num": 3, "sparse_kernel_mode": path} if sparse else {"output_maxscore": path == "scores"}
    options["split_prefill_decode"] = False
    heads = 2 if path == "scores" else p.q.shape[1]
    paged = path != "packed keys"
    plan = fmha_sm100_plan(torch.tensor(p.q_lens), small, heads, device=device, page_size=page_size if paged else -1, **options)
    request = torch.arange(len(now)).repeat_interleave(torch.tensor(p.q_lens)) if path == "decode" else torch.arange(len(now))
    index = torch.cat([torch.arange(n) for n in p.q_lens]) if path == "decode" else torch.zeros(len(now), dtype=torch.int64)
    counts = torch.tensor([-(-n // page_size) for n in p.k_lens])
    first = torch.arange(len(now)) * width if fixed else torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))[:-1]
    plan[3]["kv_segment_lens"].copy_(torch.tensor(now)[request])
    plan[3]["qo_offset"].copy_(torch.tensor(after.offsets)[request] + index)
    if paged:
        plan[3]["kv_page_indptr"][:-1].copy_(first[request])
    else:
        plan[3]["kv_segment_offsets"].copy_(torch.tensor([0, *torch.tensor(p.k_lens).cumsum(0).tolist()]))
    if path == "scores":
        _, scores = fmha_sm100(here.index_q, index_k, None, plan, kv_indices=table, output_o=False)
        return assert_scores("max_score", scores.transpose(1, 2), after)
    blocks = selection(after, page_size) if sparse else None
    if not paged:
        k, v, table = here.k, here.v, None
    blocks_here = None if blocks is None else blocks.to(device)
    out, _, lse = fmha_sm100(here.q, k, v, plan, kv_indices=table, kv_block_indexes=blocks_here, return_lse=True)
    return assert_results((out, lse), truth(after, blocks, page_size))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_packed_keys_need_not_start_at_the_first_row(sparse):
    """Rows that belong to no request stand before, between and behind the requests, and hold NaN."""
    p = batch()
    starts = torch.tensor([5 + 3 * b for b in range(len(p.k_lens))]) + torch.tensor([0, *p.k_lens[:-1]]).cumsum(0)
    rows = torch.cat([start + torch.arange(n) for start, n in zip(starts, p.k_lens, strict=True)])
    k, v = (
        torch.full((int(starts[-1]) + p.k_lens[-1] + 4, *x.shape[1:]), torch.nan).index_copy(0, rows, x) for x in (p.k, p.v)
    )
    blocks = selection(p, 32) if sparse else None
    options = {"kv_block_num": 3, "split_prefill_decode": False} if sparse else {}
    plan = planned(p, "cpu", -1, block_size=32, **options)
    plan[3]["kv_segment_offsets"][:-1] = starts
    out, _, lse = fmha_sm100(p.q, k, v, plan, kv_block_indexes=blocks, return_lse=True)
    assert_results((out, lse), truth(p, blocks, 32))


@devices
@pytest.mark.parametrize("path", ["dense", "prefill"])
def test_a_promise_on_the_lengths(device, path):
    """Makes the scratch smaller and changes no result."""
    p = batch(dtype=dtype_of(device))
    here, blocks = p.to(device), selection(p, 16) if path == "prefill" else None
    k, v, _, table, _ = pages(here, 16)
    plan = planned(p, device, 16, max_kv_len=max(p.k_lens), **({"kv_block_num": 3} if path == "prefill" else {}))
    blocks_here = None if blocks is None else blocks.to(device)
    out = fmha_sm100(here.q, k, v, plan, kv_indices=table, kv_block_indexes=blocks_here)[0]
    assert_results((out,), truth(p, blocks, 16))


@devices
@kinds
@pytest.mark.parametrize("lens", ["decode", "short"])
def test_two_dimensional_tables(device, kind, lens):
    """A page table may have two dimensions, with a row for each request."""
    p = batch(lens, dtype_of(device))
    here, blocks = p.to(device), selection(p, 16)
    k, v, _, table, width = pages(here, 16, fixed=True)
    plan = planned(p, device, 16, kv_block_num=3, sparse_kernel_mode=kind)
    options = {"kv_indices": table.view(-1, width), "kv_block_indexes": blocks.to(device), "check_input_valid": True}
    assert_results(fmha_sm100(here.q, k, v, plan, **options)[:1], truth(p, blocks, 16))


@pytest.mark.parametrize("fixed", [False, True], ids=["packed table", "fixed table"])
def test_one_long_sequence(monkeypatch, fixed):
    """A flat table is read as that of one long sequence, which a GPU does in decode steps, here on a CPU."""
    p = batch("short", torch.float32)
    k, v, _, table, width = pages(p, 16, fixed=fixed)
    if fixed:
        table = table.clamp(0, len(k) - 1)  # the CPU checks every page below a position
    blocks = selection(p, 16)
    plan = planned(p, "cpu", 16, kv_block_num=3)
    if fixed:
        rows = torch.arange(len(p.q_lens)).repeat_interleave(torch.tensor(p.q_lens))
        plan[3]["kv_page_indptr"][:-1].copy_(rows * width)
    monkeypatch.setattr(call, "reads_one_long_sequence", lambda call: True)
    options = {"kv_indices": table, "kv_block_indexes": blocks, "return_lse": True}
    out, _, lse = fmha_sm100(p.q, k, v, plan, **options)
    assert_results((out, lse), truth(p, blocks, 16))


@devices
@pytest.mark.parametrize("storage", ["packed", "flat table", "fixed table"])
@pytest.mark.parametrize("path", ["dense", "sparse", "scores"])
def test_two_plans_of_a_mixed_batch(device, path, storage):
    """Short requests in front have a plan of their own; both plans' tensors may be overwritten, and both halves are written
    into one buffer each, whatever its strides, also where the output shares memory with the queries."""
    p = problem((2, 1, 0, 140, 3, 1), (50, 300, 4, 290, 0, 70), kv_heads=2, group=2, head_dim=32, dtype=dtype_of(device))
    here, page_size, sparse = p.to(device), 32, path == "sparse"
    if storage == "packed":
        k, v, index_k, table, size = here.k, here.v, here.index_k, None, -1
    else:
        k, v, index_k, table, width = pages(here, page_size, fixed=storage == "fixed table")
        size = page_size
        if storage == "fixed table":
            table = table.view(-1, width)
    options = {"kv_block_num": 3} if sparse else {"output_maxscore": True}
    options |= {"num_kv_heads": 1} if path == "scores" else {}
    short = torch.tensor([max(n - 1, 0) for n in p.k_lens])
    offset = torch.tensor(p.offsets)
    heads = 2 if path == "scores" else 4
    plan = fmha_sm100_plan(
        torch.tensor(p.q_lens), short, heads, qo_offset=offset, page_size=size, device=device, block_size=page_size, **options
    )
    assert plan[:3] == (True, 3, 6)
    first, second = plan[3:]
    assert (first["total_q"], first["batch_size"], second["total_q"], second["batch_size"]) == (3, 3, 144, 3)
    assert first["qo_offset"].tolist() == ([48, 49, 299] if sparse and size > 0 else [48, 299, 4])
    assert second["qo_segment_offsets"].tolist() == [0, 140, 143, 144]
    full = fmha_sm100_plan(*lengths(p), heads, qo_offset=offset, page_size=size, device=device, block_size=page_size, **options)
    for part, true in zip((first, second), full[3:], strict=True):
        for name in ("kv_segment_lens", "kv_segment_offsets", "kv_page_indptr"):
            if part[name] is not None:
                part[name].copy_(true[name])
    if path == "scores":
        for shape in ((2, 128, 147), (147, 2, 128), None):
            given = None if shape is None else torch.full(shape, 9.0, device=device)
            out, scores = fmha_sm100(here.index_q, index_k, None, plan, table, output_o=False, max_score=given)
            assert out is None
            assert given is None or scores is given
            found = scores.transpose(0, 1) if shape == (147, 2, 128) else scores.transpose(1, 2)
            assert_scores("max_score", found, p, block_size=page_size, elsewhere=-torch.inf if given is None else 9.0)
        return
    blocks = selection(p, page_size) if sparse else None
    arguments = {"kv_indices": table, "kv_block_indexes": None if blocks is None else blocks.to(device)}
    expected = truth(p, blocks, page_size)
    out, scores, lse = fmha_sm100(here.q, k, v, plan, **arguments, return_lse=True)
    assert_results((out, lse), expected)
    if path == "dense":
        assert_scores("max_score", scores.transpose(1, 2), p, p.q, p.k, page_size)
    memory = torch.empty(here.q.numel() + 32 * 4, dtype=here.q.dtype, device=device)
    q = memory[: here.q.numel()].view(here.q.shape).copy_(here.q)
    shifted, wide = memory[32 * 4 :].view(here.q.shape), torch.full((147, 4, 64), torch.nan, device=device, dtype=q.dtype)
    for buffer in (wide[..., ::2], shifted):
        lse = torch.full((4, 147), torch.nan, device=device).T
        found = fmha_sm100(q, k, v, plan, **arguments, out=buffer, lse=lse, output_maxscore=False)
        assert found[0] is buffer
        assert found[1] is None
        assert found[2] is lse
        assert_results((buffer, lse), expected)
    override = torch.tensor(p.offsets, dtype=torch.int32, device=device)
    found = fmha_sm100(here.q, k, v, plan, **arguments, q_offset_override=override, output_maxscore=False)
    assert_results(found[:1], expected)


def test_misuse_of_two_plans():
    p = problem((2, 140), (50, 290), kv_heads=2, group=2, head_dim=32)
    plan = fmha_sm100_plan(*lengths(p), 4, page_size=32, device="cpu")
    k, v, _, table, _ = pages(p, 32)
    arguments = {"q": p.q, "k": k, "v": v, "plan_info": plan, "kv_indices": table}
    out = torch.full_like(p.q, 5.0)
    for change, words in (
        ({"q": p.q[:-1], "out": None}, r"q.shape\[0\] must be 142 \(the queries of the plan\)"),
        ({"out": out[:3]}, r"out must have shape \(142, 4, 32\)"),
        ({"lse": torch.zeros(142, 3)}, r"lse must have shape \(142, 4\)"),
        ({"kv_indices": table[:3]}, r"kv_page_indptr\[0\] must leave 10 pages .* \(in plan_info\[4\], which counts"),
        ({"kv_block_indexes": torch.zeros(9, 2, 3, dtype=torch.int32)}, r"kv_block_indexes.shape\[0\] must be 142"),
        ({"max_score": torch.zeros(4, 128, 142)}, "max_score needs a plan with output_maxscore=True"),
    ):
        with pytest.raises(ValueError, match=words):
            fmha_sm100(**({"out": out} | arguments | change))
        assert bool((out == 5).all())


@devices
@pytest.mark.parametrize("path", ["dense", "decode", "prefill"])
@pytest.mark.parametrize("form", ["int", "tensor", "rows"])
def test_q_offset_override(device, path, form):
    lens = "short" if path != "dense" else "mixed"
    requests = len(batch(lens).q_lens)
    offsets = (100,) * requests if form == "int" else tuple(50 * b - 60 for b in range(requests))
    p = batch(lens, dtype_of(device), offsets=offsets)
    here, page_size = p.to(device), 32
    k, v, _, table, _ = pages(here, page_size)
    blocks = None if path == "dense" else selection(p, page_size)
    options = {} if path == "dense" else {"kv_block_num": 3, "sparse_kernel_mode": path}
    plan = fmha_sm100_plan(*lengths(p), p.q.shape[1], page_size=page_size, device=device, **options)
    override = 100 if form == "int" else torch.tensor(offsets, device=device)
    if form == "rows" and path == "decode":
        override = torch.cat([torch.arange(n) + o for n, o in zip(p.q_lens, offsets, strict=True)]).to(device)
    blocks_here = None if blocks is None else blocks.to(device)
    found = fmha_sm100(
        here.q, k, v, plan, kv_indices=table, kv_block_indexes=blocks_here, q_offset_override=override, return_lse=True
    )
    assert_results((found[0], found[2]), truth(p, blocks, page_size))


@devices
@pytest.mark.parametrize("path", ["dense", "scores", "decode", "prefill"])
def test_not_causal(device, path):
    """Every query sees all keys, and still does when lengths have grown."""
    p = batch("short", dtype_of(device), offsets=tuple(1000 for _ in batch("short").q_lens))
    here, page_size = p.to(device), 32
    k, v, index_k, table, _ = pages(here, page_size)
    options = {} if path in ("dense", "scores") else {"kv_block_num": 3, "sparse_kernel_mode": path}
    small = torch.tensor([min(n, 3) for n in p.k_lens])
    heads = 2 if path == "scores" else p.q.shape[1]
    plan = fmha_sm100_plan(
        *(torch.tensor(p.q_lens), small, heads),
        page_size=page_size,
        causal=False,
        device=device,
        output_maxscore=True,
        **options,
    )
    full = planned(p, "cpu", page_size, **options)[3]
    for name in ("kv_segment_lens", "kv_page_indptr"):
        plan[3][name].copy_(full[name])
    if path == "scores":
        _, scores = fmha_sm100(here.index_q, index_k, None, plan, kv_indices=table, output_o=False)
        return assert_scores("max_score", scores.transpose(1, 2), p)
    blocks = None if path == "dense" else selection(p, page_size)
    blocks_here = None if blocks is None else blocks.to(device)
    out = fmha_sm100(here.q, k, v, plan, kv_indices=table, kv_block_indexes=blocks_here, output_maxscore=False)[0]
    return assert_results((out,), truth(p, blocks, page_size))


@devices
@pytest.mark.parametrize("page_size", [-1, 32])
def test_nothing_to_do(device, page_size):
    """A call without queries, keys or requests returns results without rows, or of empty rows."""
    dtype = dtype_of(device)
    for q_len, k_len, requests in ((0, 40, 1), (3, 0, 2), (0, 0, 0)):
        q = torch.randn(q_len * requests, 4, 32, dtype=dtype, device=device)
        k = torch.randn(*((k_len * requests, 2, 32) if page_size < 0 else (3, 2, 32, 32)), dtype=dtype, device=device)
        table = None if page_size < 0 else torch.zeros(2 * requests if k_len else 0, dtype=torch.int32, device=device)
        lens = (torch.full((requests,), n, dtype=torch.int32) for n in (q_len, k_len))
        plan = fmha_sm100_plan(*lens, 4, page_size=page_size, output_maxscore=True, device=device)
        out, scores, lse = fmha_sm100(q, k, k, plan, kv_indices=table, return_lse=True)
        assert torch.equal(out, torch.zeros_like(q))
        assert bool((lse == -torch.inf).all())
        assert bool((scores == -torch.inf).all())
