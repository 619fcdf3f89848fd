# SPDX-License-Identifier: MIT
"""This module has the cases of `bench_sparse_attention_ops.py`: shapes, inputs, calls of `fmha_sm100`, and their useful work.

FLOPs are 4 * head_dim for every pair of a query head and a key that the query sees: causality and, in sparse sections, the
selection limit the pairs, and masked parts of blocks do not count. Bytes are queries, output (2 bytes an element) and the keys
and values that some query of the sequence may read, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmsa.bench.inputs import Inputs, Pages
from openmsa.bench.workloads import Workload

SECTIONS = ("prefill", "paged_prefill", "sparse_prefill", "decode", "paged_decode", "sparse_decode")
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "nvfp4": torch.uint8}
HEADS = (64, 4)  # the query and KV heads without tensor parallelism
DECODE_QUERIES, SPARSE_DECODE_QUERIES = 4, 8


@dataclass(frozen=True)
class Case:
    """Describes one row of a table. table: the section that it is listed in; section: the section that it measures."""

    table: str
    section: str
    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    dtype: str
    topk: int = 16
    head_dim: int = 128
    block_size: int = 128
    selection: str = "first"
    output_mode: str = "o"

    @property
    def sparse(self) -> bool:
        return self.section.startswith("sparse")

    @property
    def prefill(self) -> bool:
        return self.section.endswith("prefill")

    @property
    def pages(self) -> int:
        """Returns the number of pages of one sequence; a page is a block."""
        return -(-self.kv_len // self.block_size)

    def workload(self) -> Workload:
        """Returns the shape for the generator of inputs."""
        heads: dict[str, Any] = {"num_q_heads": self.num_q_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        sizes: dict[str, Any] = {"block_size": self.block_size, "topk": min(self.topk, self.pages)}
        return Workload(self.section, "", self.q_len, self.kv_len, (), self.batch, index_dim=16, **heads, **sizes)


@dataclass(frozen=True)
class Call:
    """Holds the function that is timed, and its useful work."""

    run: Callable[[], Any]
    flops: int
    bytes: int
    predicted_speedup: float = 1.0


def cases(options: Any) -> Iterator[Case]:
    """Yields the rows of the chosen sections in the order of the table; `options` are those of the command line."""
    shared = {name: getattr(options, name) for name in ("dtype", "topk", "head_dim", "block_size", "selection", "output_mode")}
    for section in options.sections:
        if section.endswith("prefill"):
            for tp in options.tp if section == "prefill" else (1,):
                for n in options.seqs:
                    yield Case(section, section, 1, n, n, HEADS[0] // tp, HEADS[1] // tp, **shared)
            continue
        q_len = SPARSE_DECODE_QUERIES if section == "sparse_decode" else DECODE_QUERIES
        for n in options.decode_k:
            for batch in options.decode_b:
                if section == "sparse_decode":  # The sparse row is compared with this dense one.
                    yield Case(section, "paged_decode", batch, q_len, n, *HEADS, **shared)
                yield Case(section, section, batch, q_len, n, *HEADS, **shared)


def prepare(case: Case, device: torch.device) -> Call:
    """Makes the inputs and the plan of a case, and returns its call."""
    inputs = Inputs(case.workload(), device)
    blocks = selection(case, inputs) if case.sparse else None
    if case.dtype == "nvfp4":
        assert blocks is not None
        return Call(_nvfp4(case, inputs, blocks), *work(case, inputs, blocks))
    run, plan = _sparse(case, inputs, blocks) if blocks is not None else _dense(case, inputs)
    return Call(run, *work(case, inputs, blocks), predicted_speedup=_speedup(plan))


def selection(case: Case, inputs: Inputs) -> Tensor:
    """Returns block ids int32 ``[total_q, num_kv_heads, topk]``, ascending, then -1; the public benchmark measures "first"."""
    if case.selection != "first":
        return inputs.selection(case.selection)
    w = case.workload()
    ids = torch.arange(w.topk, dtype=torch.int32, device=inputs.device)
    own = _positions(case, inputs) // case.block_size
    return ids.where(ids <= own[:, None], -1)[:, None].expand(-1, case.num_kv_heads, -1).to(torch.int32).contiguous()


def _positions(case: Case, inputs: Inputs) -> Tensor:
    """Returns int64 ``[total_q]``, the position of every query in its sequence."""
    return torch.arange(case.kv_len - case.q_len, case.kv_len, device=inputs.device).repeat(case.batch)


def work(case: Case, inputs: Inputs, blocks: Tensor | None) -> tuple[int, int]:
    """Returns (FLOPs, bytes) of a case, as the module's docstring counts them."""
    w, size = case.workload(), 1 if case.dtype == "fp8" else 2
    group = case.num_q_heads // case.num_kv_heads
    positions = _positions(case, inputs)
    if blocks is None:
        pairs, keys = case.num_q_heads * int((positions + 1).sum()), case.batch * case.num_kv_heads * case.kv_len
    else:
        seen = (positions[:, None, None] + 1 - blocks.long() * case.block_size).clamp(0, case.block_size)
        pairs = group * int(seen.masked_fill(blocks < 0, 0).sum())
        keys = sum(int((ids.unique() >= 0).sum()) for b in blocks.unflatten(0, (case.batch, -1)) for ids in b.unbind(1))
        keys *= case.block_size
    elements = w.total_q * case.num_q_heads * case.head_dim
    per_key = 2 * case.head_dim * size
    if case.dtype == "nvfp4":
        per_key = 2 * (case.head_dim // 2 + case.head_dim // 16)
    return 4 * case.head_dim * pairs, elements * (size + 2) + keys * per_key


def _cast(x: Tensor, dtype: str) -> Tensor:
    return x if dtype == "bf16" else x.to(torch.float8_e4m3fn)


def _lengths(case: Case) -> tuple[Tensor, Tensor]:
    return (torch.full((case.batch,), n, dtype=torch.int32) for n in (case.q_len, case.kv_len))  # type: ignore[return-value]


def _dense(case: Case, inputs: Inputs) -> tuple[Callable[[], Any], Any]:
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan

    paged = case.section.startswith("paged")
    want = {"output_o": case.output_mode != "maxscore", "output_maxscore": case.output_mode != "o"}
    q, more = _cast(inputs.q, case.dtype), {}
    if paged:
        k, v, more["kv_indices"] = _paged(case, inputs.pages())
    else:
        k, v = _cast(inputs.k, case.dtype), _cast(inputs.v, case.dtype)
    plan = fmha_sm100_plan(
        *_lengths(case),
        case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        page_size=case.block_size if paged else -1,
        output_maxscore=True,
        use_fp8_kvcache=case.dtype == "fp8",
        device=inputs.device,
    )
    return lambda: fmha_sm100(q, k, v, plan, **more, **want), plan


def _paged(case: Case, pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (x if isinstance(x, Tensor) else x.data for x in (pages.kv.k, pages.kv.v))
    return _cast(k, case.dtype), _cast(v, case.dtype), pages.kv.page_table.flatten()


def _sparse(case: Case, inputs: Inputs, blocks: Tensor) -> tuple[Callable[[], Any], Any]:
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan

    q, (k, v, table) = _cast(inputs.q, case.dtype), _paged(case, inputs.pages())
    plan = fmha_sm100_plan(
        *_lengths(case),
        case.num_q_heads,
        num_kv_heads=case.num_kv_heads,
        page_size=case.block_size,
        kv_block_num=blocks.shape[2],
        use_fp8_kvcache=case.dtype == "fp8",
        device=inputs.device,
    )
    more = {"kv_indices": table, "kv_block_indexes": blocks, "output_maxscore": False}
    return lambda: fmha_sm100(q, k, v, plan, **more), plan


def _nvfp4(case: Case, inputs: Inputs, blocks: Tensor) -> Callable[[], Any]:
    from fmha_sm100.sparse import build_k2q_csr, quantize_kv_bf16_to_nvfp4_128x4, sparse_atten_nvfp4_kv_func

    k, v = quantize_kv_bf16_to_nvfp4_128x4(inputs.k, inputs.v)
    q, cu_q, cu_k = inputs.q, inputs.seqs.cu_seqlens_q, inputs.seqs.cu_seqlens_k
    assert cu_q is not None
    assert cu_k is not None
    by_head, topk = blocks.transpose(0, 1).contiguous(), blocks.shape[2]
    longest: dict[str, Any] = {"max_seqlen_q": case.q_len, "max_seqlen_k": case.kv_len}

    def run() -> Any:
        row_ptr, q_indices = build_k2q_csr(by_head, cu_q, cu_k, case.block_size, total_k=inputs.k.shape[0], **longest)[:2]
        return sparse_atten_nvfp4_kv_func(
            q,
            k.data,
            v.data,
            k.scale_128x4,
            v.scale_128x4,
            k.global_scale,
            v.global_scale,
            row_ptr,
            q_indices,
            topk,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            blk_kv=case.block_size,
            causal=True,
            **longest,
        )

    return run


def _speedup(plan: Any) -> float:
    """Returns the speed-up that the plan expects of splitting the keys, 1 where it has none."""
    held = plan[3] if isinstance(plan, tuple) and len(plan) > 3 else plan
    value = held.get("predicted_speedup", 1.0) if isinstance(held, dict) else 1.0
    return float(value) if value is not None else 1.0
