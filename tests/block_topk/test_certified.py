# SPDX-License-Identifier: MIT
"""Certified selection equals the exact one bit for bit, on every input, and reads little on ordinary ones."""

import itertools
import math

import pytest
import torch

from openmsa import CertifiedKeys, Int8, PagedIndexKeys, Sequences, explain, select_blocks
from openmsa.types import layout
from tests.contract import DEVICES

INF, NAN = math.inf, math.nan


def keys_of(kind, n, heads, dim):
    """Returns index keys [n, heads, dim] that make the selection hard in one way."""
    k = torch.randn(n, heads, dim)
    if kind == "repeated":
        return k[torch.arange(n) % 7]
    if kind == "nearly equal":
        return k[:1] + 1e-3 * k
    if kind == "huge norms":
        return k * torch.exp(8 * torch.randn(n, 1, 1))
    if kind == "tiny norms":
        return k * 1e-38
    if kind == "zero":
        return torch.zeros_like(k)
    if kind == "inf and nan":
        k[torch.rand(n) < 0.02, :, 0] = INF
        k[torch.rand(n) < 0.02, :, -1] = NAN
        k[torch.rand(n) < 0.02] = -INF
    if kind == "one direction":  # int8 keeps its sign only
        k[..., 1:] *= 1e-4
    return k


