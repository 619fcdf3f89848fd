# SPDX-License-Identifier: MIT
"""Hopper's own kernel for KV-outer is chosen where it should be, and on such a GPU its results are right."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from openmsa import E4M3, PagedKV, Sequences
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.sparse_attention import STAGE, gluon_sm90_outer, reference, triton_prefill
from openmsa.sparse_attention.gluon_sm90_outer import GROUPS, OPTIONS
from openmsa.sparse_attention.triton_config import Keys
from openmsa.sparse_attention.triton_lists import Chunk
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from openmsa.types import layout
from tests import oracle
from tests.hopper.marks import DEVICE, HOPPER, in_turn, on_a_hopper_gpu, on_hopper
from tests.sparse_attention.test_gluon_sm90_union import long_call as stored_long_call
from tests.sparse_attention.test_triton import check, run

BLOCK = 128


@pytest.fixture
def launches(monkeypatch):
    """A list that has an element for each launch of the kernel."""
    done, launch = [], gluon_sm90_outer.launch_sm90_outer
    monkeypatch.setattr(gluon_sm90_outer, "launch_sm90_outer", lambda *given: (done.append(given), launch(*given)))
    return done


def served(q, k, v, arch=90, **changes):
    """Whether the kernel serves a call of these tensors; changes: of the fields of its `Plan`."""
    paged = (k.seq_lens, k.capacity) if v is None else ()
    seqs = layout(Sequences.from_lengths([8], [256]), 8, None if paged else 256, torch.device("cpu"), *paged)
    keys = Keys.of(k, v, seqs, BLOCK, True)
    plan = {
        "block_size": BLOCK,
        "group": q.shape[1] // keys.heads,
        "topk": 16,
        "partial_dtype": q.dtype,
        "chunk": Chunk(1, 64, 8),
        "cuts": 1,
    }
    return gluon_sm90_outer.outer_operands(COMPILE_TARGETS[arch], q, keys, SimpleNamespace(**{**plan, **changes})) is not None


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


def test_what_it_serves():
    q, k, v = numbers(8, 32, 128), numbers(256, 2, 128), numbers(256, 2, 128)
    assert served(q, k, v)
    assert served(*(x.half() for x in (q, k, v)))
    assert all(served(numbers(8, 2 * group, 128), k, v) for group in (8, 16, 32, 64))
    assert not any(served(numbers(8, 2 * group, 128), k, v) for group in (1, 3, 4, 12, 100))
    assert not served(q.half(), k, v)
    assert not served(*(x.float() for x in (q, k, v)))
    assert not served(q, E4M3.quantize(k), E4M3.quantize(v))
    assert not served(*(numbers(n, heads, 64) for n, heads in ((8, 32), (256, 2), (256, 2))))
    assert not any(served(q, k, v, arch=arch) for arch in (80, 100, 120))
    assert not any(served(q, k, v, block_size=block) for block in (64, 256))
    assert not served(q, k, v, partial_dtype=torch.float32)
    assert not served(q, k, v, cuts=2)  # Partials of a cut block have places that it does not write.
    assert served(q, k, v, chunk=Chunk(1, 1 << 20, 1 << 19))
    assert not served(q, k, v, chunk=Chunk(1, 1 << 20, (1 << 19) + 1))  # Numbers of items do not fit with flags in a word.
    assert served(q, k, v, chunk=Chunk(1, (1 << 23) - 1, 8))
    assert not served(q, k, v, chunk=Chunk(1, 1 << 23, 8))  # Their numbers do not fit with a key in a word.


def test_which_layouts_it_serves():
    q, whole = numbers(8, 32, 128), numbers(257, 3, 256)
    k, v = whole[:256, :2, :128], whole[:256, :2, 128:]
    assert served(q, k, v)
    assert not served(q, whole[:256, :2, 4:132], v)  # not 16 bytes at a time
    assert not served(numbers(8, 32, 132)[..., 4:], k, v)
    table, lens = torch.zeros(1, 4, dtype=torch.int32), torch.tensor([256], dtype=torch.int32)
    for page_size, expected in ((128, True), (256, True), (64, False), (100, False)):
        k, v = numbers(4, 2, page_size, 128), numbers(4, 2, page_size, 128)
        assert served(q, PagedKV(k, v, table, lens), None) is expected


def test_it_fits():
    queries, held = OPTIONS["STAGES"] * 64 * 128 * 2, 2 * 2 * BLOCK * 128 * 2
    assert queries + held + 2048 <= COMPILE_TARGETS[90].shared_bytes  # with barriers, and what steps do
    assert OPTIONS["STAGES"] % GROUPS.value == 0
    assert GROUPS.value * OPTIONS["ATTEND_REGISTERS"] + OPTIONS["LOAD_REGISTERS"] <= 512  # 16 warps have 128 each.


# name: query lengths, key lengths, kv heads, group, page size or 0, topk, offsets, scale
CASES = {
    "one key": ((1, 5), (1, 129), 2, 16, 0, 2, None, 0.2),
    "odd": ((13,), (1000,), 1, 16, 0, 5, None, 0.2),
    "ragged": ((11, 0, 3, 1, 26), (900, 0, 128, 1, 1300), 2, 16, 0, 10, None, 0.2),
    "before and behind": ((30, 9), (300, 500), 2, 16, 0, 9, (-10, 600), 0.2),
    "before more keys": ((21, 30), (1500, 300), 1, 16, 0, 11, (893, -10), 30.0),
    "pages": ((19, 0, 40), (700, 0, 900), 2, 16, 128, 9, None, 0.2),
    "wide pages of 16": ((40, 8), (2000, 900), 1, 16, 256, 16, None, 0.0),
    "wide pages": ((19, 8), (700, 900), 2, 8, 256, 5, None, 0.2),
    "group of 32": ((60,), (700,), 2, 32, 0, 4, None, 30.0),
    "group of 64": ((40,), (700,), 2, 64, 128, 4, None, 0.0),
    "several steps": ((200, 7) if HOPPER else (90, 7), (2500, 300), 2, 16, 0, 16, None, 0.2),
}


def case(name, dtype):
    """Returns the checked arguments of a call, and the truth."""
    q_lens, k_lens, heads, group, page_size, topk, offsets, scale = CASES[name]
    p = problem(q_lens, k_lens, kv_heads=heads, group=group, head_dim=128, dtype=dtype, offsets=offsets, shared_prefix=BLOCK)
    blocks = random_blocks(p, topk, BLOCK, heads)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, scale), oracle.honest_attention(p, reads, scale)
    return checked_call(p, blocks, page_size, scale), expected


def checked_call(p, blocks, page_size=0, scale=0.2):
    p = p.to(DEVICE)
    k, v = (paged(p, page_size)[0], None) if page_size else (p.k, p.v)
    return STAGE.check(p.q, k, v, blocks.to(DEVICE), p.seqs, block_size=BLOCK, softmax_scale=scale, return_lse=True)


@on_hopper
@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [torch.bfloat16, torch.float16]))
def test_against_the_truth(name, dtype, launches):
    checked, expected = case(name, dtype)
    result = run(checked, path="outer")
    assert len(launches) == 1
    check(result, expected)
    repeated = ({}, {"workspace_bytes": 1}) if HOPPER or name == "ragged" else ()  # The latter makes a chunk of each tile.
    for again in (run(checked, path="outer", **options) for options in repeated):
        assert_equal("out", again[0], result[0].cpu())
        assert_equal("lse", again[1], result[1].cpu())


@on_a_hopper_gpu
@pytest.mark.parametrize("workspace", [1 << 30, 40 << 20], ids=["one chunk", "chunks"])
def test_many_items_a_program(workspace, launches, monkeypatch):
    """Some items have fewer steps than a program has groups of warps, and no item's steps are those of the next."""
    given = stored_long_call((1500, 5, 700), (3000, 128, 2001), spread=8, store=torch.Tensor.bfloat16)
    checked = STAGE.check(*given, block_size=BLOCK, return_lse=True)
    out, lse = run(checked, path="outer", workspace_bytes=workspace)
    assert (len(launches) == 1) == (workspace == 1 << 30)
    again = run(checked, path="outer", workspace_bytes=workspace)
    assert_equal("out", again[0], out.cpu())
    monkeypatch.setattr(gluon_sm90_outer, "outer_operands", lambda *_: None)
    triton_out, _ = run(checked, path="outer")
    q, k, v, blocks, seqs = given
    lengths = layout(seqs, len(q), k.shape[0], q.device)
    truth, lse_truth = reference.sparse_attention(q.double(), k.double(), v.double(), blocks, lengths, BLOCK, 128**-0.5, True)
    assert_close("out", out, triton_out, truth)
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-4)


