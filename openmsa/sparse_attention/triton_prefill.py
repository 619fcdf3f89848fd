# SPDX-License-Identifier: MIT
"""`sparse_attention` for many queries, in Triton: union tiles where neighbours select alike, KV-outer for the rest.

The choice is made on the device, tile by tile; nothing is read on the host, and every size follows from shapes, `Layout`
bounds and arguments. See triton_lists.py, triton_union.py and triton_outer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.kv_cache.stored import out_dtype
from openmsa.runtime.devices import facts
from openmsa.runtime.integers import next_power_of_two
from openmsa.runtime.launch import launch_kernel, runs_hopper_kernels
from openmsa.sparse_attention import triton_lists
from openmsa.sparse_attention.triton_config import (
    FEW_READERS,
    PrefillConfig,
    few_queries,
    few_union_limit,
    padded_dim,
    prefill_config,
    union_limit,
)
from openmsa.sparse_attention.triton_expand import copies_of, expand, expands
from openmsa.sparse_attention.triton_few import UNIT_FIELDS, attend_few, few_units
from openmsa.sparse_attention.triton_keys import Keys, Queries, formats
from openmsa.sparse_attention.triton_lists import (
    ITEM_FIELDS,
    TILE_FIELDS,
    bucket_offsets,
    fill_lists,
    tile_lists,
)
from openmsa.sparse_attention.triton_outer import attend_outer, combine_outer
from openmsa.sparse_attention.triton_union import attend_union
from openmsa.types import Layout

WORKSPACE_BYTES = 2 << 30  # partials held at a time
PATHS = ("auto", "few", "union", "outer")
SCAN_STEP = 2048
NO_REST, KV_OUTER, FEW = (where.value for where in (triton_lists.NO_REST, triton_lists.KV_OUTER, triton_lists.FEW))


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
                      the copies of stored keys as 16-bit numbers ("auto", many queries; E4M3 keys on Hopper need none).
    config:           None: `prefill_config`.

    A key that a query does not read gets weight 0 but may be multiplied by it: of a block that some query of a sequence reads,
    K and V rows up to the position of the sequence's last query must be finite. All others may hold NaN.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    device = facts(q.device)
    has_float8 = device.arch >= 90
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
    readers = q.shape[0] * blocks.shape[2] / num_buckets
    tiles = (q.shape[2], q.shape[1] // keys.heads, block_size, device.arch // 10)
    tuned = None
    if config is None and path in ("auto", "union"):
        tuned = _tuned(queries, keys, prefill_config(*tiles), block_size)
    copies = None  # of stored keys, for Triton's union kernel: Hopper's own and KV-outer read them as they are
    if path == "auto" and tuned is None and expands(keys, queries.data.dtype, readers, workspace_bytes):
        copies = copies_of(keys, queries.data.dtype)
    stored = keys.stored is not None and tuned is None and copies is None
    if path == "auto" and stored and not keys.k.dtype == queries.data.dtype == torch.float8_e4m3fn:
        path = "outer"  # which converts a block once; the union kernel loses more by converting than it gains
    if config is None:
        config = prefill_config(*tiles, 2 if keys.stored else keys.k.element_size(), stored)
    # Masked logits are -inf times the scale and must stay -inf: a scale of 0 becomes one too small to matter.
    scale, negative = max(abs(softmax_scale) * math.log2(math.e), 1e-37), softmax_scale < 0
    shape = (*q.shape, blocks.shape[2], block_size, num_buckets)
    plan = _Plan.of(shape, seqs, keys, config, path, plain, partial_dtype or out.dtype, workspace_bytes, tuned is not None)
    lists = _build_lists(blocks, seqs, copies or keys, plan, config, tuned is not None or copies is not None)
    if copies is not None:
        expand(keys, copies, seqs, lists["has_union"])
    arguments = (queries, seqs, plan, config, lists, out, lse, scale, negative)
    tma = (None, None)
    if (plan.union_limit >= 0 and tuned is None) or plan.rest == FEW:  # which takes no stored keys, so there are no copies
        tma = _descriptors(copies or keys, config, block_size, q.shape[2])
    if plan.union_limit >= 0 and tuned is not None:
        sizes = (plan.group, plan.num_tiles, plan.capacity)
        tuned(queries, keys, seqs, lists, out, lse, scale, negative, device, config, *sizes)
    elif plan.union_limit >= 0:
        _union(copies or keys, *arguments, *tma)
    if plan.rest == FEW:
        _few(keys, *arguments, *tma)
    elif plan.rest == KV_OUTER:
        _outer(keys, *arguments)
    return (out, lse) if return_lse else out


def _tuned(queries: Queries, keys: Keys, config: PrefillConfig, block_size: int) -> Callable[..., None] | None:
    """The launch of Hopper's own union kernel where it serves, else None. Plain keys never ask for its module."""
    if keys.stored is None or not runs_hopper_kernels(keys.k.device):
        return None
    from openmsa.sparse_attention import gluon_sm90_union_launch

    serves = gluon_sm90_union_launch.serves(facts(keys.k.device), queries, keys, config, block_size)
    return gluon_sm90_union_launch.launch if serves else None


