# SPDX-License-Identifier: MIT
"""The kernels of certified selection are right one by one, in the interpreter: bounds, what they settle, what is rescored."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from openmsa import CertifiedKeys, Int8, PagedIndexKeys, Sequences

pytest.importorskip("triton")

import triton
import triton.language as tl

from openmsa.block_topk.triton_bounds import fixed_point

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the contract tests run the kernels")

INF, NAN = math.inf, math.nan
SHAPES = (  # q_lens, k_lens, index heads, key heads, dim, block size, page size (0: packed)
    ((1, 1, 1), (300, 0, 1100), 4, 1, 128, 128, 128),
    ((2, 0, 3), (200, 77, 513), 6, 2, 80, 48, 16),
    ((2,), (700,), 7, 1, 64, 32, 0),
    ((1, 2), (90, 1000), 1, 1, 16, 256, 256),
    ((3,), (520,), 2, 2, 256, 64, 0),
)


def laid_out(q_lens, k_lens):
    from openmsa.types import layout

    return layout(Sequences.from_lengths(list(q_lens), list(k_lens)), sum(q_lens), sum(k_lens), torch.device("cpu"))


def paged(index_k, k_lens, page_size):
    """Puts packed keys into pages in descending order, with NaN where there is no key."""
    counts = [-(-n // page_size) for n in k_lens]
    pool = index_k.new_full((sum(counts), index_k.shape[1], page_size, index_k.shape[2]), NAN)
    table, page, start = torch.full((len(k_lens), max(counts)), -1, dtype=torch.int32), len(pool), 0
    for b, n in enumerate(k_lens):
        for i in range(counts[b]):
            page -= 1
            table[b, i] = page
            rows = index_k[start + i * page_size : start + min((i + 1) * page_size, n)]
            pool[page, :, : len(rows)] = rows.transpose(0, 1)
        start += n
    return PagedIndexKeys(pool, table, torch.tensor(k_lens, dtype=torch.int32))


def taken(keys, seqs):
    """Returns keys, page table and lengths as launches take them: of packed keys from `seqs`, of pages from the cache."""
    from openmsa.block_scores.triton_route import Lengths

    lengths = Lengths.of(seqs)
    if not isinstance(keys, PagedIndexKeys):
        return keys, None, lengths
    return keys.keys, keys.page_table, replace(lengths, cu_seqlens_k=None, seq_lens=keys.seq_lens)


def bounds_of(index_q, coarse, seqs, block_size):
    """Returns lower and upper bounds, and how many blocks each query sees, from kernels with poisoned outputs."""
    return bounds_and_candidates(index_q, coarse, seqs, block_size)[:3]


def bounds_and_candidates(index_q, coarse, seqs, block_size):
    """Returns what `bounds_of` returns, and the words of keys that can have the best score of a block."""
    from openmsa.block_topk.triton_bounds import Words, launch_bounds
    from openmsa.primitives.rows import Tile

    keys, page_table, lengths = taken(coarse, seqs)
    shape = 2, index_q.shape[1], len(index_q), seqs.num_blocks(block_size)
    bounds = torch.full(shape, NAN)
    visible = torch.full((len(index_q),), -7, dtype=torch.int32)
    key_heads, tile = keys.shape[1], Tile.of(block_size)
    words = Words.of(seqs.max_seqlen_q * index_q.shape[1] // key_heads, tile)
    candidates = torch.randint(-128, 128, (seqs.batch * key_heads * words.bytes(tile, shape[3]),), dtype=torch.int8)
    launch_bounds(index_q, keys, page_table, lengths, block_size, bounds, candidates, visible)
    return bounds[0], bounds[1], visible, candidates


def flagged(candidates, seqs, heads, key_heads, block_size):
    """Returns words of candidates as flags ``[batch * key heads, tiles, rows, keys of a tile]``."""
    from openmsa.block_topk.triton_bounds import Words
    from openmsa.primitives.rows import Tile

    tile = Tile.of(block_size)
    words = Words.of(seqs.max_seqlen_q * heads // key_heads, tile)
    walks, tiles, loops = seqs.batch * key_heads, tile.count(seqs.num_blocks(block_size)), max(tile.tile // 64, 1)
    held = candidates.view(words.dtype).view(walks, tiles, -1, 8, 4).permute(0, 1, 4, 2, 3)  # r, w, l
    bit = 4 * torch.arange(words.rows // 4)[:, None, None, None, None, None] + 2 * torch.arange(loops)[:, None, None, None]
    bit = bit + torch.arange(2)[:, None]  # [c, 1, j, 1, i, 1]
    flags = (held[:, :, None, :, None, :, None, :] >> bit) & 1  # walks, tiles, c, r, j, w, i, l
    return flags.bool().reshape(walks, tiles, words.rows, tile.tile)


def block_maxima(index_q, index_k, seqs, block_size):
    """Returns the scores of blocks in float64, -inf where a query sees no key."""
    q, k = index_q.double(), index_k.double().repeat_interleave(index_q.shape[1] // index_k.shape[1], 1)
    best = torch.full((q.shape[1], len(q), seqs.num_blocks(block_size)), -INF, dtype=torch.float64)
    for q0, q1, k0, k_len, offset in seqs.on_host():
        for t in range(q0, q1):
            for j in range(0, min(offset + t - q0 + 1, k_len), block_size):
                stop = min(j + block_size, offset + t - q0 + 1, k_len)
                best[:, t, j // block_size] = torch.einsum("hd,khd->hk", q[t], k[k0 + j : k0 + stop]).amax(-1)
    return best


@triton.jit
def fixed_point_kernel(rows, parts, numbers, ROWS: tl.constexpr, DIM: tl.constexpr):
    o_r, o_d = tl.arange(0, ROWS), tl.arange(0, DIM)[None, :]
    b_n, b_unit, b_norm, b_rest = fixed_point(tl.load(rows + o_r[:, None] * DIM + o_d))
    tl.store(parts + tl.arange(0, 2 * ROWS)[:, None] * DIM + o_d, b_n)
    tl.store(numbers + o_r, b_unit)
    tl.store(numbers + ROWS + o_r, b_norm)
    tl.store(numbers + 2 * ROWS + o_r, b_rest)


def test_queries_as_integers():
    """Norms are never too small, also where squares are no float32; what the integers lack is inside its bound, and little."""
    sizes = torch.tensor([0, 1e-42, 1e-38, 1e-25, 1e-12, 1, 1e12, 1e19, 1e25, 1e36, torch.nan, torch.inf, 1, 1, 1, 1])
    rows = (torch.randn(16, 64) * sizes[:, None]).bfloat16()
    rows[12, 5], rows[13, 0], rows[14] = 2.0**111, 2.0**110 * (2 - 2.0**-7), 1.9921875
    parts, numbers = torch.full((32, 64), 77, dtype=torch.int8), torch.full((3, 16), NAN)
    fixed_point_kernel[(1,)](rows, parts, numbers, ROWS=16, DIM=64)
    unit, norm, rest = numbers.double()
    exact = rows.double().norm(dim=1)
    usable = rows.abs().amax(1) < 2.0**111
    assert usable.sum() == 12
    assert bool(((norm >= exact) & (norm <= exact * 1.001 + 1e-36))[usable].all())
    assert bool((norm[~usable] == INF).all())
    taken = (128 * parts[::2].double() + parts[1::2].double()) * unit[:, None]
    lack = (rows.double() - taken).norm(dim=1)
    assert bool((lack <= rest)[usable].all())
    assert bool((rest <= 1e-3 * exact + 1e-36)[usable & (exact > 2.0**-90)].all())
    assert bool((taken[~usable] == 0).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_bounds_hold_and_are_close(shape, dtype):
    q_lens, k_lens, heads, key_heads, dim, block_size, page_size = shape
    seqs = laid_out(q_lens, k_lens)
    index_k = torch.randn(sum(k_lens), key_heads, dim).to(dtype)
    index_q = torch.randn(sum(q_lens), heads, dim)
    index_q = (index_q * 2.0 ** torch.randint(-5, 6, index_q.shape[:2])[..., None]).to(dtype)
    coarse = Int8.quantize(index_k)
    keys = coarse
    if page_size:
        pages = paged(index_k, k_lens, page_size)
        keys = PagedIndexKeys(Int8.quantize(pages.keys), pages.page_table, pages.seq_lens)
    lower, upper, visible = bounds_of(index_q, keys, seqs, block_size)
    assert torch.equal(visible, seqs.visible_blocks(len(index_q), block_size))
    best = block_maxima(index_q, index_k, seqs, block_size)
    seen = torch.arange(best.shape[2]) < visible[:, None]
    assert bool((lower <= best)[:, seen].all())
    assert bool((best <= upper)[:, seen].all())
    # |q| times the largest error, what the integers of the query lack times the largest key, and rounding.
    queries = index_q.double().transpose(0, 1)
    unit = torch.exp2(queries.abs().amax(-1).log2().floor() - 13)
    units = queries / unit[..., None]
    lack = (units - (units + 0.5).floor()).norm(dim=-1) * unit
    radius = queries.norm(dim=-1) * float(coarse.error.max()) + lack * float(coarse.scale.max()) * 127 * dim**0.5
    assert bool((upper - lower <= 2.06 * radius[..., None])[:, seen].all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_integers_are_exact(dtype):
    """Bounds are tight for keys that int8 holds and queries that 15 bits hold, so that hardly an error hides what the parts
    make of them."""
    index_k = torch.randint(-127, 128, (256, 1, 128)).float()
    index_k[:, :, 0] = 127
    index_q = torch.randint(-255, 256, (3, 4, 128)).to(dtype)
    seqs = laid_out((3,), (256,))
    lower, upper, _ = bounds_of(index_q, Int8.quantize(index_k.half()), seqs, 128)
    best = block_maxima(index_q, index_k, seqs, 128)
    assert bool(((lower <= best) & (best <= upper)).all())
    assert bool((upper - lower <= 2e-4 * index_q.double().norm(dim=-1).t()[..., None] * 127 * 128**0.5).all())


@pytest.mark.parametrize("page_size", [0, 16, 64])
def test_errors_have_strides_of_their_own(page_size):
    """Bounds are those of errors that lie as scales do, which `Int8` allows, and read nothing beside them."""
    k_lens = (200, 130)
    index_k = (torch.randn(330, 2, 64) * torch.rand(330, 2, 1)).half()
    index_q = torch.randn(2, 4, 64).half()
    seqs, table = laid_out((1, 1), k_lens), None
    if page_size:
        pages = paged(index_k, k_lens, page_size)
        index_k, table = pages.keys.nan_to_num(), pages.page_table
    coarse = Int8.quantize(index_k)
    wide = torch.full((*coarse.error.shape[::-1], 3), NAN, dtype=torch.bfloat16)
    wide[..., 1] = coarse.error.permute(*range(coarse.error.dim())[::-1])
    apart = Int8(coarse.data, coarse.scale, wide[..., 1].permute(*range(coarse.error.dim())[::-1]))
    results = []
    for keys in (coarse, apart):
        keys = PagedIndexKeys(keys, table, torch.tensor(k_lens, dtype=torch.int32)) if page_size else keys
        lower, upper, visible = bounds_of(index_q, keys, seqs, 32)
        seen = torch.arange(lower.shape[2]) < visible[:, None]
        results.append(torch.stack((lower, upper))[:, :, seen])
    assert torch.equal(*results)


def test_queries_out_of_range():
    index_k = torch.randn(200, 1, 64).bfloat16()
    rows = torch.randn(1, 11, 64)
    for head, size in enumerate((0.0, 1e-42, 1e-38, 1e-30, 1e-12, 1e12, 1e30, 2.0**107, 2.0**112)):
        rows[:, head] *= size
    rows[:, 8, 0] = 2.0**111  # from here on no integers
    rows[:, 9, 3], rows[:, 10, 5] = NAN, INF
    index_q = rows.bfloat16()
    seqs = laid_out((1,), (200,))
    lower, upper, _ = bounds_of(index_q, Int8.quantize(index_k), seqs, 64)
    best = block_maxima(index_q, index_k, seqs, 64)
    assert bool(((lower <= best) & (best <= upper))[:9].all())
    assert bool((upper - lower < 0.3 * index_q[0, :, None].double().norm(dim=-1, keepdim=True))[3:8].all())
    assert bool((lower[8:] == -INF).all())
    assert bool((upper[8:] == INF).all())


def test_keys_without_a_score():
    """A block of NaN alone has none; beside other keys NaN does not count; an infinite error bounds nothing."""
    index_k = torch.randn(4 * 64, 1, 64)
    index_k[64:128] = NAN
    index_k[130:150, :, 3] = NAN
    index_k[200, :, 7] = INF
    index_q = torch.randn(1, 4, 64).half()
    lower, upper, _ = bounds_of(index_q, Int8.quantize(index_k.half()), laid_out((1,), (256,)), 64)
    assert bool((lower[..., 1] == -INF).all())
    assert bool((upper[..., 1] == -INF).all())
    assert bool(lower[..., 0].isfinite().all())
    assert bool(lower[..., 2].isfinite().all())
    assert bool(upper[..., :3:2].isfinite().all())
    assert bool((upper[..., 3] == INF).all())


ROWS = (((5, 3), (300, 150), 3, 1, 64, 128, 64), ((8,), (260,), 4, 2, 32, 20, 0))  # as SHAPES: of 15 and of 16 rows


@pytest.mark.parametrize("kind", ["random", "tied", "nan and inf"])
@pytest.mark.parametrize("shape", SHAPES + ROWS)
def test_keys_with_the_best_score_are_kept(shape, kind):
    """The words keep every key that has the best score of a row and block of a tile, and of random keys few others."""
    from openmsa.primitives.rows import Tile

    q_lens, k_lens, heads, key_heads, dim, block_size, page_size = shape
    seqs, tile, group = laid_out(q_lens, k_lens), Tile.of(block_size), heads // key_heads
    index_k, index_q = torch.randn(sum(k_lens), key_heads, dim), torch.randn(sum(q_lens), heads, dim)
    if kind == "tied":  # exact in int8 or not, with zeros of both signs
        index_k = index_k[torch.arange(len(index_k)) % 5] * (torch.arange(len(index_k)) % 3 - 1)[:, None, None]
        index_q[0] = 0
    elif kind == "nan and inf":
        index_k[torch.rand(len(index_k)) < 0.1, :, 0], index_k[torch.rand(len(index_k)) < 0.05, :, 1] = NAN, INF
        index_q[-1, 0, 0], index_q[0, -1, 1] = NAN, INF
    index_k, index_q = index_k.half(), index_q.half()
    keys = coarse = Int8.quantize(index_k)
    if page_size:
        pages = paged(index_k, k_lens, page_size)
        keys = PagedIndexKeys(Int8.quantize(pages.keys), pages.page_table, pages.seq_lens)
    candidates = bounds_and_candidates(index_q, keys, seqs, block_size)[3]
    flags = flagged(candidates, seqs, heads, key_heads, block_size)
    kept = possible = 0
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        for row in range((q1 - q0) * group):
            t, seen = row // group, min(offset + row // group + 1, k_len)
            for h in range(key_heads):
                scores = (index_k[k0 : k0 + seen, h].double() @ index_q[q0 + t, h * group + row % group].double()).float()
                scores = scores.nan_to_num(-INF, INF, -INF)
                for i in range(tile.count(-(-seen // block_size))):
                    start = i * tile.keys if tile.parts == 1 else i // 2 * block_size + i % 2 * (block_size - tile.keys)
                    for first in range(start, min(start + tile.keys, seen), tile.tile // tile.sub):
                        stop = min(first + min(tile.tile // tile.sub, tile.keys), start + tile.keys, seen)
                        here = flags[b * key_heads + h, i, row, first - start : stop - start]
                        best = scores[first:stop].max()
                        assert bool(here[(scores[first:stop] == best) & (best > -INF)].all())
                        kept, possible = kept + int(here.sum()), possible + len(here)
                    assert not bool(flags[b * key_heads + h, i, row, tile.keys :].any())
    assert coarse.error.isfinite().all() or kind == "nan and inf"
    assert kind != "random" or kept < 0.25 * possible


def listed(ids, counts, num_blocks):
    """Turns ascending lists of ids, whose first `counts` [total_q, heads] count, into flags [heads, total_q, num_blocks]."""
    ids = ids.view(*counts.shape, num_blocks).transpose(0, 1)
    held = torch.arange(num_blocks) < counts.t()[..., None]
    assert bool((ids.diff(dim=-1)[held[..., 1:]] > 0).all())
    return torch.zeros(ids.shape, dtype=torch.int32).scatter_add(-1, ids.clamp(max=num_blocks - 1).long(), held.int()) > 0


@pytest.mark.parametrize(
    ("shape", "opened"),
    [*itertools.product(SHAPES, ("least", "some", "all", "one sequence")), *((shape, "some") for shape in ROWS)],
)
def test_open_blocks_are_rescored_and_no_others(shape, opened):
    """Exactly the open blocks are rescored, by one program a row and by more programs than it has open blocks, and with the
    same scores whether only keys that can be a block's best are read or all. The best of them are selected."""
    from openmsa.block_topk import reference
    from openmsa.block_topk import triton_certified as kernels

    q_lens, k_lens, heads, key_heads, dim, block_size, page_size = shape
    seqs = laid_out(q_lens, k_lens)
    index_k = torch.randn(sum(k_lens), key_heads, dim).half()
    index_q = torch.randn(sum(q_lens), heads, dim).half()
    num_blocks = seqs.num_blocks(block_size)
    visible = seqs.visible_blocks(len(index_q), block_size)
    lower = torch.randperm(heads * len(index_q) * num_blocks).view(heads, len(index_q), num_blocks).float()
    upper = lower + {"least": 0.0, "some": 0.4 * lower.numel()}.get(opened, 2.0 * lower.numel())
    if opened == "one sequence":
        last = torch.arange(len(index_q)) < len(index_q) - q_lens[-1]
        upper[:, last] = lower[:, last]
    free = (torch.arange(num_blocks) < visible[:, None] - 1).expand_as(lower)
    highest = lower.masked_fill(~free, -INF).topk(3, -1).values
    at_least, at_most = free & (upper >= highest[..., 1:2]), free & (upper > highest[..., 2:])
    counts = (visible[:, None] - 1).clamp(min=0).expand(-1, heads).int().contiguous()

    rescored, ids = torch.full_like(counts, -7), torch.full((counts.numel() * num_blocks,), 1 << 30, dtype=torch.int32)
    kernels.settle(torch.stack((lower, upper)), visible, ids, rescored, 2, 0, 1, False)
    is_open = listed(ids, rescored, num_blocks)
    assert bool((at_least <= is_open).all() & (is_open <= at_most).all())
    if opened in ("least", "all"):
        assert torch.equal(rescored, counts.clamp(max=2) if opened == "least" else counts)

    best = block_maxima(index_q, index_k, seqs, block_size).float()
    keys = paged(index_k, k_lens, page_size) if page_size else index_k
    coarse = Int8.quantize(keys.keys if page_size else index_k)
    unknown = replace(coarse, error=torch.full_like(coarse.error, INF))
    if page_size:
        coarse, unknown = (PagedIndexKeys(x, keys.page_table, keys.seq_lens) for x in (coarse, unknown))
    candidates, every = (bounds_and_candidates(index_q, x, seqs, block_size)[3] for x in (coarse, unknown))
    held = torch.arange(num_blocks) < rescored[..., None]
    results = []
    for resident, some in ((0, candidates), (100, candidates), (100, every)):
        scores = torch.full(held.shape, NAN)
        arguments = (*taken(keys, seqs), block_size, num_blocks, ids, rescored, some, scores, False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "rescore_config", lambda *_, n=resident: kernels.RescoreConfig(3, n))
            kernels.rescore(index_q, *arguments)
        expected = best.transpose(0, 1).gather(-1, ids.view_as(held).clamp(max=num_blocks - 1).long())
        torch.testing.assert_close(scores[held], expected[held], rtol=1e-3, atol=1e-3)
        assert bool(scores[~held].isnan().all())
        results.append(scores[held])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])

    blocks = torch.full((len(index_q), heads, 3), -7, dtype=torch.int32)
    kernels.choose(ids, scores, rescored, visible, num_blocks, 0, 1, blocks, False)
    exact = torch.full(held.shape, -INF)
    exact.transpose(0, 1)[is_open] = scores.transpose(0, 1)[held.transpose(0, 1)]
    assert torch.equal(blocks, reference.select_from_scores(exact.transpose(0, 1), 3, visible, 0, 1))