KINDS = ("random", "repeated", "nearly equal", "huge norms", "tiny norms", "zero", "inf and nan", "one direction")
SHAPES = (  # q_lens, k_lens, index heads, key heads, dim, block size, topk, init, local, page size
    ((1,), (5000,), 4, 1, 128, 128, 8, 0, 1, 128),
    ((1, 1, 1), (900, 0, 3000), 4, 1, 128, 128, 16, 0, 1, 64),
    ((3, 2), (700, 1500), 4, 2, 64, 32, 5, 1, 2, 16),
    ((40, 0, 7), (333, 20, 800), 2, 1, 80, 48, 6, 0, 0, 32),
    ((2,), (4000,), 1, 1, 64, 256, 3, 1, 2, 256),
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "shape"), list(itertools.product(KINDS, SHAPES)))
def test_it_is_the_exact_selection(kind, shape, dtype, device):
    q_lens, k_lens, heads, key_heads, dim, block_size, topk, init, local, page_size = shape
    index_k = keys_of(kind, sum(k_lens), key_heads, dim).to(dtype).to(device)
    index_q = torch.randn(sum(q_lens), heads, dim).to(dtype).to(device)
    if kind == "inf and nan":
        index_q[0, 0, 0], index_q[-1, -1, 1] = NAN, INF
    seqs = Sequences.from_lengths(list(q_lens), list(k_lens), device)
    options = {"block_size": block_size, "init_blocks": init, "local_blocks": local}
    for pages in (False, True):
        exact = paged_keys(index_k, seqs, page_size) if pages else index_k
        both = certified(exact)
        if explain(select_blocks, index_q, both, topk, seqs, certified=True, **options).chosen is None:
            pytest.skip("no kernel for this dtype")
        rescored = torch.full((sum(q_lens), heads), -7, dtype=torch.int32, device=device)
        blocks = select_blocks(index_q, both, topk, seqs, certified=True, rescored=rescored, **options)
        assert torch.equal(blocks, select_blocks(index_q, exact, topk, seqs, **options))
        assert bool((rescored >= 0).all())
        assert int(rescored.max()) <= -(-max(k_lens) // block_size)


def paged_keys(index_k, seqs, page_size):
    """Puts keys into shuffled pages, with NaN where no key lives."""
    lens, starts = seqs.cu_seqlens_k.diff().int(), seqs.cu_seqlens_k.tolist()
    counts = [-(-n // page_size) for n in lens.tolist()]
    free = torch.randperm(sum(counts) + 1).tolist()
    pool = index_k.new_full((len(free), index_k.shape[1], page_size, index_k.shape[2]), NAN)
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for i in range(count):
            table[b, i] = free.pop()
            rows = index_k[starts[b] + i * page_size : min(starts[b] + (i + 1) * page_size, starts[b + 1])]
            pool[int(table[b, i]), :, : rows.shape[0]] = rows.transpose(0, 1)
    return PagedIndexKeys(pool, table.to(pool.device), lens)


def certified(index_k):
    if isinstance(index_k, PagedIndexKeys):
        return PagedIndexKeys(CertifiedKeys.quantize(index_k.keys), index_k.page_table, index_k.seq_lens)
    return CertifiedKeys.quantize(index_k)


def assert_exact(device, index_q, index_k, topk, seqs=None):
    """Checks that the certified selection is the exact one: of float32 numbers on a CPU, of bfloat16 ones on a GPU."""
    index_q, index_k = (x.to(device, torch.float32 if device == "cpu" else torch.bfloat16) for x in (index_q, index_k))
    blocks = select_blocks(index_q, CertifiedKeys.quantize(index_k), topk, seqs, block_size=16, certified=True)
    assert torch.equal(blocks, select_blocks(index_q, index_k, topk, seqs, block_size=16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize(("size", "key_size"), [(1e-25, 1e15), (1e-42, 1e18), (1e15, 1e-25), (1e19, 1e-42), (1e25, 1e12)])
def test_squares_out_of_range(size, key_size, tokens, device):
    """The selection is exact where squares of norms underflow or overflow although the products are ordinary numbers."""
    for spread in (1.0, 1e-6):
        k = (1 - spread) * torch.randn(1, 1, 64, dtype=torch.float64) + spread * torch.randn(600, 1, 64, dtype=torch.float64)
        q = torch.randn(tokens, 2, 64, dtype=torch.float64)
        assert_exact(device, q * size, k * key_size, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize("topk", [3, 8])
def test_infinities_that_meet(tokens, topk, device):
    """The selection is exact although the order of a sum of products that overflow says whether it ends as inf, -inf or NaN."""
    for dim in (16, 64, 128):
        k = torch.zeros(90, 1, dim)
        for j in range(90):
            k[j, 0, torch.randperm(dim)[:4]] = torch.tensor([3e19, -3e19, 3e19, 1.0 if j % 3 == 0 else -6e19])
        for size in (5e18, 1e19, 1e27):
            assert_exact(device, torch.full((tokens, 2, dim), size), k, topk)


def out_of_range():
    """Yields queries whose products with int8 codes overflow although no score does, in whatever order they are summed; and
    scores in the subnormal range."""
    for first, second in ((0, 1), (1, 0), (0, 32), (32, 0)):
        k, q = torch.zeros(64, 1, 64), torch.ones(1, 1, 64)
        q[..., [first, second]], q[..., 2] = 2e38, 1e36
        k[:, :, 2], k[16:32, :, 2] = 1e-4, 1e-3
        k[5] = 0
        k[5, 0, first], k[5, 0, second] = -64 * 2.0**-17, 127 * 2.0**-17  # the codes are exact: no error hides it
        yield q, k
    q, k = torch.full((1, 1, 64), 2e36), torch.zeros(64, 1, 64)
    q[..., :3] = torch.tensor([1.0, 1.0, 1e36])
    k[:, :, 2], k[16:32, :, 2] = 1e-4, 1e-3
    k[5], k[5, 0, :3], k[5, 0, 3:31] = 1e-3, 0, -1e-3
    yield q, k
    for size, key_size in ((2.0**-75, 2.0**-75), (1e-30, 1e-13), (1e-25, 1e-15), (1e-2, 1e-39)):
        yield size * torch.randn(3, 4, 64), key_size * torch.randn(640, 1, 64)


@pytest.mark.parametrize("device", DEVICES)
def test_products_out_of_range(device):
    for q, k in out_of_range():
        assert_exact(device, q, k, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test above runs the kernels")
def test_kernels_bear_products_out_of_range():
    pytest.importorskip("triton")
    from openmsa.block_topk import triton_certified, triton_select

    for q, k in out_of_range():
        q, k = q.bfloat16(), k.bfloat16()
        arguments = (layout(None, len(q), len(k), q.device), 16, 2, 0, 1)
        blocks, _ = triton_certified.select_blocks(q, CertifiedKeys.quantize(k), *arguments)
        assert torch.equal(blocks, triton_select.select_blocks(q, k, *arguments))


def test_nan_of_others_changes_no_row():
    """NaN in another query or another sequence changes no row, not even sums that only their rounding tells apart."""
    numbers = torch.randn(64)
    k = torch.stack([numbers[torch.randperm(64)] for _ in range(600)])[:, None]
    index_q = torch.full((3, 2, 64), 1 / 3)
    index_q[2, 0, 3] = NAN
    assert_exact("cpu", index_q, k, 5)
    others = torch.cat((k, torch.full((40, 1, 64), NAN)))
    assert_exact("cpu", index_q[:2], others, 5, Sequences.from_lengths([1, 1], [600, 40]))


@pytest.mark.parametrize("device", DEVICES)
def test_few_blocks_are_rescored_on_ordinary_keys(device):
    """Of 256 blocks the bounds settle all but those near the last place."""
    torch.manual_seed(0)
    keys = CertifiedKeys.quantize(torch.randn(256 * 64, 1, 128, dtype=torch.bfloat16, device=device))
    index_q = torch.randn(4, 4, 128, dtype=torch.bfloat16, device=device)  # as many rows as the GPU certifies
    rescored = torch.empty(4, 4, dtype=torch.int32, device=device)
    select_blocks(index_q, keys, 16, block_size=64, certified=True, rescored=rescored)
    assert 0 < float(rescored.float().mean()) < 64  # a row whose last places rounding could swap has all blocks rescored


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("block_size", "page_size"), [(48, 48), (48, 192), (100, 100), (64, 64)])
def test_errors_in_other_pages_open_nothing(block_size, page_size, device):
    """Infinite errors in pages that nobody owns, between those of the sequence, leave no block undecided."""
    torch.manual_seed(0)
    blocks = 40 * page_size // block_size
    exact = torch.randn(80, 1, page_size, 64).half().to(device)
    coarse = Int8.quantize(exact)
    coarse.error[1::2] = torch.inf
    table = torch.arange(0, 80, 2, dtype=torch.int32, device=device)[None]
    keys = PagedIndexKeys(CertifiedKeys(coarse, exact), table, torch.tensor([40 * page_size], dtype=torch.int32, device=device))
    index_q = torch.randn(1, 2, 64).half().to(device)
    rescored = rescored_blocks(index_q, keys, block_size, device)
    assert int(rescored.max()) < blocks // 2


def rescored_blocks(index_q, keys, block_size, device):
    """Counts the blocks that kernels rescore, in the interpreter without a GPU; on a CPU beside a GPU its own implementation
    counts."""
    if torch.cuda.is_available():
        rescored = torch.empty(*index_q.shape[:2], dtype=torch.int32, device=device)
        select_blocks(index_q, keys, 5, block_size=block_size, certified=True, rescored=rescored)
        return rescored
    pytest.importorskip("triton")
    from openmsa.block_topk import triton_certified

    lengths = keys.layout(None, len(index_q), index_q.device)
    return triton_certified.select_blocks(index_q, keys, lengths, block_size, 5, 0, 1)[1]


def test_wrong_bounds_would_show():
    """With errors that claim to be 0 the coarse keys decide, and decide otherwise: the bounds are what makes it exact."""
    torch.manual_seed(0)
    k, index_q = torch.randn(256 * 64, 1, 64), torch.randn(8, 4, 64)
    coarse = Int8.quantize(k)
    lying = CertifiedKeys(Int8(coarse.data, coarse.scale, torch.zeros_like(coarse.error)), k)
    exact = select_blocks(index_q, k, 16, block_size=64)
    assert not torch.equal(select_blocks(index_q, lying, 16, block_size=64, certified=True), exact)


def test_arguments_are_checked():
    k, index_q = torch.randn(300, 1, 64), torch.randn(2, 4, 64)
    keys = CertifiedKeys.quantize(k)
    with pytest.raises(ValueError, match=r"index_k must be CertifiedKeys .* for certified=True, got Tensor"):
        select_blocks(index_q, k, certified=True)
    with pytest.raises(ValueError, match="rescored must be None unless certified is True"):
        select_blocks(index_q, keys, rescored=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rescored.shape\[1\] must be 4"):
        select_blocks(index_q, keys, certified=True, rescored=torch.zeros(2, 3, dtype=torch.int32))


KERNEL_SHAPES = (  # as SHAPES, small enough for the interpreter
    ((1, 1), (900, 2000), 4, 1, 64, 64, 8, 0, 1, 64),
    ((3, 0, 2), (700, 64, 300), 4, 2, 64, 32, 5, 1, 2, 16),
    ((2,), (1500,), 1, 1, 80, 256, 3, 1, 1, 256),
    ((5,), (333,), 2, 1, 64, 48, 6, 0, 0, 32),
    ((8,), (333,), 2, 1, 64, 48, 4, 1, 0, 32),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the contract tests above run the kernels")
@pytest.mark.parametrize(("kind", "shape"), list(itertools.product(KINDS, KERNEL_SHAPES)))
def test_kernels_find_the_exact_selection(kind, shape):
    pytest.importorskip("triton")
    from openmsa.block_topk import triton_certified, triton_select

    q_lens, k_lens, heads, key_heads, dim, block_size, topk, init, local, page_size = shape
    index_k = keys_of(kind, sum(k_lens), key_heads, dim).half()
    index_q = torch.randn(sum(q_lens), heads, dim).half()
    exact = paged_keys(index_k, Sequences.from_lengths(list(q_lens), list(k_lens)), page_size)
    lengths = exact.layout(Sequences.from_lengths(list(q_lens), list(k_lens)), len(index_q), index_q.device)
    for keys in (exact, index_k):
        arguments = (lengths, block_size, topk, init, local)
        blocks, rescored = triton_certified.select_blocks(index_q, certified(keys), *arguments)
        assert torch.equal(blocks, triton_select.select_blocks(index_q, keys, *arguments))
        assert bool((rescored <= lengths.visible_blocks(len(index_q), block_size)[:, None]).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [((1, 2), (700, 1200), 4, 2, 64, 64), ((1,), (1900,), 1, 1, 32, 256), ((3,), (400,), 3, 1, 64, 20)]
)
def test_nothing_is_read_before_it_is_written(shape, device):
    """What a workspace holds before, be it what another call has left, changes nothing; the keys tie inside blocks, one query
    is 0 and one is huge."""
    pytest.importorskip("triton")
    from openmsa.block_scores.triton_route import Lengths
    from openmsa.block_topk import triton_certified, triton_select

    if (device == "cpu") == torch.cuda.is_available():
        pytest.skip("kernels run on the GPU, or in the interpreter where there is none")
    q_lens, k_lens, heads, key_heads, dim, block_size = shape
    index_k = torch.randint(-1, 2, (sum(k_lens), key_heads, dim)).half()
    index_q = torch.randint(-2, 3, (sum(q_lens), heads, dim)).half() / 3
    index_q[0, 0], index_q[-1, -1] = 0, 2.0**15
    index_q, index_k = index_q.to(device), index_k.to(device)
    seqs = Sequences.from_lengths(list(q_lens), list(k_lens), device)
    lengths = layout(seqs, len(index_q), len(index_k), index_q.device)
    exact = triton_select.select_blocks(index_q, index_k, lengths, block_size, 4, 0, 1)
    rows, walks, num_blocks = max(q_lens) * heads // key_heads, len(q_lens) * key_heads, lengths.num_blocks(block_size)
    sizes = (len(index_q), heads, rows, walks, num_blocks, block_size, index_q.device)
    workspace = triton_certified.Workspace.allocate(*sizes)
    for _ in range(2):
        for x in vars(workspace).values():
            x.view(torch.uint8).random_(0, 256)
        blocks = torch.full_like(exact, -7)
        keys = CertifiedKeys.quantize(index_k)
        triton_certified.Selection(index_q, keys, None, Lengths.of(lengths), block_size, workspace).run(0, 1, blocks)
        assert torch.equal(blocks, exact)


def test_bounds_come_first_only_where_they_can_pay():
    pytest.importorskip("triton")
    from openmsa.block_topk.triton_certified import certifies

    sizes = {"rows": 4, "num_blocks": 1024, "free": 15, "all_rows": 128, "walks": 32, "block_size": 128}
    assert certifies(**sizes)
    assert certifies(**sizes | {"rows": 16})
    assert not certifies(**sizes | {"rows": 17})
    assert not certifies(**sizes | {"num_blocks": 15})
    assert not certifies(**sizes | {"num_blocks": 8193})
    assert not certifies(**sizes | {"free": 0})
    assert not certifies(**sizes | {"all_rows": 1 << 15})
    assert certifies(**sizes | {"all_rows": 1 << 12, "walks": 1 << 10})
    assert not certifies(**sizes | {"all_rows": 1 << 13, "walks": 1 << 11})
