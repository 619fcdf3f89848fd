# SPDX-License-Identifier: MIT
"""The C kernel of sparse attention computes what the definition says, for every layout and dtype that it reads."""

import ctypes

import pytest
import torch

from openmsa import E4M3, PagedKV, Sequences, sparse_attention
from openmsa.primitives import cpu_blocks
from openmsa.runtime import c_library
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks, strided
from tests import instructions

pytestmark = instructions.needs_compiler

LENGTHS = (40, 1, 0, 17, 5, 90), (40, 130, 7, 20, 0, 200)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Returns the calls of the kernel."""
    made, run = [], c_library.run
    monkeypatch.setattr(c_library, "run", lambda *tasks: (made.extend(x for task in tasks for x in task.calls), run(*tasks))[1])
    return made


def attend(*args, **options):
    with PoisonedOutputs():
        return sparse_attention(*args, return_lse=True, impl="cpu", **options)


def reference(*args, **options):
    return sparse_attention(*args, return_lse=True, impl="reference", **options)


def check(found, p, k, v, blocks, **options):
    """Compares with the reference in the inputs' precision and in float64."""
    wide = [x.dequantize(torch.float64) if isinstance(x, E4M3) else x.double() for x in (p.q, k, v)]
    honest, truth = reference(p.q, k, v, blocks, p.seqs, **options), reference(*wide, blocks, p.seqs, **options)
    for name, x, y, z in zip(("out", "lse"), found, honest, truth, strict=True):
        assert_close(name, x, y, z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("block_size", "head_dim", "group", "kv_heads", "topk"),
    [
        (16, 128, 16, 1, 4),
        (20, 48, 3, 2, 5),
        (128, 64, 1, 3, 2),
        (256, 256, 16, 1, 1),
        (33, 16, 5, 1, 6),
        (64, 96, 7, 2, 3),
        (17, 32, 32, 2, 4),
        (100, 96, 16, 1, 3),
        (65, 160, 48, 1, 2),
        (64, 64, 16, 2, 3),
        (128, 48, 16, 1, 2),
    ],
)
def test_what_the_definition_says(block_size, head_dim, group, kv_heads, topk, dtype, processor, calls):
    p = problem(*LENGTHS, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    blocks = random_blocks(p, topk, block_size, kv_heads)
    found = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=block_size)
    check(found, p, p.k, p.v, blocks, block_size=block_size)
    assert calls


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 16)], ids=str)
@pytest.mark.parametrize("page_size", [1, 7, 16, 48, 256])
def test_pages_and_strides_change_no_bit(page_size, dtype, group, heads, calls):
    p = problem(*LENGTHS, kv_heads=2, group=group, head_dim=32, dtype=dtype)
    blocks = random_blocks(p, 4, 16, heads)
    expected = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16)
    check(expected, p, p.k, p.v, blocks.expand(-1, 2, -1), block_size=16)
    for interleaved in (False, True):
        cache = paged(p, page_size, interleaved=interleaved)[0]
        found = attend(strided(p.q), cache, None, torch.stack((blocks, blocks), -1)[..., 0], p.seqs, block_size=16)
        for name, x, y in zip(("out", "lse"), found, expected, strict=True):
            assert_equal(name, x, y)
    moved = p.map(strided)
    found = attend(moved.q, moved.k, moved.v, blocks, p.seqs, block_size=16)
    for name, x, y in zip(("out", "lse"), found, expected, strict=True):
        assert_equal(name, x, y)
    assert calls


