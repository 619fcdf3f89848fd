# SPDX-License-Identifier: MIT
"""This module runs `sparse_attention` for many queries, in Triton: union tiles where neighbours select alike, else KV-outer.

The choice is made on the device, tile by tile; nothing is read on the host, and every size follows from shapes, `Layout`
bounds and arguments. See triton_lists.py, triton_union.py and triton_outer.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from openmsa.kv_cache import PagedKV, Stored
from openmsa.primitives.operands import NVFP4, Bounds, QueryRows
from openmsa.primitives.rows import query_rows
from openmsa.primitives.softmax import Result
from openmsa.runtime.devices import facts
from openmsa.runtime.kinds import computes, rounded
from openmsa.runtime.launch import runs_hopper_kernels
from openmsa.sparse_attention import triton_outer
from openmsa.sparse_attention.triton_config import Keys, PrefillConfig, few_queries, plain_hopper_config, prefill_config
from openmsa.sparse_attention.triton_expand import expand, expands
from openmsa.sparse_attention.triton_few import launch_few
from openmsa.sparse_attention.triton_keys import SMALLEST_SCALE, Descriptors, descriptors
from openmsa.sparse_attention.triton_lists import HOME_TOKENS, KV_OUTER, OUTER_BUT_HOME, Plan, PrefillCall, build_lists
from openmsa.sparse_attention.triton_union import launch_union
from openmsa.types import Layout, out_dtype

FEWEST_TILES = 3.5
"""Hopper's union kernel for plain keys serves calls with so many tiles a multiprocessor or more: it takes twice the queries of
Triton's in a tile, which fewer programs then walk for longer."""
ROWS = 128  # (query, head) rows of such a tile
WORKSPACE_BYTES = 2 << 30  # The partials held at a time take at most so many bytes.
PATHS = ("auto", "few", "union", "outer")