class _Plan(NamedTuple):
    """Sizes of one call, all known on the host."""

    group: int
    parts: int  # programs that share the heads of one group
    topk: int
    block_size: int
    total_q: int
    num_tiles: int
    union_limit: int  # -1: no tile stays together
    capacity: int
    rest: int  # where the other tiles go; NO_REST: no tile can select more blocks than the limit
    num_chunks: int
    chunk_tiles: int
    chunk_entries: int
    num_buckets: int
    item_bound: int
    room: int  # of a list for few queries
    num_units: int  # of all heads, for few queries
    cuts: int
    partial_dtype: torch.dtype

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        seqs: Layout,
        keys: Keys,
        config: PrefillConfig,
        path: str,
        plain: bool,
        partial_dtype: torch.dtype,
        workspace_bytes: int,
        tuned: bool,
    ) -> _Plan:
        """shape: of the queries; topk, block size, buckets. tuned: whether union tiles go to Hopper's own kernel."""
        total_q, num_q_heads, head_dim, topk, block_size, num_buckets = shape
        tokens = config.union_tokens
        group = num_q_heads // keys.heads
        most = min(tokens * topk, seqs.num_blocks(block_size))
        num_tiles = -(-total_q // tokens) + seqs.batch - 1
        readers = total_q * topk / num_buckets
        query_bytes = num_q_heads * topk * head_dim * partial_dtype.itemsize  # of partials, for each cut of a block
        may_be_few = path == "auto" and plain and total_q * query_bytes <= workspace_bytes
        few = path == "few" or (may_be_few and few_queries(total_q, head_dim, topk, keys.heads, num_buckets))
        cuts = 1 if few else -(-block_size // config.outer_keys)
        num_chunks = 1 if few else -(-num_tiles // max(1, workspace_bytes // (tokens * cuts * query_bytes)))
        chunk_tiles = -(-num_tiles // num_chunks)
        chunk_entries = chunk_tiles * tokens * topk
        # Not of the chunk: but for the form for few queries, the workspace must not change which kernel serves a tile.
        scarce = few or (tuned and readers <= FEW_READERS)  # Hopper's kernel walks a wide union in too few programs
        limit = (few_union_limit if scarce else union_limit)(config, topk, readers)
        limit = {"union": most, "outer": 0, "few": -1}.get(path, limit)
        return cls(
            group=group,
            parts=-(-group // config.heads),
            topk=topk,
            block_size=block_size,
            total_q=total_q,
            num_tiles=num_tiles,
            union_limit=limit,
            capacity=max(1, min(limit, most)),
            rest=NO_REST if limit >= most else FEW if few else KV_OUTER,
            num_chunks=num_chunks,
            chunk_tiles=chunk_tiles,
            chunk_entries=chunk_entries,
            num_buckets=num_buckets,
            item_bound=chunk_entries // config.outer_item + min(num_buckets, chunk_entries),
            room=min(seqs.max_seqlen_q, total_q),
            num_units=keys.heads * (total_q * topk // tokens + min(num_buckets, total_q * topk)),
            cuts=cuts,
            partial_dtype=partial_dtype,
        )


def _build_lists(
    blocks: Tensor, seqs: Layout, keys: Keys, plan: _Plan, config: PrefillConfig, flag: bool
) -> dict[str, Tensor | None]:
    """Union lists of the tiles that stay together, lists of the blocks that the others read, all flat. keys: the union
    kernel's. flag: whether `has_union` is wanted."""
    tile_heads, segments = plan.num_tiles * keys.heads, plan.num_chunks * keys.heads
    sizes = {"tiles": plan.num_tiles * TILE_FIELDS, "union_sizes": tile_heads * 2}
    sizes |= dict.fromkeys(("union_ids", "union_rows", "union_bits"), tile_heads * plan.capacity)
    if plan.rest != NO_REST:
        sizes["slots"] = plan.total_q * keys.heads * 2  # of int64
    if plan.rest == FEW:
        sizes["entries"] = keys.heads * plan.num_buckets * plan.room
        sizes |= {"units": plan.num_units * UNIT_FIELDS, "unit_entries": plan.num_units * config.union_tokens}
        sizes["num_units"] = keys.heads * 2
    elif plan.rest == KV_OUTER:
        sizes |= {"entries": segments * plan.chunk_entries, "ranks": plan.total_q * keys.heads * plan.topk}
        sizes |= dict.fromkeys(("entry_offsets", "item_offsets"), segments * plan.num_buckets) | {"num_items": segments}
        sizes["items"] = segments * plan.item_bound * ITEM_FIELDS
    rooms = [size + -size % 4 for size in sizes.values()]  # addresses of one alignment, always
    lists: dict[str, Any] = dict.fromkeys(("has_union", "counts", "partly", "ranks", "entries", "slots"))
    lists |= zip(sizes, blocks.new_empty(sum(rooms)).split(rooms), strict=True)
    if plan.rest != NO_REST:
        lists["slots"] = lists["slots"].view(torch.int64)
    if plan.rest != NO_REST or flag:
        size = segments * plan.num_buckets if plan.rest != NO_REST else 0
        size += -size % 4
        lists["counts"], lists["partly"], has_union = blocks.new_zeros(2 * size + 1).split([size, size, 1])
        lists["has_union"] = has_union if flag else None
    strides = _block_strides(blocks)
    slots, tokens = next_power_of_two(plan.topk), config.union_tokens
    grid = (plan.num_tiles * keys.heads,)
    launch_kernel(
        tile_lists,
        grid,
        blocks,
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        keys.table,
        *(lists[name] for name in ("tiles", "union_sizes", "union_ids", "union_rows", "union_bits", "has_union")),
        *(lists[name] for name in ("counts", "partly", "ranks", "entries", "slots")),
        *strides,
        *keys.table_strides,
        keys.heads,
        seqs.batch,
        (seqs.batch - 1).bit_length(),
        plan.num_buckets,
        plan.chunk_tiles,
        keys.num_pages,
        seqs.num_blocks(plan.block_size),
        plan.union_limit,
        plan.capacity,
        plan.room,
        TOPK=plan.topk,
        SLOTS=slots,
        TOKENS=tokens,
        BLOCK=plan.block_size,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        REST=plan.rest,
        num_warps=_list_warps(tokens * slots),
    )
    if plan.rest != KV_OUTER:
        return lists
    launch_kernel(
        bucket_offsets,
        (segments,),
        lists["counts"],
        lists["entry_offsets"],
        lists["item_offsets"],
        lists["num_items"],
        plan.num_buckets,
        ITEM=config.outer_item,
        STEP=SCAN_STEP,
        num_warps=8,
    )
    launch_kernel(
        fill_lists,
        grid,
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


def _union(keys, q, seqs, plan, config, lists, out, lse, scale, negative, k_tma, v_tma) -> None:
    dim = q.data.shape[2]
    launch_kernel(
        attend_union,
        (plan.num_tiles * keys.heads * plan.parts,),
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
        DIM_PADDED=padded_dim(dim, keys.k.dtype),
        BLOCK=plan.block_size,
        KEYS=config.union_keys,
        PAGE_SIZE=keys.page_size,
        BY_ROW=_by_row(keys, config, plan.block_size),
        NEGATIVE=negative,
        **formats(q.data.dtype, keys.k.dtype, keys.scale_modes(), True),
        TMA=k_tma is not None,
        STAGES=config.union_stages,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )


def _outer(keys, q, seqs, plan, config, lists, out, lse, scale, negative) -> None:
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
        launch_kernel(
            attend_outer,
            (plan.item_bound, keys.heads, plan.parts * plan.cuts),
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
        launch_kernel(
            combine_outer,
            (tiles * keys.heads, plan.parts, 1),
            o_part,
            lse_part,
            lists["slots"],
            lists["tiles"],
            lists["union_sizes"],
            out,
            lse,
            first_tile,
            keys.heads,
            **shape,
            TILE_TOKENS=config.union_tokens,
            TOKENS=config.combine_tokens,
            CUTS=plan.cuts,
            num_warps=config.combine_warps,
        )


def _by_row(keys: Keys, config: PrefillConfig, block_size: int) -> bool:
    """Whether a step of the union kernel reads neighbouring rows."""
    return keys.by_row and block_size % config.union_keys == 0


def _descriptors(keys: Keys, config: PrefillConfig, block_size: int, head_dim: int) -> tuple[Any, Any]:
    """Of K and V, or None twice."""
    if not config.union_tma or not _by_row(keys, config, block_size):
        return None, None
    box = config.union_keys, padded_dim(head_dim, keys.k.dtype)
    both = keys.descriptor(keys.k, *box), keys.descriptor(keys.v, *box)
    return (None, None) if None in both else both


def _few(keys, q, seqs, plan, config, lists, out, lse, scale, negative, k_tma, v_tma) -> None:
    """Units, attention, merge."""
    total_q, num_q_heads, dim = q.data.shape
    tokens, topk, num_buckets = config.union_tokens, plan.topk, plan.num_buckets
    unit_bound = plan.num_units // keys.heads
    o_part = lse.new_empty(total_q * num_q_heads * topk, dim, dtype=plan.partial_dtype)
    lse_part = lse.new_empty(total_q * num_q_heads * topk)
    launch_kernel(
        few_units,
        (keys.heads, -(-num_buckets // config.few_buckets)),
        seqs.cu_seqlens_q,
        seqs.cu_seqlens_k,
        seqs.q_offset,
        keys.table,
        lists["counts"],
        lists["partly"],
        lists["entries"],
        lists["units"],
        lists["unit_entries"],
        lists["num_units"],
        *keys.table_strides,
        keys.heads,
        seqs.batch,
        (seqs.batch - 1).bit_length(),
        num_buckets,
        plan.room,
        unit_bound,
        keys.num_pages,
        TOKENS=tokens,
        BLOCK=plan.block_size,
        PAGE_SIZE=keys.page_size if keys.by_row else 0,
        STEP=SCAN_STEP,
        BUCKETS=config.few_buckets,
        AT_ONCE=16,
        num_warps=4,
    )
    shape = {"GROUP": plan.group, "HEADS": config.heads, "PARTS": plan.parts}
    shape |= {"DIM": dim, "DIM_PADDED": padded_dim(dim, keys.k.dtype)}
    shares = -(-config.few_programs * facts(q.data.device).num_sms // (keys.heads * plan.parts))
    launch_kernel(
        attend_few,
        (min(shares, unit_bound), keys.heads * plan.parts),
        q.data,
        keys.k,
        keys.v,
        k_tma,
        v_tma,
        o_part,
        lse_part,
        keys.table,
        lists["units"],
        lists["unit_entries"],
        lists["num_units"],
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
        BLOCK=plan.block_size,
        KEYS=config.union_keys,
        PAGE_SIZE=keys.page_size,
        BY_ROW=_by_row(keys, config, plan.block_size),
        NEGATIVE=negative,
        TMA=k_tma is not None,
        STAGES=config.union_stages,
        HOLD=config.few_hold,
        num_warps=config.union_warps,
        num_stages=config.union_stages,
    )
    launch_kernel(
        combine_outer,
        (plan.num_tiles * keys.heads, plan.parts, tokens // config.combine_tokens),
        o_part,
        lse_part,
        lists["slots"],
        lists["tiles"],
        lists["union_sizes"],
        out,
        lse,
        0,
        keys.heads,
        **shape,
        TOPK=topk,
        TILE_TOKENS=tokens,
        TOKENS=config.combine_tokens,
        CUTS=1,
        num_warps=2 * config.combine_warps,
    )