@pytest.mark.parametrize("count", [0, 1, 5, 63, 64, 65, 190])
def test_the_best_open_blocks_are_chosen(count):
    """The best are chosen of few and of many open blocks, with ties and scores of -inf, and with forced blocks around them."""
    from openmsa.block_topk import reference
    from openmsa.block_topk import triton_certified as kernels

    num_blocks, heads, seen = 200, 3, torch.tensor([196, 200], dtype=torch.int32)
    ids = torch.stack([torch.randperm(190)[:count].sort().values + 2 for _ in range(2 * heads)]).view(2, heads, count).int()
    scores = torch.randint(-3, 4, (2, heads, count)).float()
    scores[scores == -3] = -INF
    held_ids, held = torch.full((2, heads, num_blocks), 1 << 30, dtype=torch.int32), torch.full((2, heads, num_blocks), NAN)
    held_ids[..., :count], held[..., :count] = ids, scores
    blocks, counts = torch.full((2, heads, 16), -7, dtype=torch.int32), torch.full((2, heads), count, dtype=torch.int32)
    kernels.choose(held_ids, held, counts, seen, num_blocks, 2, 3, blocks, False)
    exact = torch.full((2, heads, num_blocks), -INF).scatter(-1, ids.long(), scores).transpose(0, 1)
    assert torch.equal(blocks, reference.select_from_scores(exact, 16, seen, 2, 3))


