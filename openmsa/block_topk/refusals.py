# SPDX-License-Identifier: MIT
"""What the implementations of `select_blocks` on GPUs cannot serve."""

from __future__ import annotations

from openmsa.inputs import SelectionCall
from openmsa.runtime import dispatch

TRITON_READS = {"index_q": ("plain", "e4m3"), "index_k": ("plain", "e4m3", "int8", "nvfp4", "mxfp4")}
"""The selection's kernels take these formats: a new one is named here."""


def cannot_select(call: SelectionCall) -> str | None:
    """Says why the kernels that select by scores cannot serve a call."""
    reason = dispatch.unless_reads(TRITON_READS, index_q=call.index_q, index_k=call.index_k)
    reason = reason or dispatch.unless_cuda_inference(call.index_q, call.index_k)
    if reason is None:
        from openmsa.block_topk import triton_select

        reason = triton_select.refuse(*call[2:7])
    return reason


def cannot_certify(call: SelectionCall) -> str | None:
    """Says why the kernels of certified selection cannot serve a call."""
    reads = {"index_q": ("plain",), "index_k": ("certified",)}
    reason = dispatch.unless_reads(reads, index_q=call.index_q, index_k=call.index_k)
    reason = reason or dispatch.unless_cuda_inference(call.index_q, call.index_k)
    if reason is None:
        from openmsa.block_topk import triton_certified

        reason = triton_certified.refuse(*call[:7])
    return reason