@pytest.mark.parametrize("query", ["plain", "tensor", "head"])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_e4m3_is_read_as_it_is_stored(per, query, calls):
    p = problem(*LENGTHS, kv_heads=2, group=3, head_dim=64)
    p.k[3, 1, 5] = p.v[8, 0, 9] = torch.nan
    k, v = (E4M3.quantize(x * torch.tensor([3.0, 0.2])[:, None], per=per) for x in (p.k, p.v))
    q = p.q if query == "plain" else E4M3.quantize(p.q, per=query)
    blocks = random_blocks(p, 4, 16, 2)
    found = attend(q, k, v, blocks, p.seqs, block_size=16)
    assert all(call.keys.type == call.values.type == 3 for call in calls)
    wide = [x if isinstance(x, torch.Tensor) else x.dequantize() for x in (q, k, v)]
    expected = reference(*wide, blocks, p.seqs, block_size=16)
    assert bool(expected[0].isnan().any())
    error = 2e-5 if query == "plain" else 1e-2  # results of E4M3 queries are bfloat16
    torch.testing.assert_close(found[0].float(), expected[0], atol=error, rtol=error, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_every_number_is_read_and_written(dtype, processor):
    """A query that sees one key gets its values: subnormal numbers, -0, infinities and NaN among them."""
    if dtype == torch.float8_e4m3fn:
        rows = torch.arange(256, dtype=torch.uint8).view(1, 256)
    else:
        bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
        rows = torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, (256, 256)).to(bits)
    for row in rows.view(dtype).unbind():
        stored = row.view(1, 1, 256)
        plain = dtype != torch.float8_e4m3fn
        k, v = (stored.clone().fill_(0), stored) if plain else (E4M3.quantize(torch.zeros(1, 1, 256)), E4M3(stored))
        q = torch.zeros(9, 1, 256, dtype=dtype if plain else torch.float32)
        seqs = Sequences(q_offset=torch.tensor([0], dtype=torch.int32))  # All queries see the key.
        out = attend(q, k, v, torch.zeros(9, 1, 1, dtype=torch.int32), seqs, block_size=16)[0][8:]
        expected = stored if plain else v.dequantize()
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(nan=0.0).double(), expected.nan_to_num(nan=0.0).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_results_are_rounded_to_nearest_even(dtype, processor):
    """Results are halfway between two numbers of the dtype, and close to it, from subnormal to beyond the largest."""
    middle = torch.tensor(torch.finfo(dtype).smallest_normal).log2()
    exponents = torch.cat((torch.arange(-12, 3.0) + middle, torch.arange(-3, 3.0), torch.tensor([15.0, 16.0, 127.0])))
    steps = torch.cat([torch.arange(16.0) * half for half in (2.0**-9, 2.0**-12)]) + 1
    near = torch.tensor([0.0, 2.0**-20, -(2.0**-20)])
    values = (torch.exp2(exponents)[:, None, None] * (steps[:, None] + near)).flatten()
    values = torch.cat((values, -values))
    v = values[: len(values) // 16 * 16].view(-1, 1, 16)
    for key in v.unbind():
        exact = key.to(dtype)
        split = torch.stack((exact, exact))  # Two keys of equal weight: their mean is between them.
        up = exact.view(torch.int16).add(1).view(dtype)
        split[1] = torch.where(up.isfinite(), up, exact)
        found = attend(
            *(torch.zeros(n, 1, 16, dtype=dtype) for n in (9, 2)),
            split.view(2, 1, 16),
            torch.zeros(9, 1, 1, dtype=torch.int32),
            Sequences(q_offset=torch.tensor([1], dtype=torch.int32)),
            block_size=16,
        )
        mean = split.float().mean(0)
        assert torch.equal(found[0][1], mean.to(dtype))


KINDS = {"vectors": {"group": 4}, "tiles": {"group": 16, "dtype": torch.bfloat16}}
"""These are served by vectors of float32 and, where the processor has them, by tiles of bfloat16."""
each_kind = pytest.mark.parametrize("kind", KINDS)


def laws(kind):
    """Yields a problem and its result."""
    p = problem((90, 36), (300, 36), kv_heads=2, head_dim=32, **KINDS[kind])
    blocks = random_blocks(p, 6, 16, 2)
    return p, blocks, attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16)


def same(found, expected):
    for name, x, y in zip(("out", "lse"), found, expected, strict=True):
        assert_equal(name, x, y)


