# SPDX-License-Identifier: MIT
"""The C kernels of block scores compute what the definition says, for every layout and dtype that they read."""

import pytest
import torch

from openmsa import E4M3, PagedIndexKeys, Sequences, block_scores
from openmsa.block_scores import cpu_products
from openmsa.runtime import c_library
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from tests import instructions

pytestmark = instructions.needs_compiler

LENGTHS = (40, 1, 0, 17, 5, 90), (40, 130, 7, 20, 0, 200)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Returns the names of the functions that were called."""
    names, run = [], c_library.run
    monkeypatch.setattr(c_library, "run", lambda *tasks: (names.extend(task.name for task in tasks), run(*tasks))[1])
    return names


def scores(*args, **options):
    with PoisonedOutputs():
        return block_scores(*args, impl="cpu", **options)


def check(found, q, k, seqs, block_size):
    """Compares with the reference in the inputs' precision and in float64."""
    wide = [x.dequantize(torch.float64) if isinstance(x, E4M3) else x.double() for x in (q, k)]
    honest, truth = (block_scores(*x, seqs, block_size=block_size, impl="reference") for x in ((q, k), wide))
    assert_equal("unseen", found == -torch.inf, truth == -torch.inf)
    assert_close("scores", found, honest, truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("block_size", "index_dim", "group", "heads"),
    [(16, 128, 16, 1), (20, 48, 3, 2), (128, 64, 1, 3), (256, 256, 16, 1), (33, 16, 5, 1), (33, 32, 7, 2), (80, 96, 3, 1)],
)
def test_many_rows(block_size, index_dim, group, heads, dtype, processor, made):
    p = problem(
        *LENGTHS, index_heads=group * heads, index_key_heads=heads, kv_heads=group * heads, index_dim=index_dim, dtype=dtype
    )
    check(scores(p.index_q, p.index_k, p.seqs, block_size=block_size), p.index_q, p.index_k, p.seqs, block_size)
    assert made == ["score"]


def of_build(monkeypatch, flag, *args):
    """Returns the scores of kernels that are compiled with a further flag, or none."""
    with monkeypatch.context() as patch:
        instructions.use(patch, f"{c_library.NATIVE} {flag}")
        return scores(*args, block_size=20)


@pytest.mark.skipif(not instructions.TILES["-DEMULATED_TILES"], reason="emulated tiles need AVX-512")
@pytest.mark.parametrize("index_dim", [32, 64, 96, 128, 256, 48])
@pytest.mark.parametrize("stored", ["bfloat16", "float32", "e4m3"])
def test_tiles_make_products_of_bfloat16_alone(stored, index_dim, monkeypatch):
    """Tiles and pairs add in another order than vectors, which shows in some bits, and tiles as emulated ones do."""
    q, k = torch.randn(150, 1, index_dim).bfloat16(), torch.randn(150, 1, index_dim).bfloat16()
    if stored != "bfloat16":
        q, k = (q.float(), k.float()) if stored == "float32" else (q, E4M3.quantize(k))
    native, emulated = (of_build(monkeypatch, flag, q, k) for flag in ("", "-DEMULATED_TILES"))
    alike = stored != "bfloat16" or index_dim % 32 != 0
    vectors = native
    if instructions.SERVES:
        vectors = of_build(monkeypatch, instructions.WIDENED, q, k)
        assert torch.equal(vectors, native) == alike
    if instructions.SERVES == "AMX tiles":
        assert_equal("scores", native, emulated)
    assert torch.equal(vectors, emulated) == alike


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "index_dim", "group"), [(16, 32, 1), (33, 96, 5), (128, 128, 16), (256, 64, 2)])
def test_rows_see_their_keys_alone(block_size, index_dim, group, dtype, processor, made):
    """The first queries of a sequence see nothing; keys that are not finite hide no others, and count where they are seen."""
    options = {"index_heads": group, "kv_heads": group, "index_dim": index_dim, "dtype": dtype}
    p = problem((50, 70, 33), (20, 333, 33), **options)
    p.index_k[20 + torch.arange(270, 333, 9)] = torch.nan
    p.index_k[20 + torch.arange(272, 333, 13), 0, 0] = torch.inf
    check(scores(p.index_q, p.index_k, p.seqs, block_size=block_size), p.index_q, p.index_k, p.seqs, block_size)
    assert made == ["score"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 15])
