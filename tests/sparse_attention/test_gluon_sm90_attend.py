# SPDX-License-Identifier: MIT
"""Hopper's own union kernel for 16-bit keys is chosen where it should be, and on such a GPU its results are right."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, PagedKV, Sequences, sparse_attention
from openmsa.primitives.rows import query_rows
from openmsa.runtime.devices import COMPILE_TARGETS, facts
from openmsa.sparse_attention import STAGE, gluon_sm90_attend, reference, triton_lists, triton_prefill
from openmsa.sparse_attention.gluon_sm90_attend import OPTIONS, attend_launch
from openmsa.sparse_attention.triton_config import Keys, all_together, plain_hopper_config, prefill_config
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from openmsa.types import layout
from tests import oracle
from tests.hopper.marks import DEVICE, HOPPER, in_turn, on_a_hopper_gpu, on_hopper
from tests.sparse_attention.test_gluon_sm90_union import long_call as stored_long_call
from tests.sparse_attention.test_gluon_sm90_union import selection
from tests.sparse_attention.test_triton import check, run, take_any_size

BLOCK = 128


def served(q, k, v, block=BLOCK, arch=90, out=None):
    paged = (k.seq_lens, k.capacity) if v is None else ()
    seqs = layout(Sequences.from_lengths([8], [256]), 8, None if paged else 256, torch.device("cpu"), *paged)
    keys, queries = Keys.of(k, v, seqs, block, True), query_rows(q, True)
    config = prefill_config(q.shape[2], q.shape[1] // keys.heads, block, arch // 10)
    out = torch.empty(q.shape) if out is None else out
    return attend_launch(COMPILE_TARGETS[arch], queries, keys, out, config, block) is not None


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def test_what_it_serves():
    k, v = numbers(256, 2, 128), numbers(256, 2, 128)
    assert served(numbers(8, 32, 128), k, v)
    assert served(*(x.half() for x in (numbers(8, 32, 128), k, v)))
    assert all(served(numbers(8, 2 * group, 128), k, v) for group in (3, 4, 8, 16, 64, 100))
    assert not any(served(numbers(8, 2 * group, 128), k, v) for group in (1, 2))  # more tokens than bits
    assert not served(numbers(8, 32, 128).half(), k, v)
    assert not served(*(x.float() for x in (numbers(8, 32, 128), k, v)))
    assert not served(E4M3.quantize(numbers(8, 32, 128)), k, v)
    assert not served(numbers(8, 32, 128), E4M3.quantize(k), E4M3.quantize(v))
    assert not any(served(numbers(8, 32, 128), k, v, block) for block in (64, 100, 256))
    assert not any(served(numbers(8, 32, 128), k, v, arch=arch) for arch in (80, 100, 120))
    expected = {32: False, 40: True, 64: True, 72: True, 80: True, 100: False, 128: True, 136: False, 256: False}
    for dim, serving in expected.items():
        assert served(numbers(8, 32, dim), numbers(256, 2, dim), numbers(256, 2, dim)) is serving


def test_which_layouts_it_serves():
    q, whole = numbers(8, 32, 128), numbers(257, 3, 256)
    k, v = whole[:256, :2, :128], whole[:256, :2, 128:]
    assert served(q, k, v)
    assert served(q, whole[1:, 1:, 8:136], numbers(256, 2, 128))
    assert not served(q, whole[:256, :2, 4:132], v)  # not 16 bytes at a time
    assert not served(q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    assert served(numbers(32, 8, 128).transpose(0, 1), k, v)
    assert not served(numbers(8, 32, 132)[..., 4:], k, v)
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    for page_size, expected in ((128, True), (256, True), (64, False), (100, False)):
        k, v = numbers(4, 2, page_size, 128), numbers(4, 2, page_size, 128)
        assert served(q, PagedKV(k, v, table, lens), None) is expected


def test_it_writes_words():
    q, k, v = numbers(8, 32, 128), numbers(256, 2, 128), numbers(256, 2, 128)
    room = numbers(8 * 32 * 128 + 2)
    assert served(q, k, v, out=room[2:].view(q.shape))
    assert not served(q, k, v, out=room[1:-1].view(q.shape))  # its address is odd in words


def test_it_fits():
    shared = (OPTIONS["STAGES"] * 2 + 1) * BLOCK * 128 * 2
    assert shared + 512 <= COMPILE_TARGETS[90].shared_bytes  # with barriers
    registers = OPTIONS["ATTEND_REGISTERS"] * 2 + OPTIONS["LOAD_REGISTERS"]
    assert registers <= 504  # Triton leaves what is left to the first four warps.


def test_its_tiles():
    configs = [plain_hopper_config(prefill_config(128, group, BLOCK, 9), 1, 1.0, 132) for group in (4, 8, 16, 64, 100)]
    assert [config.union_tokens for config in configs] == [32, 16, 8, 2, 2]


def case(name, dtype):
    """Returns the checked arguments of a call, and the truth."""
    q_lens, k_lens, heads, group, dim, page_size, topk, alike, offsets = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=heads, group=group, head_dim=dim, dtype=dtype, offsets=offsets, shared_prefix=BLOCK)
    blocks = selection(p, topk, alike)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    return checked_call(p, blocks, page_size), expected


def checked_call(p, blocks, page_size=0, scale=0.2):
    p = p.to(DEVICE)
    k, v = (paged(p, page_size)[0], None) if page_size else (p.k, p.v)
    return STAGE.check(p.q, k, v, blocks.to(DEVICE), p.seqs, block_size=BLOCK, softmax_scale=scale, return_lse=True)


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """The kernel serves calls of any size, also those with few queries, and leaves to KV-outer what it leaves in large ones."""
    take_any_size(monkeypatch)


def test_what_it_is_given(monkeypatch):
    """The kernel is given all that it needs: another one in its place, which needs no GPU, finds it."""
    checked, expected = case("pages", torch.float16)
    given = []
    monkeypatch.setattr(triton_prefill, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(
        gluon_sm90_attend, "launch_sm90_attend", lambda tma, call, *_: given.append(call) or triton_prefill.launch_union(call)
    )
    monkeypatch.setattr(triton_prefill, "facts", lambda _: COMPILE_TARGETS[90])
    for path in ("union", "auto"):
        check(run(checked, path=path), expected)
    assert [call.lists.union.listed.item() for call in given] == [64, 64]
    assert given[0].config.union_tokens == 8


def test_a_short_prefill_leaves_nothing_to_kv_outer(monkeypatch):
    monkeypatch.setattr(triton_lists, "all_together", all_together)
    monkeypatch.setattr(triton_lists, "facts", lambda _: COMPILE_TARGETS[90])
    for length, rest in ((6144, triton_lists.NO_REST), (8192, triton_lists.KV_OUTER)):
        q, k = numbers(length, 16, 128), numbers(length, 1, 128)
        seqs = layout(None, length, length, q.device)
        keys = Keys.of(k, k, seqs, BLOCK, True)
        config = plain_hopper_config(prefill_config(128, 16, BLOCK, 9), length // BLOCK, 16 * BLOCK, 132)
        given = config, "auto", True, q.dtype, triton_prefill.WORKSPACE_BYTES
        for tuned, expected in ((True, rest), (False, triton_lists.KV_OUTER)):
            plan = triton_lists.Plan.of(query_rows(q, True), keys, 16, BLOCK, seqs, *given, tuned=tuned)
            assert plan.rest == expected.value


@pytest.fixture
def launches(monkeypatch):
    """Returns a list that grows by the call of each launch of the kernel."""
    done, launch = [], gluon_sm90_attend.launch_sm90_attend
    monkeypatch.setattr(
        gluon_sm90_attend, "launch_sm90_attend", lambda tma, call, *more: (done.append(call), launch(tma, call, *more))
    )
    return done


# name: query lengths, key lengths, kv heads, group, dim, page size or 0, topk, queries that select alike, offsets
CASES = {
    "one tile": ((8,), (128,), 1, 16, 128, 0, 1, 8, None),
    "two blocks": ((8,), (256,), 1, 16, 128, 0, 2, 8, None),
    "odd": ((13,), (1000,), 1, 16, 128, 0, 5, 1, None),
    "ragged": ((11, 0, 3, 1, 26), (900, 0, 128, 1, 1300), 2, 16, 128, 0, 6, 5, None),
    "before and behind": ((30, 9), (300, 500), 2, 16, 128, 0, 3, 8, (-10, 600)),
    "pages": ((19, 0, 40), (700, 0, 900), 2, 16, 128, 128, 5, 6, None),
    "wide pages": ((19, 8), (700, 900), 2, 8, 128, 256, 5, 6, None),
    "dim 64": ((19, 0, 40), (700, 0, 900), 2, 16, 64, 0, 5, 6, None),
    "dim 64, pages": ((33,), (900,), 2, 4, 64, 128, 5, 7, None),
    "dim 80": ((13,), (1000,), 2, 8, 80, 0, 5, 3, None),
    "group of 3": ((70,), (900,), 2, 3, 128, 0, 5, 40, None),
    "group of 4": ((70, 5), (900, 300), 2, 4, 128, 0, 5, 11, None),
    "group of 100": ((9,), (900,), 2, 100, 128, 0, 5, 3, None),
}


@on_hopper
@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [torch.bfloat16, torch.float16]))
def test_against_the_truth(name, dtype, launches):
    checked, expected = case(name, dtype)
    result = run(checked, path="union")
    assert len(launches) == 1
    check(result, expected)
    if not HOPPER and name != "ragged":
        return  # The interpreter takes its time.
    for again in (run(checked, path="union"), run(checked._replace(blocks=checked.blocks.flip(-1)), path="union")):
        assert_equal("out", again[0], result[0].cpu())
        assert_equal("lse", again[1], result[1].cpu())
    check(run(checked), expected)


@on_hopper
@pytest.mark.parametrize("programs", [3, 4, 7])
@pytest.mark.parametrize("order", [True, False], ids=["in turns", "in order"])
def test_few_programs(order, programs, launches, monkeypatch):
    """Each program takes several items, and in turns some take one less than others."""
    checked, expected = case("ragged", torch.bfloat16)
    monkeypatch.setattr(gluon_sm90_attend, "facts", lambda device: facts(device)._replace(num_sms=programs))
    monkeypatch.setattr(gluon_sm90_attend, "l2_holds", lambda *sizes: order)
    for path in ("union", "auto"):
        check(run(checked, path=path), expected)
    assert len(launches) == 2


long_call = partial(stored_long_call, store=torch.Tensor.bfloat16)


@on_a_hopper_gpu
@pytest.mark.parametrize("order", [True, False], ids=["in turns", "in order"])
@pytest.mark.parametrize("spread", [0, 4, 60], ids=["alike", "clustered", "mixed"])
def test_many_tiles_a_program(spread, order, launches, monkeypatch):
    monkeypatch.setattr(gluon_sm90_attend, "l2_holds", lambda *sizes: order)
    q, k, v, blocks, seqs = given = long_call((701, 3, 500), (9000, 128, 6001), spread=spread)
    checked = STAGE.check(*given, block_size=BLOCK, return_lse=True)
    out, lse = run(checked)
    assert len(launches) == 1
    sizes = launches[0].lists.union.sizes.view(-1, 2)[: launches[0].plan.num_tiles * 4, 0]
    assert bool((sizes > 0).any())
    assert bool((sizes < 0).any()) == (spread == 60)  # tiles that go elsewhere, too
    monkeypatch.setattr(gluon_sm90_attend, "attend_launch", lambda *_: None)
    triton_out, _ = run(checked)
    assert len(launches) == 1
    lengths = layout(seqs, len(q), k.shape[0], q.device)
    truth, lse_truth = reference.sparse_attention(q.double(), k.double(), v.double(), blocks, lengths, BLOCK, 128**-0.5, True)
    assert_close("out", out, triton_out, truth)
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-4)


@on_a_hopper_gpu
def test_graph_and_repetition():
    """Every run gives the same bits, on data that changes under a CUDA graph."""
    q, k, v, blocks, seqs = long_call((2048,), (16384,))
    graph, q_in = torch.cuda.CUDAGraph(), q.clone()
    sparse_attention(q_in, k, v, blocks, seqs)
    with torch.cuda.graph(graph):
        out = sparse_attention(q_in, k, v, blocks, seqs)
    for turn in range(5):
        q_in.copy_(q.roll(turn, 0))
        graph.replay()
        assert_equal("out", out, sparse_attention(q.roll(turn, 0), k, v, blocks, seqs).cpu())


@on_hopper
@pytest.mark.parametrize("path", ["union", "auto"])
@pytest.mark.parametrize("selected", ["nothing", "nothing yet", "more than stays together"])
def test_tiles_that_read_nothing(selected, path, launches, monkeypatch):
    """They are this kernel's, also where no other tile is."""
    p = problem((44, 7), (1500, 130), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16, offsets=(
        (-44, -9) if selected == "nothing yet" else None
    ))  # fmt: skip
    blocks = random_blocks(p, 9, BLOCK, 2)
    if selected == "nothing":
        blocks[:] = -1
    blocks[8:16] = -1
    monkeypatch.setattr(triton_lists, "union_limit", lambda *_: 1)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    check(run(checked_call(p, blocks), path=path), expected)
    assert len(launches) == 1