def test_equal_scores_open_every_block():
    from openmsa.block_topk import triton_certified, triton_select

    index_k = torch.randn(1, 1, 64).half().expand(40 * 32, 1, 64).contiguous()
    index_q = torch.randn(1, 4, 64).half()
    arguments = laid_out((1,), (40 * 32,)), 32, 5, 1, 1
    blocks, rescored = triton_certified.select_blocks(index_q, CertifiedKeys.quantize(index_k), *arguments)
    assert torch.equal(blocks, triton_select.select_blocks(index_q, index_k, *arguments))
    assert rescored.tolist() == [[38] * 4]


def test_configurations():
    from openmsa.block_topk.triton_bounds import bounds_config
    from openmsa.block_topk.triton_certified import RescoreConfig, rescore_config
    from openmsa.primitives.rows import Tile
    from openmsa.runtime.devices import COMPILE_TARGETS

    tile = Tile.of(128)
    for device in COMPILE_TARGETS.values():
        for dim in (16, 64, 128, 256):
            chosen = rescore_config(device, dim, indirect=False)
            buffers = chosen.num_stages - (device.arch not in (90, 100))
            assert chosen.resident * (buffers * 64 + 16) * 2 * dim <= device.shared_bytes
            for rows, held in ((1, 4), (4, 4), (5, 8), (16, 16)):
                assert bounds_config(device, rows, dim, tile, indirect=True, tma=device.has_tma).rows == held
    hopper = COMPILE_TARGETS[90]
    assert rescore_config(hopper, 128, indirect=False) == RescoreConfig(3, 4)
    assert rescore_config(hopper, 128, indirect=True) == RescoreConfig(5, 4)
    assert rescore_config(COMPILE_TARGETS[120], 256, indirect=False) == RescoreConfig(3, 1)
    assert [RescoreConfig(3, 4).shares(rows, 1024, tile, hopper) for rows in (1, 4, 128, 1 << 12)] == [128, 128, 5, 1]
    assert RescoreConfig(3, 4).shares(4, 10, tile, hopper) == 2


def test_words_of_candidates():
    """The words take a byte for each thread and eight rows: two bytes for 16 rows."""
    from openmsa.block_topk.triton_bounds import Words
    from openmsa.primitives.rows import Tile

    tile = Tile.of(128)
    assert [Words.of(rows, tile).bytes(tile, 10) for rows in (1, 4, 8, 9, 16)] == [1280, 1280, 1280, 2560, 2560]
    assert Words.of(4, Tile.of(32)).bytes(Tile.of(32), 10) == 3 * 128
    assert Words.of(4, Tile.of(256)).bytes(Tile.of(256), 10) == 20 * 128
    assert Words.of(4, Tile.of(20)).bytes(Tile.of(20), 10) == 10 * 64