@each_kind
@pytest.mark.parametrize("keys", [4101, 71])
def test_few_queries_have_the_bits_of_many(keys, kind):
    p = problem((11,), (keys,), kv_heads=2, head_dim=32, **KINDS[kind])
    blocks = random_blocks(p, 6, 16, 2)
    expected = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16)
    for rows in (slice(10, None), slice(4, None)):
        same(attend(p.q[rows], p.k, p.v, blocks[rows], block_size=16), [x[rows] for x in expected])


@each_kind
def test_the_order_of_a_list_changes_no_bit(kind):
    p, blocks, expected = laws(kind)
    order = torch.rand(blocks.shape).argsort(-1)
    same(attend(p.q, p.k, p.v, blocks.gather(2, order), p.seqs, block_size=16), expected)


@each_kind
@pytest.mark.parametrize("chunk", [9, 18])
def test_queries_beside_a_query_change_no_bit(chunk, kind):
    p, blocks, expected = laws(kind)
    q_start = 0
    for b, (q_len, k_len) in enumerate(((90, 300), (36, 36))):
        keys = slice(300 * b, 300 * b + k_len)
        for first in range(0, q_len, chunk):
            stop = min(first + chunk, q_len)
            rows = slice(q_start + first, q_start + stop)
            seqs = Sequences(q_offset=torch.tensor([k_len - q_len + first], dtype=torch.int32))
            found = attend(p.q[rows], p.k[keys], p.v[keys], blocks[rows], seqs, block_size=16)
            same(found, [x[rows] for x in expected])
        q_start += q_len


@each_kind
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_threads_and_calls_change_no_bit(threads, rows, kind, monkeypatch, calls):
    p, blocks, expected = laws(kind)
    monkeypatch.setattr(cpu_blocks, "CALL_ROWS", rows)
    monkeypatch.setattr(cpu_blocks, "ROWS_A_BLOCK", 1)
    monkeypatch.setattr(c_library, "threads_for", lambda products: threads)
    calls.clear()
    same(attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16), expected)
    assert len(calls) >= 4 * min(rows == 1, 1) + 2 * max(1, threads // 2)


def test_memory_stays_within_the_workspace(monkeypatch, calls):
    monkeypatch.setenv("OPENMSA_CPU_WORKSPACE_MIB", "1")
    monkeypatch.setattr(c_library, "threads_for", lambda products: 2)
    p = problem((900,), (900,), kv_heads=1, group=16, head_dim=256)
    attend(p.q, p.k, p.v, random_blocks(p, 4, 16, 1), p.seqs, block_size=16)
    functions = c_library.library(cpu_blocks.SOURCE).functions
    assert (
        max(functions.memory_bytes(ctypes.byref(call)) for call in calls) < 3 << 19
    )  # queries and sums, and a block beside them
    assert len(calls) > 20


@each_kind
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_what_a_query_does_not_see_is_not_let_in(name, bad, kind, processor):
    """Queries in front of key 45 select its block, and do not see it."""
    p = problem((60,), (60,), kv_heads=1, head_dim=32, **KINDS[kind])
    getattr(p, name)[45] = bad
    blocks = torch.tensor([0, 1, 2, -1], dtype=torch.int32).expand(60, 1, 4)
    found = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=20)
    assert bool(found[0][:45].isfinite().all())
    expected = reference(p.q, p.k, p.v, blocks, p.seqs, block_size=20)
    error = 2e-5 if kind == "vectors" else 1e-2  # results are rounded to bfloat16
    torch.testing.assert_close(found[0], expected[0], atol=error, rtol=error, equal_nan=True)
    torch.testing.assert_close(found[1], expected[1], atol=2e-5, rtol=2e-5, equal_nan=True)