@on_hopper
def test_outputs_at_odd_addresses_are_the_triton_kernels(launches):
    checked, expected = case("odd", torch.bfloat16)
    room = torch.full((checked.q.numel() + 3,), torch.nan, dtype=checked.q.dtype, device=DEVICE)
    out = room[1:-2].view(checked.q.shape)
    check(triton_prefill.sparse_attention(*checked._replace(out=out), path="union"), expected)
    assert not launches
    assert room[[0, -2, -1]].isnan().all()


@on_hopper
@pytest.mark.parametrize("scale", [-0.5, 0.0, 30.0])
def test_scales(scale):
    p = problem((9,), (300,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    blocks = selection(p, 3, 4)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)
    check(run(checked_call(p, blocks, scale=scale), path="union"), expected)


@on_hopper
def test_rows_that_nobody_reads_may_hold_nan():
    p = problem((8, 8), (512, 400), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16, offsets=(260, 300))
    blocks = torch.tensor([[[1, 2, -1]]], dtype=torch.int32).repeat(16, 1, 1)
    blocks[8:] = torch.tensor([2, 0, 9], dtype=torch.int32)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    for x in (p.k, p.v):
        x[:128] = x[268:512] = x[512 + 128 : 512 + 256] = x[512 + 308 :] = torch.nan
    check(run(checked_call(p, blocks), path="union"), expected)


@on_hopper
def test_a_query_of_nan_has_an_lse_of_nan():
    p = problem((3,), (256,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    p.q[1, 0] = torch.nan
    blocks = torch.tensor([[[0, 1]], [[1, 0]], [[-1, -1]]], dtype=torch.int32)
    out, lse = triton_prefill.sparse_attention(*checked_call(p, blocks), path="union")
    assert lse[1].isnan().tolist() == [True] + [False] * 15
    assert lse[0].isfinite().all()
    assert lse[2].eq(-torch.inf).all()
    assert_equal("NaN", out.isnan().all(-1), lse.isnan())
