# SPDX-License-Identifier: MIT
"""The useful work of a row is the FLOPs and bytes that its operation cannot do without; it sets the least time possible.

FLOPs count a multiply and an add as two and only what causality lets a query see: 2 per element of a score, 4 per element of
attention (QK^T and PV). Softmax, top-k, the masked half of a tile and partial results count nothing. For a selection the
query's own block is taken to be among the `topk`, as the rule demands, so that its visible part alone counts there.
Bytes count every input once and every output once, but at most those keys and values that the selections name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from openmsa.bench.workloads import Workload

SPAN, SPARE = 64, 8  # a clustered selection: neighbours a span, and blocks beyond topk that a span draws from


@dataclass(frozen=True)
class Cost:
    """One call has so many useful FLOPs and bytes; fp8_flops counts those FLOPs whose factors are both e4m3."""

    flops: int
    bytes: int
    fp8_flops: int = 0


@dataclass(frozen=True)
class Form:
    """A form says how the tensors of a workload are stored. index, kv: bits an element of index keys and of keys and values,
    scales included; None: the workload's dtype. fp8_scores: index queries are e4m3 as well."""

    index: float | None = None
    kv: float | None = None
    fp8_scores: bool = False


PLAIN = Form()
FORMS = {
    "e4m3": Form(8, 8, fp8_scores=True),
    "nvfp4": Form(4.5, 4.5),  # a byte of scale for 16 elements
    "certified": Form(8.25),  # int8 with two bfloat16 a key of 128; blocks that are rescored come on top
}


@dataclass(frozen=True)
class Ceilings:
    """The device reached these rates in the same run.

    gemm:    FLOP/s of a matrix product in the workload's dtype. gemm_fp8: of one in e4m3, None where there is none.
    copy, read: bytes/s of a copy (read and written) and of a read.
    launch:  seconds of the smallest call (on a GPU out of a CUDA graph). It is part of no limit and says how much of a short
             row's time is overhead.
    """

    gemm: float
    copy: float
    read: float
    launch: float
    gemm_fp8: float | None = None

    @property
    def bandwidth(self) -> float:
        return max(self.copy, self.read)


def limit_seconds(cost: Cost, ceilings: Ceilings) -> tuple[float, str]:
    """Returns the least time the work could take, and what sets it: "flops" or "bytes"."""
    compute = (cost.flops - cost.fp8_flops) / ceilings.gemm + cost.fp8_flops / (ceilings.gemm_fp8 or ceilings.gemm)
    memory = cost.bytes / ceilings.bandwidth
    return (compute, "flops") if compute >= memory else (memory, "bytes")


def visible_keys(w: Workload) -> int:
    """Counts the keys that queries see, summed over the queries of all sequences."""
    return w.batch * (_triangle(w.context) - _triangle(w.context - w.q_len))


def selected_keys(w: Workload) -> int:
    """Counts visible keys of the selected blocks, summed over the queries of all sequences."""
    return w.batch * (_selected_before(w, w.context) - _selected_before(w, w.context - w.q_len))


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _selected_before(w: Workload, position: int) -> int:
    """Counts selected keys, summed over the queries at positions below `position`."""
    everything = w.topk * w.block_size  # up to here a query reads all it sees
    if position <= everything:
        return _triangle(position)
    blocks, rest = divmod(position - everything, w.block_size)
    own = blocks * _triangle(w.block_size) + _triangle(rest)
    return _triangle(everything) + (position - everything) * (w.topk - 1) * w.block_size + own


def distinct_keys(w: Workload, clustered: bool = False) -> int:
    """Counts the keys that at least one query of a KV head may read, summed over the sequences."""
    if clustered:
        spans = -(-w.q_len // SPAN)
        named = (spans * (w.topk + SPARE) + -(-w.q_len // w.block_size) + 1) * w.block_size
    else:
        named = w.q_len * w.topk * w.block_size
    return w.batch * min(w.context, named)


def _q_bytes(w: Workload) -> int:
    return w.total_q * w.num_q_heads * w.head_dim * w.dtype.itemsize


def _key_bytes(w: Workload, elements: int, bits: float | None) -> int:
    return elements * w.dtype.itemsize if bits is None else int(elements * bits / 8)


def _index_bytes(w: Workload, form: Form) -> int:
    queries = w.total_q * w.num_kv_heads * w.index_dim * (1 if form.fp8_scores else w.dtype.itemsize)
    return queries + _key_bytes(w, w.batch * w.context * w.index_dim, form.index)


def _kv_bytes(w: Workload, keys: int, form: Form) -> int:
    return _key_bytes(w, 2 * keys * w.num_kv_heads * w.head_dim, form.kv)


def _score_bytes(w: Workload) -> int:
    return 4 * w.num_kv_heads * w.total_q * w.num_blocks


def _id_bytes(w: Workload) -> int:
    return 4 * w.total_q * w.num_kv_heads * w.topk


def block_scores(w: Workload, form: Form = PLAIN) -> Cost:
    """Index queries and keys are read, float32 scores written."""
    flops = 2 * visible_keys(w) * w.num_kv_heads * w.index_dim
    return Cost(flops, _index_bytes(w, form) + _score_bytes(w), flops if form.fp8_scores else 0)


def select_blocks(w: Workload, form: Form = PLAIN) -> Cost:
    """This reads what `block_scores` reads and writes block ids: scores need not be written."""
    scores = block_scores(w, form)
    return Cost(scores.flops, _index_bytes(w, form) + _id_bytes(w), scores.fp8_flops)


def select_blocks_from_scores(w: Workload) -> Cost:
    """Scores are read and block ids written; comparisons are no FLOPs."""
    return Cost(0, _score_bytes(w) + _id_bytes(w))


def sparse_attention(w: Workload, clustered: bool = False, form: Form = PLAIN) -> Cost:
    """Queries, block ids and the selected keys and values are read, the output is written."""
    flops = 4 * selected_keys(w) * w.num_q_heads * w.head_dim
    return Cost(flops, 2 * _q_bytes(w) + _id_bytes(w) + _kv_bytes(w, distinct_keys(w, clustered), form))


def sparse_attention_clustered(w: Workload, form: Form = PLAIN) -> Cost:
    """This is `sparse_attention` where neighbours share most blocks."""
    return sparse_attention(w, True, form)


def dense_attention(w: Workload) -> Cost:
    """Queries, keys and values are read, the output is written."""
    return Cost(4 * visible_keys(w) * w.num_q_heads * w.head_dim, 2 * _q_bytes(w) + _kv_bytes(w, w.batch * w.context, PLAIN))


def msa_attention(w: Workload, form: Form = PLAIN) -> Cost:
    """This is the whole path, selection and sparse attention, without writing the ids between them."""
    index, main = select_blocks(w, form), sparse_attention(w, form=form)
    return Cost(index.flops + main.flops, index.bytes + main.bytes - 2 * _id_bytes(w), index.fp8_flops)


Costing = Callable[[Workload], Cost]
