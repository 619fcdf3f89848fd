# SPDX-License-Identifier: MIT
"""`block_scores` on a CPU takes products of cache-sized tiles, skips unseen tiles, and masks the diagonal alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmsa.block_scores import cpu_int8, cpu_products
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.kv_cache.rows import rows_of
from openmsa.kv_cache.sequence_rows import Rows
from openmsa.primitives.cpu_rows import Span, reads
from openmsa.runtime.matmul import (
    CONVERTED_ELEMENTS,
    FEW_ROWS_STEP,
    converted,
    is_alone,
    keys_go_left,
    matmul_nt,
    pad_few,
    products_few,
    products_keys_left,
)
from openmsa.types import Layout, wide_dtype

TILE_ROWS, TILE_KEYS = 512, 1024  # products of a tile: 2 MB in float32, about two cores' L2
FEW_ROWS_ELEMENTS = 1 << 19  # few rows: elements of the keys of all heads that a thread multiplies at a time, about an L2
KEYS_LEFT_ELEMENTS = 1 << 23  # few rows, keys as the left factor: the same of all threads, whose products fill a cache
POOL_PAGES = 2  # A pool is scored where it lies if it has at most so many pages for each one that is wanted.
MIN_ROWS = 16  # below about 12 rows a product takes another kernel, which rounds differently (see `matmul_nt`)


def block_scores(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    scores: Tensor | None = None,
) -> Tensor:
    """See `openmsa.block_scores.block_scores`."""
    found = _score(index_q, index_k, seqs, block_size, nan_is_lowest=False)
    lost = found.isnan()
    if bool(lost.any()):  # rare: all is scored again, dropping single products, which may round the others differently
        found = torch.where(lost, _score(index_q, index_k, seqs, block_size, nan_is_lowest=True), found)
    return found if scores is None else scores.copy_(found[..., : scores.shape[2]])


def _score(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    seqs: Layout,
    block_size: int,
    nan_is_lowest: bool,
) -> Tensor:
    total_q, heads, _ = index_q.shape
    pool = index_k.keys if isinstance(index_k, PagedIndexKeys) else index_k
    key_heads = pool.shape[1]
    group = heads // key_heads
    dtype = wide_dtype(index_q)
    scores = torch.full((heads, total_q, seqs.num_blocks(block_size)), -torch.inf, dtype=dtype, device="cpu")
    # Few rows are a property of the whole call. Each token has the scores that it has alone, so query chunks change nothing.
    few = seqs.longest_q * group < MIN_ROWS
    tile_rows, tile_keys = (32, 256) if dtype == torch.float64 else (TILE_ROWS, TILE_KEYS)
    tile_tokens = 1 if few else max(1, tile_rows // group)
    tile_keys = tile_keys // block_size * block_size
    compiled = reads(cpu_products.SOURCE, index_q, pool)
    spans: list[Span] = []
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        pages = index_k.page_table[b] if isinstance(index_k, PagedIndexKeys) else None
        keys = Rows(pool, k0, pages, dtype)
        if compiled:
            spans.append(Span(q0, q1, offset, keys, k_len))
            continue
        if few and not nan_is_lowest:
            for t, end in enumerate(range(offset + 1, offset + 1 + q1 - q0), q0):
                end = min(end, k_len)  # keys that the query sees
                if end > 0:
                    q = rows_of(index_q, slice(t, t + 1), dtype=dtype)[0].to(dtype).unflatten(0, (key_heads, group))
                    scores[:, t, : -(-end // block_size)] = score_few(q, keys, end, block_size).flatten(0, 1)
            continue
        for key_head in range(key_heads):
            of_group = slice(key_head * group, (key_head + 1) * group)
            for t0 in range(q0, q1, tile_tokens):
                t1 = min(t0 + tile_tokens, q1)
                q = rows_of(index_q, slice(t0, t1), of_group, dtype=dtype).to(dtype).transpose(0, 1)  # [group, tokens, dim]
                position = torch.arange(t0 - q0, t1 - q0, device="cpu") + offset
                end = min(int(position[-1]) + 1, k_len)  # keys that the last query sees
                for first in range(0, end, tile_keys):
                    stop = min(first + tile_keys, end)
                    products = _products(q, keys.span(key_head, first, stop).to(dtype))  # [group, tokens, keys]
                    if nan_is_lowest:
                        products.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                    if stop > int(position[0]) + 1:
                        hidden = torch.arange(first, stop, device="cpu") > position[:, None]
                        products.masked_fill_(hidden, -torch.inf)
                    blocks = slice(first // block_size, -(-stop // block_size))
                    scores[of_group, t0:t1, blocks] = block_max(products, block_size)
    if compiled:
        cpu_products.score(index_q, spans, block_size, scores, few)
    return scores


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns dot products ``[group, tokens, keys]``."""
    group, tokens, dim = q.shape
    if q.dtype == torch.float64:  # serves checks; MKL's float64 rows depend on their neighbours at every size
        return torch.linalg.vecdot(q[:, :, None], k)
    rows, num_keys = q.reshape(group * tokens, dim), k.shape[0]
    rows, k = (torch.nn.functional.pad(x, (0, 0, 0, MIN_ROWS - len(x))) if len(x) < MIN_ROWS else x for x in (rows, k))
    return matmul_nt(rows, k)[: group * tokens, :num_keys].reshape(group, tokens, num_keys)


