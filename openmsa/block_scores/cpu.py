# SPDX-License-Identifier: MIT
"""`block_scores` on a CPU takes products of cache-sized tiles, skips unseen tiles, and masks the diagonal alone."""

from __future__ import annotations

import torch
from torch import Tensor

from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.kv_cache.rows import Rows, rows_of, wide_dtype
from openmsa.runtime.matmul import matmul_nt
from openmsa.types import Layout

TILE_ROWS, TILE_KEYS = 512, 1024  # products of a tile: 2 MB in float32, about two cores' L2
FEW_ROWS_KEYS = 32768  # few rows: keys are the rows of the product
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
    scores = torch.full((heads, total_q, seqs.num_blocks(block_size)), -torch.inf, dtype=dtype)
    # Few rows are a property of the whole call, and are scored a token at a time, so that query chunks change nothing.
    few = seqs.longest_q * group < MIN_ROWS
    tile_rows, tile_keys = (32, 256) if dtype == torch.float64 else (TILE_ROWS, TILE_KEYS)
    tile_tokens = 1 if few else max(1, tile_rows // group)
    tile_keys = tile_keys // block_size * block_size
    for b, (q0, q1, k0, k_len, offset) in enumerate(seqs.on_host()):
        pages = index_k.page_table[b] if isinstance(index_k, PagedIndexKeys) else None
        keys = Rows(pool, k0, pages, dtype)
        for key_head in range(key_heads):
            of_group = slice(key_head * group, (key_head + 1) * group)
            for t0 in range(q0, q1, tile_tokens):
                t1 = min(t0 + tile_tokens, q1)
                q = rows_of(index_q, slice(t0, t1), of_group, dtype=dtype).to(dtype).transpose(0, 1)  # [group, tokens, dim]
                position = torch.arange(t0 - q0, t1 - q0) + offset
                end = min(int(position[-1]) + 1, k_len)  # keys that the last query sees
                done = 0
                if few and not nan_is_lowest and end >= block_size:
                    done = end // block_size
                    scores[of_group, t0, :done] = _whole_blocks(q[:, 0], keys, key_head, done, block_size)
                for first in range(done * block_size, end, tile_keys):
                    stop = min(first + tile_keys, end)
                    products = _products(q, keys.span(key_head, first, stop).to(dtype))  # [group, tokens, keys]
                    if nan_is_lowest:
                        products.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
                    if stop > int(position[0]) + 1:
                        hidden = torch.arange(first, stop) > position[:, None]
                        products.masked_fill_(hidden, -torch.inf)
                    blocks = slice(first // block_size, -(-stop // block_size))
                    scores[of_group, t0:t1, blocks] = _block_max(products, block_size)
    return scores


def _products(q: Tensor, k: Tensor) -> Tensor:
    """Returns dot products ``[group, tokens, keys]``."""
    group, tokens, dim = q.shape
    if q.dtype == torch.float64:  # serves checks; MKL's float64 rows depend on their neighbours at every size
        return torch.linalg.vecdot(q[:, :, None], k)
    rows, num_keys = q.reshape(group * tokens, dim), k.shape[0]
    rows, k = (torch.nn.functional.pad(x, (0, 0, 0, max(0, MIN_ROWS - x.shape[0]))) for x in (rows, k))
    return matmul_nt(rows, k)[: group * tokens, :num_keys].reshape(group, tokens, num_keys)


def _whole_blocks(q: Tensor, keys: Rows, head: int, num_blocks: int, block_size: int) -> Tensor:
    """Returns scores ``[group, num_blocks]`` of the first blocks, all of whose keys the query ``[group, dim]`` sees."""
    pool = None  # [num_pages, page_size, dim]
    if keys.pages is not None and isinstance(keys.rows, Tensor):
        pool = keys.rows[:, head]
    if keys.pages is not None and pool is not None and _mostly_ours(pool, num_blocks * block_size, block_size):
        everything = Rows(pool.flatten(0, 1)[:, None])
        best = _whole_blocks(q, everything, 0, pool.shape[0] * pool.shape[1] // block_size, block_size)
        of_pages = best.unflatten(1, (pool.shape[0], -1))  # [group, num_pages, blocks a page]
        pages = keys.pages[: -(-num_blocks // of_pages.shape[2])]
        return of_pages.index_select(1, pages).flatten(1)[:, :num_blocks]
    viewed = keys.pages is None and isinstance(keys.rows, Tensor)  # others are copied, fewer at a time, which stay in cache
    tile = (FEW_ROWS_KEYS if viewed else FEW_ROWS_KEYS // 4) // block_size
    parts = []
    for first in range(0, num_blocks, tile):
        stop = min(first + tile, num_blocks)
        rows = keys.span(head, first * block_size, stop * block_size).to(q.dtype)
        parts.append(_block_max_of_few(q, rows, block_size))
    return torch.cat(parts, dim=1)


def _mostly_ours(pool: Tensor, num_keys: int, block_size: int) -> bool:
    """Says whether to score the whole pool where it lies and pick the sequence's scores, which reads each key once."""
    num_pages, page_size, _ = pool.shape
    return page_size % block_size == 0 and pool.is_contiguous() and 2 * num_keys >= num_pages * page_size


def _block_max_of_few(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """Returns block maxima ``[group, blocks]`` of q ``[group, dim]``: keys are the rows of the product, read once, and maxima
    are taken by halves, all lanes at a time."""
    group = q.shape[0]
    if group == 1:
        q = q.expand(2, -1)  # one column would be a matrix-vector product, which is slower
    width, lanes = block_size, len(q)
    best = torch.mm(k, q.t()).view(-1, block_size * lanes)  # [blocks, block_size * lanes]
    while width % 2 == 0:
        width //= 2
        best = torch.maximum(best[:, : width * lanes], best[:, width * lanes :])
    return best.unflatten(1, (width, lanes)).amax(1).t()[:group]


def _block_max(products: Tensor, block_size: int) -> Tensor:
    """Takes the maximum over each block: ``[group, tokens, keys] -> [group, tokens, blocks]``; the last block may be short."""
    full = products.shape[2] // block_size * block_size
    parts = [products[..., :full].unflatten(2, (-1, block_size)).amax(3)] if full else []
    if full < products.shape[2]:
        parts.append(products[..., full:].amax(2, keepdim=True))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