def sparse_attention(
    q: Tensor | Stored,
    k: Tensor | Stored | PagedKV,
    v: Tensor | Stored | None,
    blocks: Tensor,
    seqs: Layout,
    block_size: int,
    softmax_scale: float,
    return_lse: bool,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    path: str = "auto",
    partial_dtype: torch.dtype | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    config: PrefillConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Does what `openmsa.sparse_attention.sparse_attention` says.

    path:             "union" or "outer" sends every tile to that kernel; "few" is KV-outer in the form for few queries (plain
                      tensors only); "auto": each where it is faster.
    partial_dtype:    dtype of KV-outer's partial outputs; None: the output's.
    workspace_bytes:  bound on the partial outputs held at a time (lists and lse add a few percent), at least one tile's; and on
                      the copies of stored keys as 16-bit numbers ("auto", many queries).
    config:           tile shapes; None: those of `prefill_config`.

    A key that a query does not read gets weight 0 but may be multiplied by it: of a block that some query of a sequence reads,
    K and V rows up to the position of the sequence's last query must be finite. All others may hold NaN.
    """
    if path not in PATHS:
        raise ValueError(f"path must be one of {PATHS}, got {path!r}")
    device = facts(q.device)
    keys, queries = Keys.of(k, v, seqs, block_size, device.arch >= 90), query_rows(q, device.arch >= 90)
    if path == "few" and (isinstance(q, Stored) or keys.stored):
        raise ValueError("path must be 'auto', 'union' or 'outer' for stored queries or keys, got 'few'")
    out = torch.empty(q.shape, dtype=out_dtype(q), device=q.device) if out is None else out
    launched = seqs.launched(q)
    lse = torch.empty(launched, q.shape[1], dtype=torch.float32, device=q.device)[: q.shape[0]] if lse is None else lse
    like_q = rounded(launched)  # Like calls are served by the same kernels.
    if out.numel() == 0 or keys.k.rows.data.numel() == 0 or keys.total == 0:
        computes("the results of queries that read nothing")
        out.zero_(), lse.fill_(-torch.inf)
        return (out, lse) if return_lse else out

    # 1. Stored keys that many queries read are copied as numbers, and the kernel for tiles that stay together is chosen.
    readers = like_q * blocks.shape[2] / keys.num_buckets(seqs, block_size)
    few = few_queries(like_q, q.shape[2], blocks.shape[2], keys.heads, keys.num_buckets(seqs, block_size))
    if path == "auto" and keys.stored and not few and expands(keys, queries.data.dtype, readers, workspace_bytes):
        keys = expand(keys, queries.data.dtype, seqs)
    plain = isinstance(q, Tensor) and not keys.stored
    tile = (q.shape[2], q.shape[1] // keys.heads, block_size, device.arch // 10)
    tuned = None
    if config is None and path in ("auto", "union"):
        tuned = _tuned(queries, like_q, keys, out, prefill_config(*tile), block_size, few and path == "auto")
    converted = keys.stored and tuned is None
    if path == "auto" and converted and not keys.dtype == queries.data.dtype == torch.float8_e4m3fn:
        path = "outer"  # KV-outer converts a block once; the union kernel loses more by converting than it gains.
    if config is None:
        four_bits = converted and keys.k.form.format == NVFP4
        config = prefill_config(*tile, 2 if keys.stored else keys.dtype.itemsize, converted, four_bits)
    if tuned is not None and not keys.stored:
        config = plain_hopper_config(config, keys.heads * keys.num_buckets(seqs, block_size), readers, device.num_sms)

    # 2. The work is listed, tile by tile.
    scale = max(abs(softmax_scale) * math.log2(math.e), SMALLEST_SCALE.value)
    bounds = Bounds(seqs.cu_seqlens_q, seqs.cu_seqlens_k, None, seqs.q_offset)
    plan = Plan.of(
        queries, keys, blocks.shape[2], block_size, seqs, config, path, plain, partial_dtype or out.dtype, workspace_bytes,
        tuned is not None,
    )  # fmt: skip
    read = None
    if plan.rest >= KV_OUTER.value and softmax_scale >= 0 and out.data_ptr() % 4 == 0 and runs_hopper_kernels(q.device):
        from openmsa.sparse_attention.gluon_sm90_outer import outer_operands

        read = outer_operands(device, queries.data, keys, plan)
        if read is not None and read.rows is not None and config.union_tokens == HOME_TOKENS:
            plan = plan._replace(rest=OUTER_BUT_HOME.value)
    lists = build_lists(blocks, bounds, keys, plan, config, tuned is not None)
    if lists.outer is not None:
        triton_outer.fill(lists, blocks, seqs.cu_seqlens_k, keys.heads, plan, config)

    # 3. The kernels attend.
    tma: Descriptors = (None, None)
    if (plan.limits.union_limit >= 0 and tuned is None) or lists.few is not None:
        tma = descriptors(keys, config, block_size)
    call = PrefillCall(queries, keys, tma, bounds, plan, config, lists, Result(out, lse), scale, softmax_scale < 0)
    attend_unions = partial(tuned or launch_union, call) if plan.limits.union_limit >= 0 else None
    if lists.outer is not None:
        triton_outer.launch_outer(call, lists.outer, attend_unions, read is not None and tuned is not None, read)
    elif attend_unions is not None:
        attend_unions()
    if lists.few is not None:
        launch_few(call, lists.few)
    return (out, lse) if return_lse else out


def _tuned(
    queries: QueryRows, like_q: int, keys: Keys, out: Tensor, config: PrefillConfig, block_size: int, few: bool
) -> Callable[[PrefillCall], None] | None:
    """Returns the launch of Hopper's own union kernel where one serves, else None. few: whether the rest of plain keys goes to
    the form for few queries, whose units have the tiles' queries; the kernel's own tiles are too large for that."""
    if not runs_hopper_kernels(queries.data.device):
        return None
    device = facts(queries.data.device)
    if not keys.stored:
        from openmsa.sparse_attention import gluon_sm90_attend

        if few or like_q * queries.data.shape[1] // ROWS < FEWEST_TILES * device.num_sms:
            return None
        return gluon_sm90_attend.attend_launch(device, queries, keys, out, config, block_size)
    from openmsa.sparse_attention import gluon_sm90_union

    return gluon_sm90_union.launch_sm90_union if gluon_sm90_union.serves(device, queries, keys, config, block_size) else None
