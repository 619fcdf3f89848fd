# SPDX-License-Identifier: MIT
"""Top-k over block scores, exact and deterministic, says which blocks each query reads."""

from __future__ import annotations

from torch import Tensor

from openmsa import known_calls
from openmsa.block_topk import refusals
from openmsa.block_topk.given_scores import SCORES_STAGE, select_blocks_from_scores
from openmsa.inputs import SelectionCall, check_selection
from openmsa.kv_cache import PagedIndexKeys, Stored
from openmsa.kv_cache.results import made_blocks
from openmsa.runtime import dispatch, references
from openmsa.runtime.dispatch import Implementation, Stage
from openmsa.types import Sequences

__all__ = ["CERTIFIED_STAGE", "SCORES_STAGE", "STAGE", "select_blocks", "select_blocks_from_scores"]


@dispatch.operator("openmsa::select_blocks")
def select_blocks(
    index_q: Tensor | Stored,
    index_k: Tensor | Stored | PagedIndexKeys,
    topk: int = 16,
    seqs: Sequences | None = None,
    *,
    block_size: int = 128,
    init_blocks: int = 0,
    local_blocks: int = 1,
    certified: bool = False,
    rescored: Tensor | None = None,
    impl: str = "auto",
    check: bool = False,
) -> Tensor:
    """Scores the key blocks and selects `topk` of them for every query and index head.

    index_q, index_k, seqs, block_size, impl, check: as in `block_scores`.
    topk:          1 to 64.
    init_blocks:   first blocks that are always selected.
    local_blocks:  last visible blocks that are always selected, the query's own block among them; init_blocks and
                   local_blocks count among the k (init_blocks + local_blocks <= topk).
    certified:     the same selection, bit for bit, for fewer bytes: index_k are `CertifiedKeys` (or pages of them), of which
                   the int8 half bounds every score rigorously and only blocks that the bounds leave open are read exactly.
    rescored:      int32 ``[total_q, index_heads]``, receives how many blocks were scored exactly; only with `certified`.

    Returns int32 ``[total_q, index_heads, topk]``: block ids counted from the start of the query's sequence, ascending, then
    -1. Ties go to the lower id; the result is the same in every run. NaN counts as lowest: a block whose score is NaN or -inf
    is selected only where it is forced. A query that sees at most topk blocks gets all others of them, whatever their scores;
    where no score can be NaN or -inf, they need not be computed.
    Memory is bounded: the scores of a few queries are held at a time.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    Source: paper arXiv 2606.13392, section 3.2.
    """
    if not certified:
        operands, numbers = (index_q, index_k, topk), (block_size, init_blocks, local_blocks, certified, rescored)
        return known_calls.run(STAGE, impl, operands, seqs, numbers, check, lambda: made_blocks(index_q, topk))
    call = check_selection(index_q, index_k, topk, seqs, block_size, init_blocks, local_blocks, certified, rescored, check)
    blocks, count = CERTIFIED_STAGE.run(impl, call)
    if rescored is not None:
        rescored.copy_(count)
    return blocks


def _unless_cpu(call: SelectionCall) -> str | None:
    return dispatch.unless_cpu_inference(call.index_q, call.index_k)


def _unless_values(call: SelectionCall) -> str | None:
    return references.unless_values(call.index_q)


def _by_name_only(call: SelectionCall) -> str | None:
    return references.on_gpu_by_name_only(call.index_q)


STAGE = Stage(
    select_blocks,
    check_selection,
    (
        Implementation("triton", "openmsa.block_topk.triton_select:select_blocks", refusals.cannot_select),
        Implementation("cpu", "openmsa.block_topk.cpu:select_blocks", _unless_cpu),
        Implementation("reference", "openmsa.block_topk.reference:select_blocks", _unless_values, _by_name_only),
    ),
)
CERTIFIED_STAGE = Stage(
    select_blocks,
    check_selection,
    (
        Implementation("triton", "openmsa.block_topk.triton_certified:select_blocks", refusals.cannot_certify),
        Implementation("cpu", "openmsa.block_topk.cpu_certified:select_blocks", _unless_cpu),
        Implementation("reference", "openmsa.block_topk.reference:select_certified", _unless_values, _by_name_only),
    ),
    name="select_blocks(certified=True)",
)
