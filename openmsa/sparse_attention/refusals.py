# SPDX-License-Identifier: MIT
"""What the implementations of `sparse_attention` on GPUs cannot serve, or leave to each other."""

from __future__ import annotations

from openmsa.runtime import dispatch
from openmsa.sparse_attention.call import SparseCall

DECODE_QUERIES = 16  # the decode kernel is preferred up to so many queries a sequence


def many_queries(call: SparseCall) -> str | None:
    """Passes the decode kernel over where sequences have many queries."""
    if call.seqs.longest_q <= DECODE_QUERIES:
        return None
    return f"it is meant for at most {DECODE_QUERIES} queries a sequence, got up to {call.seqs.longest_q}"


DECODE_READS = PREFILL_READS = {"q": ("plain", "e4m3"), "k": ("plain", "e4m3", "nvfp4")}
"""The kernels take these formats of q and of k; v has the format of k."""


def cannot_decode(call: SparseCall) -> str | None:
    """Says why the decode kernel cannot serve a call."""
    reason = dispatch.unless_reads(DECODE_READS, q=call.q, k=call.k) or _unless_cuda(call)
    if reason is None:
        from openmsa.sparse_attention import triton_decode_walk

        reason = triton_decode_walk.refuse(*call[:3], call.block_size)
    return reason


def cannot_prefill(call: SparseCall) -> str | None:
    """Says why the kernels for many queries cannot serve a call."""
    entries = call.blocks.numel()
    if entries >= 2**31:
        return f"it numbers the selected blocks with int32 and blocks has {entries} of them; split the queries"
    return dispatch.unless_reads(PREFILL_READS, q=call.q, k=call.k) or _unless_cuda(call)


def _unless_cuda(call: SparseCall) -> str | None:
    return dispatch.unless_cuda(*call[:3]) or dispatch.unless_recordable(call)