@pytest.mark.parametrize(("block_size", "index_dim", "heads"), [(16, 128, 1), (20, 48, 2), (128, 64, 3), (256, 256, 1)])
def test_few_rows(block_size, index_dim, heads, rows, dtype, processor, made):
    n = 517
    q, k = torch.randn(1, rows * heads, index_dim).to(dtype), torch.randn(n, heads, index_dim).to(dtype)
    check(scores(q, k, block_size=block_size), q, k, None, block_size)
    assert made == ["score_few"]


def part(x, first, count):
    """Returns some rows of a tensor, or of E4M3 numbers."""
    rows = slice(first, first + count)
    return E4M3(x.data[rows], x.scale) if isinstance(x, E4M3) else x[rows]


@pytest.mark.parametrize("dtype", [*DTYPES, "e4m3"], ids=str)
@pytest.mark.parametrize(("tokens", "group", "heads"), [(2, 1, 1), (5, 3, 1), (3, 2, 3), (15, 1, 2)])
def test_few_queries_have_the_bits_of_each_alone(tokens, group, heads, dtype, processor, made):
    """Also where they see different numbers of a block's keys, and some no key at all."""
    lens = [(tokens, 300), (tokens, tokens), (1, 77), (tokens, 2), (0, 9), (tokens - 1, 0)]
    options = {"index_heads": group * heads, "index_key_heads": heads, "kv_heads": group * heads, "index_dim": 64}
    p = problem(*zip(*lens, strict=True), dtype=torch.float32 if dtype == "e4m3" else dtype, **options)
    q, k = (E4M3.quantize(x) for x in (p.index_q, p.index_k)) if dtype == "e4m3" else (p.index_q, p.index_k)
    found = scores(q, k, p.seqs, block_size=20)
    assert made == ["score_few"]
    if dtype != "e4m3":
        check(found, q, k, p.seqs, 20)
    first = first_key = 0
    for count, k_len in lens:
        for t in range(count):
            seen = max(0, k_len - count + t + 1)
            alone = part(q, first + t, 1), part(k, first_key, seen)
            blocks = -(-seen // 20)
            if blocks:
                assert_equal(f"scores of {first + t}", found[:, first + t, :blocks], scores(*alone, block_size=20)[:, 0])
            assert bool((found[:, first + t, blocks:] == -torch.inf).all())
        first, first_key = first + count, first_key + k_len


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_shared_out_where_calls_are_few(dtype, monkeypatch, processor):
    """A call of a few hundred rows is cut into as many pieces as threads take, which change no bit."""
    p, pieces, run = problem((60,), (700,), index_dim=64, dtype=dtype), [], c_library.run
    monkeypatch.setattr(c_library, "run", lambda *tasks: (pieces.extend(task.pieces for task in tasks), run(*tasks))[1])
    found = []
    for least, each in ((1, 1000), (8, 8), (1000, 8)):
        monkeypatch.setattr(cpu_products, "LEAST_BLOCKS", least)
        monkeypatch.setattr(cpu_products, "PIECES_A_THREAD", each)
        found.append(scores(p.index_q, p.index_k, p.seqs, block_size=20))
    assert pieces == [35 * p.index_k.shape[1], 4 * p.index_k.shape[1], p.index_k.shape[1]]
    for other in found[1:]:
        assert_equal("scores", other, found[0])


def places(keys, page_size):
    """Yields keys ``[n, heads, dim]`` packed, with gaps, and in pages that lie together and apart."""
    yield keys
    yield torch.cat((keys, keys), 2)[..., : keys.shape[2]]
    first = torch.arange(-(-len(keys) // page_size))
    for pages in (first, first.flip(0), first * 3):
        shape = (3 * len(first) + 1, keys.shape[1], page_size, keys.shape[2])
        cache = PagedIndexKeys.allocate(pages.int()[None], *shape, dtype=keys.dtype)
        cache.keys.fill_(torch.nan)
        cache.append(keys)
        yield cache


@pytest.mark.parametrize(("rows", "function"), [(1, "score_few"), (4, "score_few"), (40, "score")])
@pytest.mark.parametrize(("block_size", "page_size"), [(32, 64), (32, 7), (144, 288), (128, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_keys_are_ties_wherever_they_lie(dtype, block_size, page_size, rows, function, processor, made):
    """The best key of every block is the same one, at another place in each."""
    keys, q = torch.randn(1497, 1, 128).to(dtype), torch.randn(rows, 1, 128).to(dtype)
    q = q.transpose(0, 1) if rows < 16 else q
    block = torch.arange(1497 // block_size)
    keys[block_size * block + 7 * block % min(25, block_size)] = (9 * q.reshape(-1, 128)[:1].float()).to(dtype)
    seqs = Sequences(q_offset=torch.tensor([1500], dtype=torch.int32))
    expected = None
    for stored in places(keys, page_size):
        found = scores(q, stored, seqs, block_size=block_size)
        expected = found if expected is None else expected
        assert_equal("scores", found, expected)
    first = expected[0, 0, : len(block)]
    assert_equal("scores", first, first[:1].expand(len(block)))
    assert set(made) == {function}


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("query", ["plain", "tensor", "head"])
@pytest.mark.parametrize("per", ["tensor", "head"])
def test_e4m3_is_read_as_it_is_stored(per, query, rows):
    k = E4M3.quantize(torch.randn(300, 2, 64) * torch.tensor([3.0, 0.2])[:, None], per=per)
    q = torch.randn(rows, 4, 64)
    q = q if query == "plain" else E4M3.quantize(q, per=query)
    check(scores(q, k, block_size=16), q, k, None, 16)


@pytest.mark.parametrize(("rows", "function"), [(1, "score_few"), (40, "score")])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 32)], ids=str)
def test_special_values(dtype, dim, rows, function, made, processor):
    """A NaN product counts as -inf, also one of 0 times infinity."""
    keys, q = torch.zeros(600, 1, dim, dtype=dtype), torch.tensor([1.0, -1.0, 0.0])[:, None] * torch.eye(dim)[0]
    keys[:, 0, 0] = 2.0
    keys[3, 0, 0], keys[300, 0, 0], keys[301, 0, 0], keys[512:, 0, 0] = torch.inf, torch.nan, 5.0, -torch.inf
    expected = torch.tensor([[torch.inf, 5.0, -torch.inf], [-2.0, -2.0, torch.inf], [0.0, 0.0, -torch.inf]])
    seqs = Sequences(q_offset=torch.tensor([600], dtype=torch.int32))
    found = scores(q.to(dtype).expand(rows, 3, dim), keys, seqs, block_size=256)
    assert_equal("scores", found, expected[:, None].expand(3, rows, 3))
    assert made == [function]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_calls_and_chunks_change_no_bit(dtype, rows, threads, monkeypatch, processor):
    p = problem((90, 33), (300, 33), kv_heads=4, index_heads=4, index_key_heads=2, dtype=dtype)
    expected = scores(p.index_q, p.index_k, p.seqs, block_size=16)
    monkeypatch.setattr(cpu_products, "CALL_ROWS", rows)
    monkeypatch.setattr(c_library, "threads_for", lambda products: threads)
    assert_equal("scores", scores(p.index_q, p.index_k, p.seqs, block_size=16), expected)
    one = Sequences(q_offset=torch.tensor([300 - 90 + 17], dtype=torch.int32))
    found = scores(p.index_q[17:48], p.index_k[:300], one, block_size=16)
    assert_equal("scores", found, expected[:, 17:48, : found.shape[2]])


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_several_sequences(dtype, page_size, made, processor):
    p = problem(*LENGTHS, kv_heads=2, index_heads=2, index_key_heads=2, dtype=dtype)
    expected = scores(p.index_q, p.index_k, p.seqs, block_size=16)
    for interleaved in (False, True):
        cache = paged(p, page_size, interleaved=interleaved)[1]
        assert_equal("scores", scores(strided(p.index_q), cache, p.seqs, block_size=16), expected)
    assert set(made) == {"score"}


@pytest.mark.parametrize("rows", [1, 40])
def test_pytorch_serves_without_a_compiler(rows, made, monkeypatch):
    instructions.use_none(monkeypatch)
    q, k = torch.randn(rows, 2, 64), torch.randn(300, 1, 64)
    check(scores(q, k, block_size=16), q, k, None, 16)
    assert not made


def test_sequences_without_queries(made):
    """The longest query length is a bound, which the caller may say."""
    p = problem((0, 0), (40, 7), index_heads=16, kv_heads=16)
    seqs = Sequences(p.seqs.cu_seqlens_q, p.seqs.cu_seqlens_k, max_seqlen_q=30)
    assert scores(p.index_q, p.index_k, seqs, block_size=16).shape == (16, 0, 3)
    assert not made
