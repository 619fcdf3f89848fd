# SPDX-License-Identifier: MIT
"""Hopper's own union kernel for E4M3 keys is chosen where it should be, and on such a GPU its results are right."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from openmsa import E4M3, NVFP4, PagedKV, Sequences, sparse_attention
from openmsa.primitives.rows import query_rows
from openmsa.runtime.devices import COMPILE_TARGETS, facts
from openmsa.sparse_attention import STAGE, gluon_sm90_attend, gluon_sm90_union, reference, triton_lists, triton_prefill
from openmsa.sparse_attention.gluon_sm90_union import OPTIONS, serves
from openmsa.sparse_attention.triton_config import Keys, prefill_config
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import problem, random_blocks
from openmsa.types import layout
from tests import oracle
from tests.hopper.marks import DEVICE, HOPPER, in_turn, on_a_hopper_gpu, on_hopper
from tests.sparse_attention.test_triton import check, run, stored_case

BLOCK = 128


def served(q, k, v, block=BLOCK, arch=90):
    paged = (k.seq_lens, k.capacity) if v is None else ()
    seqs = layout(Sequences.from_lengths([8], [256]), 8, None if paged else 256, torch.device("cpu"), *paged)
    keys, queries = Keys.of(k, v, seqs, block, True), query_rows(q, True)
    config = prefill_config(q.shape[2], q.shape[1] // keys.heads, block, arch // 10)
    return serves(COMPILE_TARGETS[arch], queries, keys, config, block)


def e4m3(*shape, per="tensor"):
    return E4M3.quantize(torch.randn(shape), per=per)


def test_what_it_serves():
    def q(heads=32, dim=128, dtype=torch.bfloat16):
        return torch.randn(8, heads, dim).to(dtype)

    k, v = e4m3(256, 2, 128), e4m3(256, 2, 128, per="head")
    assert served(q(), k, v)
    assert served(q(dtype=torch.float16), k, v)
    assert all(served(q(2 * group), k, v) for group in (2, 3, 8, 64, 100))
    assert not served(q(2), k, v)  # tiles of 32 rows
    assert not served(q(dtype=torch.float32), k, v)
    assert not served(E4M3.quantize(q()), k, v)
    assert not served(q(), k.dequantize(torch.bfloat16), v.dequantize(torch.bfloat16))
    assert not served(q(), *(NVFP4.quantize(torch.randn(256, 2, 128)) for _ in "kv"))
    assert not any(served(q(), k, v, block) for block in (64, 100, 256))
    assert not any(served(q(), k, v, arch=arch) for arch in (80, 100, 120))
    assert not any(served(q(dim=dim), e4m3(256, 2, dim), e4m3(256, 2, dim)) for dim in (64, 96, 256))
    assert not served(q().transpose(1, 2).contiguous().transpose(1, 2), k, v)


def test_which_layouts_it_serves():
    q, whole = torch.randn(8, 32, 128).half(), e4m3(257, 3, 256)

    def part(rows, heads, dims):
        return E4M3(whole.data[rows, heads, dims], whole.scale)

    first, second = slice(0, 256), slice(0, 2)
    k, v = part(first, second, slice(0, 128)), part(first, second, slice(128, 256))
    assert served(q, k, v)
    assert served(q, part(slice(1, 257), slice(1, 3), slice(16, 144)), v)
    assert not served(q, part(first, second, slice(8, 136)), v)  # not 16 codes at a time
    assert not served(q, k, e4m3(256, 2, 128))  # of other strides
    one = part(first, slice(1, 2), slice(0, 128))
    assert served(torch.randn(8, 16, 128).half(), one, E4M3(one.data.unfold(1, 1, 1)[..., 0], one.scale))

    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    for page_size, per, expected in ((128, "head", True), (256, "tensor", True), (64, "head", False), (128, "page", False)):
        pool = e4m3(4, 2, page_size, 128, per=per)
        assert served(q, PagedKV(pool, e4m3(4, 2, page_size, 128, per=per), table, lens), None) is expected


def test_it_fits():
    ring = OPTIONS["STAGES"] * 2 * BLOCK * 128 * 2
    assert ring + 17000 <= COMPILE_TARGETS[90].shared_bytes  # barriers, and what layouts are converted through
    second, converter = OPTIONS["ATTEND_REGISTERS"], OPTIONS["CONVERT_REGISTERS"]
    first = 504 - second - converter  # what Triton leaves to the first four warps
    assert min(first, second) >= 200
    assert 128 * (first + second + converter) <= 65536


def test_what_it_is_given(monkeypatch):
    """Without a GPU: another kernel in its place finds all that it needs, and plain keys never come here."""
    p = problem((21, 5), (300, 200), kv_heads=1, group=16, head_dim=128, dtype=torch.float16)
    checked, expected = stored_case(p, random_blocks(p, 2, BLOCK, 1), BLOCK, "e4m3 head", torch.float16, 0, torch.float16)
    given = []
    monkeypatch.setattr(triton_prefill, "runs_hopper_kernels", lambda device: True)
    monkeypatch.setattr(
        gluon_sm90_union, "launch_sm90_union", lambda call: given.append(call) or triton_prefill.launch_union(call)
    )
    for path in ("union", "auto"):
        check(run(checked, path=path), expected)
    assert [call.lists.union.listed.item() for call in given] == [64, 64]
    monkeypatch.setattr(gluon_sm90_attend, "attend_launch", lambda *_: None)
    run(checked._replace(k=checked.k.dequantize(torch.float16), v=checked.v.dequantize(torch.float16)))
    assert len(given) == 2


@pytest.fixture
def launches(monkeypatch):
    """Returns a list that grows by the call of each launch of the kernel."""
    done, launch = [], gluon_sm90_union.launch_sm90_union
    monkeypatch.setattr(gluon_sm90_union, "launch_sm90_union", lambda call: (done.append(call), launch(call)))
    return done


# name: query lengths, key lengths, kv heads, group, page size or 0, factors, topk, queries that select alike, offsets
CASES = {
    "one tile": ((4,), (128,), 1, 16, 0, "e4m3 tensor", 1, 4, None),
    "two blocks": ((4,), (256,), 1, 16, 0, "e4m3 tensor", 2, 4, None),
    "odd": ((13,), (1000,), 1, 16, 0, "e4m3 head", 5, 1, None),
    "ragged": ((11, 0, 3, 1, 26), (900, 0, 128, 1, 1300), 2, 16, 0, "e4m3 head", 6, 5, None),
    "before and behind": ((30, 9), (300, 500), 2, 16, 0, "e4m3 tensor", 3, 8, (-10, 600)),
    "pages": ((19, 0, 40), (700, 0, 900), 2, 16, 128, "e4m3 head", 5, 6, None),
    "wide pages": ((19, 8), (700, 900), 2, 8, 256, "e4m3 tensor", 5, 6, None),
    "group of 3": ((70,), (900,), 2, 3, 0, "e4m3 head", 5, 40, None),
    "group of 100": ((9,), (900,), 2, 100, 0, "e4m3 head", 5, 3, None),
}


def selection(p, topk, alike, seed=0):
    """Neighbours select alike, and one block of each query is its own choice."""
    blocks = random_blocks(p, topk, BLOCK, p.k.shape[1], seed)
    own = random_blocks(p, topk, BLOCK, p.k.shape[1], seed + 1)
    row = 0
    for q_len in p.q_lens:
        for i in range(q_len):
            blocks[row + i] = blocks[row + i // alike * alike]
        row += q_len
    if topk > 1:
        fresh = (own[..., -1:] != blocks[..., :-1]).all(-1)
        blocks[..., -1] = torch.where(fresh, own[..., -1], -1)
    return blocks


@on_hopper
@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [torch.bfloat16, torch.float16]))
def test_against_the_truth(name, dtype, launches):
    q_lens, k_lens, heads, group, page_size, factors, topk, alike, offsets = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=heads, group=group, head_dim=128, dtype=dtype, offsets=offsets, shared_prefix=BLOCK)
    blocks = selection(p, topk, alike)
    checked, expected = stored_case(p, blocks, BLOCK, factors, dtype, page_size, dtype)
    result = run(checked, path="union")
    assert len(launches) == 1
    check(result, expected)
    if not HOPPER and name != "ragged":
        return  # The interpreter takes its time.
    for again in (run(checked, path="union"), run(checked._replace(blocks=checked.blocks.flip(-1)), path="union")):
        assert_equal("out", again[0], result[0].cpu())
        assert_equal("lse", again[1], result[1].cpu())
    check(run(checked), expected)


def by_head(x):
    return E4M3.quantize(x, per="head")


def long_call(lengths, contexts, heads=4, group=16, dim=128, topk=16, spread=4, seed=0, store=by_head):
    """Returns a call with more pairs of tiles than a GPU has multiprocessors, in which every 32 neighbours draw from topk +
    spread blocks. store: what makes keys and values of float32 numbers."""
    device, generator = DEVICE, torch.Generator(DEVICE).manual_seed(seed)
    q = torch.randn(sum(lengths), heads * group, dim, device=device, generator=generator).bfloat16()
    k, v = (store(torch.randn(sum(contexts), heads, dim, device=device, generator=generator)) for _ in "kv")
    rows = []
    for length, context in zip(lengths, contexts, strict=True):
        num_blocks = -(-context // BLOCK)
        tiles = -(-length // 32)
        drawn = torch.rand(tiles, heads, num_blocks, device=device, generator=generator).argsort(-1)[..., : topk + spread]
        drawn = drawn.repeat_interleave(32, 0)[:length]
        order = torch.rand(drawn.shape, device=device, generator=generator).argsort(-1)[..., :topk]
        rows.append(F.pad(drawn.gather(-1, order).int(), (0, topk - order.shape[-1]), value=-1))
    return q, k, v, torch.cat(rows), Sequences.from_lengths(list(lengths), list(contexts), device)


@on_a_hopper_gpu
@pytest.mark.parametrize("spread", [0, 4, 40], ids=["alike", "clustered", "mixed"])
def test_many_pairs_a_program(spread, launches, monkeypatch):
    monkeypatch.setattr(triton_prefill, "expands", lambda *_: False)
    q, k, v, blocks, seqs = given = long_call((701, 3, 500), (9000, 128, 6001), spread=spread)
    checked = STAGE.check(*given, block_size=BLOCK, return_lse=True)
    out, lse = run(checked)
    assert len(launches) == 1
    sizes = launches[0].lists.union.sizes.view(-1, 2)[: launches[0].plan.num_tiles * 4, 0]
    assert bool((sizes > 0).any())
    assert bool((sizes < 0).any()) == (spread == 40)  # pairs of which one tile goes elsewhere, too
    monkeypatch.setattr(gluon_sm90_union, "serves", lambda *_: False)
    triton_out, _ = run(checked)
    assert len(launches) == 1
    lengths = layout(seqs, len(q), k.shape[0], q.device)
    truth, lse_truth = reference.sparse_attention(q.double(), k, v, blocks, lengths, BLOCK, 128**-0.5, True)
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
    checked, expected = stored_case(p, blocks, BLOCK, "e4m3 tensor", torch.bfloat16, 0, torch.bfloat16)
    check(run(checked, path=path), expected)
    assert len(launches) == 1


@on_hopper
def test_few_queries_go_elsewhere(launches):
    """Where a block has one reader or fewer, tiles are too few for a GPU, which must walk their blocks one by one."""
    p = problem((20,), (9000,), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    checked, expected = stored_case(p, selection(p, 3, 4), BLOCK, "e4m3 head", torch.bfloat16, 0, torch.bfloat16)
    check(run(checked), expected)
    assert not launches
    check(run(checked, path="union"), expected)
    assert len(launches) == 1


@on_hopper
@pytest.mark.parametrize("scale", [-0.5, 0.0, 30.0])
def test_scales(scale):
    p = problem((9,), (300,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    blocks = selection(p, 3, 4)
    checked, _ = stored_case(p, blocks, BLOCK, "e4m3 tensor", torch.bfloat16, 0, torch.bfloat16)
    checked = checked._replace(softmax_scale=scale)
    meant = problem((9,), (300,), kv_heads=1, group=16, head_dim=128)
    numbers = (checked.q.float(), checked.k.dequantize(torch.float32), checked.v.dequantize(torch.float32))
    for x, y in zip((meant.q, meant.k, meant.v), numbers, strict=True):
        x.copy_(y)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    rounded = meant.map(lambda x: x.to(torch.bfloat16))
    check(run(checked, path="union"), (oracle.attention(meant, reads, scale), oracle.honest_attention(rounded, reads, scale)))


@on_hopper
def test_rows_that_nobody_reads_may_hold_nan():
    p = problem((8, 8), (512, 400), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16, offsets=(260, 300))
    blocks = torch.tensor([[[1, 2, -1]]], dtype=torch.int32).repeat(16, 1, 1)
    blocks[8:] = torch.tensor([2, 0, 9], dtype=torch.int32)
    checked, expected = stored_case(p, blocks, BLOCK, "e4m3 tensor", torch.bfloat16, 0, torch.bfloat16)
    for x in (checked.k, checked.v):
        codes = x.data.view(torch.uint8)
        codes[:128] = codes[268:512] = codes[512 + 128 : 512 + 256] = codes[512 + 308 :] = 0x7F
    check(run(checked, path="union"), expected)


@on_hopper
def test_a_query_of_nan_has_an_lse_of_nan():
    p = problem((3,), (256,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    p.q[1, 0] = torch.nan
    blocks = torch.tensor([[[0, 1]], [[1, 0]], [[-1, -1]]], dtype=torch.int32).to(DEVICE)
    k, v = (E4M3.quantize(x.to(DEVICE)) for x in (p.k, p.v))
    lengths = layout(p.to(DEVICE).seqs, 3, 256, DEVICE)
    out, lse = triton_prefill.sparse_attention(p.q.to(DEVICE), k, v, blocks, lengths, BLOCK, 0.2, True, path="union")
    assert lse[1].isnan().tolist() == [True] + [False] * 15
    assert lse[0].isfinite().all()
    assert lse[2].eq(-torch.inf).all()
    assert_equal("NaN", out.isnan().all(-1), lse.isnan())
    assert facts(out.device).arch == 90