def score_few(q: Tensor, keys: Rows, end: int, block_size: int) -> Tensor:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, all of which the rows q ``[heads, rows, dim]`` see."""
    heads, rows, dim = q.shape
    if (found := cpu_products.score_few(q, keys, end, block_size)) is not None:
        return found
    if cpu_int8.serves(q, keys, end):
        return cpu_int8.block_maxima(q, keys, end, block_size)
    left = isinstance(keys.rows, Tensor) and keys_go_left(q, keys.rows, end)
    q = torch.nn.functional.pad(q, (0, 0, 0, int(rows == 1))) if left else pad_few(q)
    if (pages := _whole_pool(keys, end, block_size)) is not None:
        return _score_pool(q, keys, pages, end, block_size, left)[:, :rows]
    unit = math.lcm(block_size, FEW_ROWS_STEP)
    most = _at_a_time(keys.rows.dtype == q.dtype)
    if left:  # Keys with gaps, and of pages, are copied.
        in_place = isinstance(keys.rows, Tensor) and keys.pages is None and keys.rows.is_contiguous()
        most = KEYS_LEFT_ELEMENTS if in_place else CONVERTED_ELEMENTS
    tiles = max(1, round(end / (max(1, most // (heads * dim * unit)) * unit)))
    tile = -(-end // (tiles * unit)) * unit
    parts = []
    for first in range(0, end, tile):
        k = keys.heads(first, min(first + tile, end))  # [heads, keys, dim]
        parts.append(block_max(products_keys_left(q, k) if left else products_few(q, k), block_size))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2))[:, :rows]


def _at_a_time(wide: bool) -> int:
    """Returns how many elements of keys are multiplied at a time, as they are stored or converted."""
    return FEW_ROWS_ELEMENTS * torch.get_num_threads() if wide else CONVERTED_ELEMENTS


def _whole_pool(keys: Rows, end: int, block_size: int) -> list[int] | None:
    """Returns the pages of the first `end` keys, or None. It returns them where copying them takes longer than scoring the pool
    in place, from the first of them to the last."""
    pool, size = keys.rows, keys.rows.shape[-2]
    if (
        keys.pages is None
        or not isinstance(pool, Tensor)
        or not pool.is_contiguous()
        or size % math.lcm(block_size, FEW_ROWS_STEP)
    ):
        return None
    pages: list[int] = keys.pages[: -(-end // size)].tolist()
    span = max(pages) - min(pages) + 1
    return pages if span <= POOL_PAGES * len(pages) and len(set(pages)) == len(pages) else None


def _score_pool(q: Tensor, keys: Rows, pages: list[int], end: int, block_size: int, left: bool) -> Tensor:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, which lie in these pages, each once. left: whether keys
    are the left factor."""
    (heads, rows, dim), pool = q.shape, keys.rows
    assert isinstance(pool, Tensor)
    size, first, last = pool.shape[2], min(pages), max(pages) + 1
    most = KEYS_LEFT_ELEMENTS if left else _at_a_time(pool.dtype == q.dtype or is_alone(q))
    tile = max(1, most // (heads * size * dim))
    tile = min(tile, last - first)
    at_once = left or is_alone(q)  # As where pages are copied: where they lie must not change a bit of a score.
    each = q if at_once else q.expand(tile, heads, rows, dim).reshape(-1, rows, dim)  # [pages * heads, rows, dim]
    parts = []
    for page in range(first, last, tile):
        k = pool[page : min(page + tile, last)].flatten(0, 1)  # [pages * heads, size, dim]
        if at_once:
            together = k.flatten(0, 1)[None]
            products = products_keys_left(q, together) if left else products_few(q, together)
            products = products.unflatten(2, (-1, size)).permute(2, 0, 1, 3)
        else:
            k = k if k.dtype == q.dtype else converted(k, q.dtype)
            products = torch.bmm(each[: k.shape[0]], k.transpose(1, 2)).view(-1, heads, rows, size)
        if end % size and page <= pages[-1] < page + tile:
            products[pages[-1] - page, ..., end % size :] = -torch.inf
        parts.append(_maxima(products.unflatten(3, (-1, block_size))))
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    found = found.index_select(0, torch.tensor(pages, device="cpu") - first)  # [pages, heads, rows, blocks of a page]
    return found.permute(1, 2, 0, 3).flatten(2)[..., : -(-end // block_size)]


def block_max(products: Tensor, block_size: int) -> Tensor:
    """Takes the maximum over each block: ``[..., keys] -> [..., blocks]``; the last block may be short."""
    full = products.shape[2] // block_size * block_size
    blocks = _maxima(products[..., :full].unflatten(2, (-1, block_size)))
    return blocks if full == products.shape[2] else torch.cat((blocks, products[..., full:].amax(2, keepdim=True)), 2)


def _maxima(products: Tensor) -> Tensor:
    """Takes the maximum over the last dimension. Where neighbours in it lie apart, halves of it are compared first, which takes
    a quarter of the time of a reduction."""
    while products.stride(-1) > 1 and products.shape[-1] > 8 and products.shape[-1] % 2 == 0:
        products = torch.maximum(*products.chunk(2, -1))
    return products.amax(-1)
