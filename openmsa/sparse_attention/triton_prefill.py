# SPDX-License-Identifier: MIT
"""`sparse_attention` for many queries, in Triton: union tiles where neighbours select alike, KV-outer for the rest.

The choice is made on the device, tile by tile; nothing is read on the host, and every size follows from shapes, `Layout`
bounds and arguments. See triton_lists.py, triton_union.py and triton_outer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.stored import out_dtype
from openmsa.runtime.devices import facts
from openmsa.runtime.variants import Variant
from openmsa.sparse_attention.triton_config import (
    PrefillConfig,
    few_queries,
    padded_dim,
    power_of_two,
    prefill_config,
    union_limit,
)
from openmsa.sparse_attention.triton_expand import expand, expands
from openmsa.sparse_attention.triton_few import UNIT_FIELDS, attend_few, few_lists, few_units
from openmsa.sparse_attention.triton_keys import Keys, Queries, formats
from openmsa.sparse_attention.triton_lists import ITEM_FIELDS, TILE_FIELDS, bucket_offsets, fill_lists, tile_lists
from openmsa.sparse_attention.triton_outer import attend_outer, combine_outer
from openmsa.sparse_attention.triton_union import attend_union
from openmsa.sparse_attention.triton_variants import prefill_variants
from openmsa.types import Layout

WORKSPACE_BYTES = 2 << 30  # partials held at a time
PATHS = ("auto", "few", "union", "outer")
SCAN_STEP = 2048


def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    *,
    path: str = "auto",
    partial_dtype: torch.dtype | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    config: PrefillConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `openmsa.sparse_attention.sparse_attention`.

    path:             "union" or "outer" sends every tile to that kernel; "few" is KV-outer in the form for few queries (plain
                      tensors only); "auto": each where it is faster.
    partial_dtype:    of KV-outer's partial outputs; None: the output's.
    workspace_bytes:  bound on the partial outputs held at a time (lists and lse add a few percent), at least one tile's; and on
                      the copies of stored keys as 16-bit numbers ("auto", many queries).
    config:           None: `prefill_config`.

    A key that a query does not read gets weight 0 but may be multiplied by it: K and V rows at positions that some query of the
    same sequence reads must be finite. All others may hold NaN.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    has_float8 = facts(q.device).arch >= 90
    keys, queries = Keys.of(k, v, seqs, block_size, has_float8), Queries.of(q, has_float8)
    plain = isinstance(q, Tensor) and keys.stored is None
    if path == "few" and not plain:
        raise ValueError("path must be 'auto', 'union' or 'outer' for stored queries or keys, got 'few'")
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if out.numel() == 0 or keys.k.numel() == 0 or keys.total == 0:
        out.zero_(), lse.fill_(-torch.inf)
        return (out, lse) if return_lse else out
    num_buckets = -(-keys.total // block_size) + seqs.batch - 1
    if path == "auto" and expands(keys, queries.data.dtype, q.shape[0] * blocks.shape[2] / num_buckets, workspace_bytes):
        keys = expand(keys, seqs, queries.data.dtype)
    stored = keys.stored is not None and not keys.expanded
    if path == "auto" and stored and not keys.k.dtype == queries.data.dtype == torch.float8_e4m3fn:
        path = "outer"  # which converts a block once; the union kernel loses more by converting than it gains
    if config is None:
        major = torch.cuda.get_device_capability(q.device)[0] if q.device.type == "cuda" else 9
        bytes_ = 2 if stored else keys.k.element_size()
        config = prefill_config(q.shape[2], q.shape[1] // keys.heads, block_size, major, bytes_, stored)
    # Masked logits are -inf times the scale and must stay -inf: a scale of 0 becomes one too small to matter.
    scale, negative = max(abs(softmax_scale) * math.log2(math.e), 1e-37), softmax_scale < 0
    partial_dtype = partial_dtype or out.dtype
    if path == "auto" and plain and few_queries(q.shape[0], q.shape[2], blocks.shape[2], keys.heads, num_buckets):
        path = "few"
    if path == "few":
        _few(queries, blocks, seqs, keys, block_size, num_buckets, config, partial_dtype, out, lse, scale, negative)
    else:
        plan = _Plan.of(q.shape, blocks, seqs, keys, block_size, num_buckets, config, path, partial_dtype, workspace_bytes)
        lists = _build_lists(blocks, seqs, keys, plan, config)
        _union(queries, seqs, keys, plan, config, lists, out, lse, scale, negative)
        if plan.has_outer:
            _outer(queries, seqs, keys, plan, config, lists, out, lse, scale, negative)
    return (out, lse) if return_lse else out


def compile_variants(arch: int) -> Iterator[Variant]:
    """See `openmsa.runtime.variants`."""
    return prefill_variants(arch)


@dataclass(frozen=True)
class _Plan:
    """Sizes of one call, all known on the host."""

    group: int
    parts: int  # programs that share the heads of one group
    topk: int
    block_size: int
    num_tiles: int
    union_limit: int
    capacity: int
    has_outer: bool  # False: no tile can select more blocks than the limit
    num_chunks: int
    chunk_tiles: int
    chunk_entries: int
    num_buckets: int
    item_bound: int
    cuts: int
    partial_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        shape: torch.Size,
        blocks: Tensor,
        seqs: Layout,
        keys: Keys,
        block_size: int,
        num_buckets: int,
        config: PrefillConfig,
        path: str,
        partial_dtype: torch.dtype,
        workspace_bytes: int,
    ) -> _Plan:
        total_q, num_q_heads, head_dim = shape
        topk, tokens = blocks.shape[2], config.union_tokens
        group = num_q_heads // keys.heads
        most = min(tokens * topk, seqs.num_blocks(block_size))
        cuts = -(-block_size // config.outer_keys)
        num_tiles = -(-total_q // tokens) + seqs.batch - 1
        tile_bytes = tokens * num_q_heads * topk * cuts * head_dim * partial_dtype.itemsize
        num_chunks = -(-num_tiles // max(1, workspace_bytes // tile_bytes))
        chunk_tiles = -(-num_tiles // num_chunks)
        chunk_entries = chunk_tiles * tokens * topk
        # Not of the chunk: the workspace must not change which kernel serves a tile.
        limit = {"union": most, "outer": 0}.get(path, union_limit(config, topk, total_q * topk / num_buckets))
        return cls(
            group=group,
            parts=-(-group // config.heads),
            topk=topk,
            block_size=block_size,
            num_tiles=num_tiles,
            union_limit=limit,
            capacity=max(1, min(limit, most)),
            has_outer=limit < most,
            num_chunks=num_chunks,
            chunk_tiles=chunk_tiles,
            chunk_entries=chunk_entries,
            num_buckets=num_buckets,
            item_bound=chunk_entries // config.outer_item + min(num_buckets, chunk_entries),
            cuts=cuts,
            partial_dtype=partial_dtype,
        )


def _build_lists(blocks: Tensor, seqs: Layout, keys: Keys, plan: _Plan, config: PrefillConfig) -> dict[str, Tensor | None]:
    """Union lists of the tiles that stay together, entries and items of the others."""

    def empty(*shape: int) -> Tensor:
        return blocks.new_empty(shape)

    tile_heads = (plan.num_tiles, keys.heads)
    lists: dict[str, Any] = {"tiles": empty(plan.num_tiles, TILE_FIELDS), "union_sizes": empty(*tile_heads, 2)}
    lists |= {name: empty(*tile_heads, plan.capacity) for name in ("union_ids", "union_rows", "union_bits")}
    lists |= dict.fromkeys(("counts", "partly", "ranks"))
    segments = plan.num_chunks * keys.heads
    if plan.has_outer:
        lists["counts"], lists["partly"] = blocks.new_zeros(2, segments, plan.num_buckets)
        lists["ranks"] = empty(blocks.shape[0], keys.heads, plan.topk)
    strides = _block_strides(blocks)
    slots, tokens = power_of_two(plan.topk), config.union_tokens
    grid = (plan.num_tiles * keys.heads,)
    tile_lists[grid](
        blocks,
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        keys.table,
        lists["tiles"],
        lists["union_sizes"],
        lists["union_ids"],
        lists["union_rows"],
        lists["union_bits"],
        lists["counts"],
        lists["partly"],
        lists["ranks"],
        *strides,
        *keys.table_strides,
        keys.heads,
        seqs.batch,
        (seqs.batch - 1).bit_length(),
        plan.num_buckets,
        plan.chunk_tiles,
        keys.num_pages,
        plan.union_limit,
        plan.capacity,
        TOPK=plan.topk,
        SLOTS=slots,
        TOKENS=tokens,
        BLOCK=plan.block_size,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        HAS_OUTER=plan.has_outer,
        num_warps=_list_warps(tokens * slots),
    )
    if not plan.has_outer:
        return lists
    lists |= {name: empty(segments, plan.num_buckets) for name in ("entry_offsets", "item_offsets")}
    lists |= {"num_items": empty(segments), "entries": empty(segments, plan.chunk_entries)}
    lists["items"] = empty(segments, plan.item_bound, ITEM_FIELDS)
    lists["slots"] = blocks.new_empty((blocks.shape[0], keys.heads), dtype=torch.int64)
    bucket_offsets[(segments,)](
        lists["counts"],
        lists["entry_offsets"],
        lists["item_offsets"],
        lists["num_items"],
        plan.num_buckets,
        ITEM=config.outer_item,
        STEP=SCAN_STEP,
        num_warps=8,
    )
    fill_lists[grid](
        blocks,
        seqs.cu_seqlens_k,
        *(lists[name] for name in ("tiles", "union_sizes", "ranks", "counts", "partly", "entry_offsets", "item_offsets")),
        lists["entries"],
        lists["items"],
        lists["slots"],
        *strides,
        keys.heads,
        plan.num_buckets,
        plan.chunk_tiles,
        plan.chunk_entries,
        plan.item_bound,
        TOPK=plan.topk,
        SLOTS=slots,
        TOKENS=tokens,
        BLOCK=plan.block_size,
        ITEM=config.outer_item,
        num_warps=_list_warps(tokens * slots),
    )
    return lists


def _block_strides(blocks: Tensor) -> tuple[int, int, int]:
    return blocks.stride(0), blocks.stride(1) if blocks.shape[1] > 1 else 0, blocks.stride(2)


def _list_warps(entries: int) -> int:
    return min(8, max(1, entries // 256))


def _union(q, seqs, keys, plan, config, lists, out, lse, scale, negative) -> None:
    by_row = keys.by_row and plan.block_size % config.union_keys == 0
    dim = q.data.shape[2]
    dim_padded = padded_dim(dim, keys.k.dtype)
    k_tma, v_tma = _descriptors(keys, config, dim_padded) if by_row else (None, None)
    tma = k_tma is not None
    attend_union[(plan.num_tiles * keys.heads * plan.parts,)](
        q.data,
        keys.k,
        keys.v,
        k_tma,
        v_tma,
        out,
        lse,
        seqs.cu_seqlens_k,
        keys.table,
        lists["tiles"],
        lists["union_sizes"],
        lists["union_ids"],
        lists["union_rows"],
        lists["union_bits"],
        scale,
        keys.heads,
        keys.num_pages,
        plan.capacity,
        *q.data.stride(),
        *keys.strides(keys.k),
        *keys.strides(keys.v),
        *keys.table_strides,
        *keys.scales(),
        q.factor,
        q.factor_stride,
        GROUP=plan.group,
        HEADS=config.heads,
        PARTS=plan.parts,
        TOKENS=config.union_tokens,
        DIM=dim,
        DIM_PADDED=dim_padded,
        BLOCK=plan.block_size,
        KEYS=config.union_keys,
        PAGE_SIZE=keys.page_size,
        BY_ROW=by_row,
        NEGATIVE=negative,
        **formats(q.data.dtype, keys.k.dtype, keys.scale_modes(), True),
        TMA=tma,
        STAGES=config.union_stages,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )


def _outer(q, seqs, keys, plan, config, lists, out, lse, scale, negative) -> None:
    rows = plan.chunk_tiles * config.union_tokens * keys.heads * plan.topk * plan.cuts * plan.group
    dim = q.data.shape[2]
    o_part = lse.new_empty(rows, dim, dtype=plan.partial_dtype)
    lse_part = lse.new_empty(rows)
    shape = {
        "GROUP": plan.group,
        "HEADS": config.heads,
        "PARTS": plan.parts,
        "TOPK": plan.topk,
        "DIM": dim,
        "DIM_PADDED": padded_dim(dim, keys.k.dtype),
    }
    for i_chunk in range(plan.num_chunks):
        first_tile = i_chunk * plan.chunk_tiles
        tiles = min(plan.chunk_tiles, plan.num_tiles - first_tile)
        if tiles <= 0:
            break
        attend_outer[(plan.item_bound, keys.heads, plan.parts * plan.cuts)](
            q.data,
            keys.k,
            keys.v,
            o_part,
            lse_part,
            seqs.cu_seqlens_q,
            seqs.cu_seqlens_k,
            seqs.q_offset,
            keys.table,
            lists["tiles"],
            lists["entries"],
            lists["items"],
            lists["num_items"],
            scale,
            i_chunk,
            plan.chunk_tiles,
            plan.chunk_entries,
            plan.item_bound,
            keys.heads,
            keys.num_pages,
            *q.data.stride(),
            *keys.strides(keys.k),
            *keys.strides(keys.v),
            *keys.table_strides,
            *keys.scales(),
            q.factor,
            q.factor_stride,
            **shape,
            TOKENS=config.outer_tokens,
            BLOCK=plan.block_size,
            KEYS=config.outer_keys,
            ITEM=config.outer_item,
            PAGE_SIZE=keys.page_size,
            NEGATIVE=negative,
            **formats(q.data.dtype, keys.k.dtype, keys.scale_modes(), False),
            num_warps=config.outer_warps,
        )
        combine_outer[(tiles * keys.heads, plan.parts)](
            o_part,
            lse_part,
            lists["slots"],
            lists["tiles"],
            lists["union_sizes"],
            out,
            lse,
            first_tile,
            0,
            keys.heads,
            **shape,
            TILE_TOKENS=config.union_tokens,
            TOKENS=config.combine_tokens,
            CUTS=plan.cuts,
            num_warps=config.combine_warps,
        )


def _descriptors(keys: Keys, config: PrefillConfig, dim_padded: int) -> tuple[Any, Any]:
    """Of K and V, or None twice."""
    if not config.union_tma:
        return None, None
    both = keys.descriptor(keys.k, config.union_keys, dim_padded), keys.descriptor(keys.v, config.union_keys, dim_padded)
    return (None, None) if None in both else both


def _few(q, blocks, seqs, keys, block_size, num_buckets, config, partial_dtype, out, lse, scale, negative) -> None:
    """Lists, units, attention, merge. A list has room for the queries of the longest sequence."""
    (total_q, _, topk), (_, num_q_heads, dim) = blocks.shape, q.data.shape
    group, tokens, room = num_q_heads // keys.heads, config.union_tokens, min(seqs.max_seqlen_q, total_q)
    unit_bound = total_q * topk // tokens + min(num_buckets, total_q * topk)
    counts = blocks.new_zeros(2, keys.heads, num_buckets)
    entries = blocks.new_empty(keys.heads, num_buckets, room)
    units = blocks.new_empty(keys.heads * unit_bound, UNIT_FIELDS + tokens)
    units, unit_entries = units.view(-1).split((units.shape[0] * UNIT_FIELDS, units.shape[0] * tokens))
    num_units = blocks.new_empty(keys.heads, 2)
    slots = blocks.new_empty((total_q, keys.heads), dtype=torch.int64)
    o_part = lse.new_empty(total_q * num_q_heads * topk, dim, dtype=partial_dtype)
    lse_part = lse.new_empty(total_q * num_q_heads * topk)
    starts = (seqs.cu_seqlens_q, seqs.cu_seqlens_k, seqs.q_offset)
    sequences = (keys.heads, seqs.batch, (seqs.batch - 1).bit_length(), num_buckets, room)
    few_lists[((-(-total_q // config.few_tokens) + seqs.batch - 1) * keys.heads,)](
        blocks,
        *starts,
        counts,
        entries,
        slots,
        *_block_strides(blocks),
        *sequences,
        TOPK=topk,
        SLOTS=power_of_two(topk),
        TOKENS=config.few_tokens,
        BLOCK=block_size,
        num_warps=1,
    )
    few_units[(keys.heads, -(-num_buckets // config.few_buckets))](
        *starts,
        keys.table,
        counts,
        entries,
        units,
        unit_entries,
        num_units,
        *keys.table_strides,
        *sequences,
        unit_bound,
        keys.num_pages,
        TOKENS=tokens,
        BLOCK=block_size,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        STEP=SCAN_STEP,
        BUCKETS=config.few_buckets,
        AT_ONCE=16,
        num_warps=4,
    )
    by_row = keys.by_row and block_size % config.union_keys == 0
    dim_padded = power_of_two(dim)
    k_tma, v_tma = _descriptors(keys, config, dim_padded) if by_row else (None, None)
    shape = {"GROUP": group, "HEADS": config.heads, "PARTS": -(-group // config.heads), "DIM": dim, "DIM_PADDED": dim_padded}
    shares = -(-config.few_programs * facts(q.data.device).num_sms // (keys.heads * shape["PARTS"]))
    attend_few[(min(shares, unit_bound), keys.heads * shape["PARTS"])](
        q.data,
        keys.k,
        keys.v,
        k_tma,
        v_tma,
        o_part,
        lse_part,
        keys.table,
        units,
        unit_entries,
        num_units,
        scale,
        unit_bound,
        keys.heads,
        keys.num_pages,
        *q.data.stride(),
        *keys.strides(keys.k),
        *keys.strides(keys.v),
        *keys.table_strides,
        **shape,
        TOKENS=tokens,
        TOPK=topk,
        BLOCK=block_size,
        KEYS=config.union_keys,
        PAGE_SIZE=keys.page_size,
        BY_ROW=by_row,
        NEGATIVE=negative,
        TMA=k_tma is not None,
        STAGES=config.union_stages,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )
    combine_outer[(-(-total_q // config.combine_tokens) * keys.heads, shape["PARTS"])](
        o_part,
        lse_part,
        slots,
        None,
        None,
        out,
        lse,
        0,
        total_q,
        keys.heads,
        **shape,
        TOPK=topk,
        TILE_TOKENS=config.combine_tokens,
        TOKENS=config.combine_tokens,
        CUTS=1,
        num_warps=2 * config.combine_warps,
    )