@on_hopper
def test_rows_that_nobody_reads_may_hold_nan(launches):
    p = problem((8, 8), (512, 400), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16, offsets=(260, 300))
    blocks = torch.tensor([[[1, 2, -1]]], dtype=torch.int32).repeat(16, 1, 1)
    blocks[8:] = torch.tensor([2, 0, 9], dtype=torch.int32)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    for x in (p.k, p.v):
        x[:128] = x[268:512] = x[512 + 128 : 512 + 256] = x[512 + 308 :] = torch.nan
    check(run(checked_call(p, blocks), path="outer"), expected)
    assert len(launches) == 1


@on_hopper
def test_a_block_whose_logits_are_all_minus_infinity_has_no_weight():
    p = problem((3,), (256,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    p.q[1, 0, 0], p.k[:128, 0, 0], p.k[128:, 0, 0] = 3e20, -3e20, 0
    blocks = torch.tensor([[[0, 1]]], dtype=torch.int32).repeat(3, 1, 1)
    out, lse = triton_prefill.sparse_attention(*checked_call(p, blocks), path="outer")
    alone, alone_lse = triton_prefill.sparse_attention(*checked_call(p, blocks[:, :, 1:].contiguous()), path="outer")
    assert_equal("out", out[1, 0], alone[1, 0].cpu())
    torch.testing.assert_close(lse[1, 0], alone_lse[1, 0])


@on_hopper
def test_a_negative_scale_is_left_to_triton(launches):
    p = problem((9,), (300,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    blocks = random_blocks(p, 2, BLOCK, 1)
    reads = oracle.reads_of_blocks(blocks, BLOCK)
    expected = oracle.attention(p, reads, -0.2), oracle.honest_attention(p, reads, -0.2)
    check(run(checked_call(p, blocks, scale=-0.2), path="outer"), expected)
    assert not launches


@on_hopper
def test_a_query_of_nan_has_an_lse_of_nan():
    check_a_query_of_nan(torch.tensor([[[0, 1]], [[1, 0]], [[-1, -1]]], dtype=torch.int32), path="outer")


def check_a_query_of_nan(blocks, **options):
    """Checks a call whose second query has a head of NaN, and whose third reads nothing."""
    p = problem((3,), (256,), kv_heads=1, group=16, head_dim=128, dtype=torch.bfloat16)
    p.q[1, 0] = torch.nan
    out, lse = triton_prefill.sparse_attention(*checked_call(p, blocks), **options)
    assert lse[1].isnan().tolist() == [True] + [False] * 15
    assert lse[0].isfinite().all()
    assert lse[2].eq(-torch.inf).all()
    assert_equal("NaN", out.isnan().all(-1), lse.isnan())