@each_kind
def test_logits_far_apart(kind, processor):
    """Weights of 0 beside a weight of 1, in one block and across blocks, in either order."""
    p = problem((40,), (80,), kv_heads=1, head_dim=32, **KINDS[kind])
    heads = p.q.shape[1]
    p.q.zero_()[..., :16] = 1.0
    for far in (1.5, 12.0, 32.0, 9984.0, 1e30):  # A logit slightly greater, and much greater, than those before it.
        p.k.fill_(0.0)
        p.k[3], p.k[37], p.k[38], p.k[70] = -far, far, far, -far
        far = p.k[37, 0, 0].double().item()
        blocks = torch.tensor([0, 2, 3, 4], dtype=torch.int32).expand(40, 1, 4)
        out, lse = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16, softmax_scale=1.0)
        logits = p.k[list(range(16)) + list(range(32, 80)), 0, 0].double() * 16
        seen = torch.arange(64) + 16 * (torch.arange(64) >= 16) <= torch.arange(40)[:, None] + 40
        logits = logits.where(seen, -torch.inf)
        values = p.v[list(range(16)) + list(range(32, 80)), 0].double()
        expected = (logits.softmax(1) @ values)[:, None].expand(40, heads, 32)
        error = 2e-5 if kind == "vectors" else 1e-2
        torch.testing.assert_close(out.double(), expected, atol=error, rtol=error)
        torch.testing.assert_close(lse.double(), logits.logsumexp(1)[:, None].expand(40, heads), atol=2e-5, rtol=2e-5)


@instructions.needs_tiles
def test_tiles_serve_bfloat16():
    """Tiles round weights to bfloat16, vectors do not, so that their results are not the same."""
    p, blocks, expected = laws("tiles")
    assert c_library.library(cpu_blocks.SOURCE).says.endswith(f", bfloat16 by {instructions.SERVES}")
    with pytest.MonkeyPatch.context() as patch:
        instructions.use(patch, f"{c_library.NATIVE} {instructions.WIDENED}")
        assert "bfloat16" not in c_library.library(cpu_blocks.SOURCE).says
        found = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16)
    assert not torch.equal(found[0], expected[0])
    with pytest.MonkeyPatch.context() as patch:
        instructions.use(patch, f"{c_library.NATIVE} -DEMULATED_TILES")
        found = attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16)
    torch.testing.assert_close(found[0], expected[0], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-5)


def test_a_large_problem_with_the_sizes_of_a_model():
    p = problem((300,), (3000,), kv_heads=2, group=16, head_dim=128, dtype=torch.bfloat16)
    blocks = random_blocks(p, 16, 128, 2)
    found = attend(p.q, p.k, p.v, blocks, p.seqs)
    check(found, p, p.k, p.v, blocks)


@pytest.mark.parametrize("why", ["float64", "gaps", "scale of a page", "no compiler"])
def test_what_the_kernel_does_not_read_is_left_to_pytorch(why, calls, monkeypatch):
    p = problem((20,), (40,), kv_heads=1, group=2, head_dim=32)
    blocks = random_blocks(p, 2, 16, 1)
    k, v = p.k, p.v
    if why == "float64":
        p = problem((20,), (40,), kv_heads=1, group=2, head_dim=32, dtype=torch.float64)
        k, v = p.k, p.v
    elif why == "gaps":
        k = p.k.repeat_interleave(2, 2)[..., ::2]
    elif why == "scale of a page":
        cache = paged(p, 16)[0]
        k, v = PagedKV(*(E4M3.quantize(x, per="page") for x in (cache.k, cache.v)), cache.page_table, cache.seq_lens), None
    else:
        instructions.use_none(monkeypatch)
    found, expected = (f(p.q, k, v, blocks, p.seqs, block_size=16) for f in (attend, reference))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)
    assert not calls


@instructions.needs_tiles
def test_tiles_are_pytorchs_again_behind_a_call():
    """PyTorch's own products of bfloat16 use the same tiles of a thread, and could take them to be as it left them."""
    p, blocks, expected = laws("tiles")
    q, k, v = (torch.randn(1, 2, 300, 64, dtype=torch.bfloat16) for _ in range(3))
    x, y = torch.randn(200, 96, dtype=torch.bfloat16), torch.randn(96, 33, dtype=torch.bfloat16)

    def pytorchs():
        dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return dense, x @ y, torch.nn.functional.linear(x, x)

    before = pytorchs()
    for _ in range(3):
        same(attend(p.q, p.k, p.v, blocks, p.seqs, block_size=16), expected)
        for found, first in zip(pytorchs(), before, strict=True):
            assert_equal("PyTorch's result", found, first)
