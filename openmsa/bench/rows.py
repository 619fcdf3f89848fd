# SPDX-License-Identifier: MIT
"""A row is what can be measured on a workload: a call of ours or of a peer, its cost, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from openmsa import (
    DecodePlan,
    block_scores,
    dense_attention,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.bench import cost, vllm_peer
from openmsa.bench.dense_peer import dense_peer
from openmsa.bench.inputs import Inputs
from openmsa.testing.timing import Clock


@dataclass(frozen=True)
class Context:
    """A row may build its call from these: the tensors, the implementation asked for, the peers' folder and the clock."""

    x: Inputs
    impl: str
    peers: Path
    clock: Clock


@dataclass(frozen=True)
class Row:
    """A row is one thing to measure.

    build:    makes the call; what it makes beforehand (pages, scores, selections, plans) is not timed.
    cost:     the useful work, a function of `openmsa.bench.cost`.
    peers:    rows whose time is divided by this row's, in order.
    absent:   a reason why it cannot be measured here whatever its code, or None.
    compiles: the first call may compile; False: a long first call counts as a measurement.
    """

    build: Callable[[Context], Callable[[], Any]]
    cost: cost.Costing
    peers: tuple[str, ...] = ()
    absent: Callable[[Context], str | None] = lambda _: None
    compiles: bool = True


def _options(c: Context) -> dict[str, Any]:
    return {"block_size": c.x.workload.block_size, "impl": c.impl}


def _msa_attention(c: Context, paged: bool = False) -> partial[Any]:
    x = c.x
    if paged:
        pages = x.pages()
        return partial(msa_attention, x.q, pages.kv, None, x.index_q, pages.index, x.workload.topk, x.seqs, **_options(c))
    return partial(msa_attention, x.q, x.k, x.v, x.index_q, x.index_k, x.workload.topk, x.seqs, **_options(c))


def _block_scores(c: Context, paged: bool = False) -> partial[Any]:
    keys = c.x.pages().index if paged else c.x.index_k
    return partial(block_scores, c.x.index_q, keys, c.x.seqs, **_options(c))


def _select_blocks(c: Context, paged: bool = False) -> partial[Any]:
    keys = c.x.pages().index if paged else c.x.index_k
    return partial(select_blocks, c.x.index_q, keys, c.x.workload.topk, c.x.seqs, **_options(c))


def _select_blocks_from_scores(c: Context) -> partial[Any]:
    scores = _block_scores(c)()
    return partial(select_blocks_from_scores, scores, c.x.workload.topk, c.x.seqs, **_options(c))


def _sparse_attention(c: Context, selection: str = "own", paged: bool = False) -> partial[Any]:
    """Makes a call for a selection of `Inputs`, or for "own", which the index branch selects on these inputs."""
    blocks = _select_blocks(c)() if selection == "own" else c.x.selection(selection)
    if paged:
        return partial(sparse_attention, c.x.q, c.x.pages().kv, None, blocks, c.x.seqs, **_options(c))
    return partial(sparse_attention, c.x.q, c.x.k, c.x.v, blocks, c.x.seqs, **_options(c))


def _dense_attention(c: Context, paged: bool = False) -> partial[Any]:
    if paged:
        return partial(dense_attention, c.x.q, c.x.pages().kv, None, c.x.seqs, impl=c.impl)
    return partial(dense_attention, c.x.q, c.x.k, c.x.v, c.x.seqs, impl=c.impl)


def _stored(c: Context, stage: str, form: str, paged: bool = False, selection: str = "random") -> Callable[[], Any]:
    """Makes a call of a stage, or of "msa_attention", whose keys and values are stored in the format that `form` names."""
    x, seqs, topk = c.x.stored(form, paged), c.x.seqs, c.x.workload.topk
    choose = partial(select_blocks, x.index_q, x.index_k, topk, seqs, certified=form == "certified", **_options(c))
    attend = partial(sparse_attention, c.x.q, x.k, x.v, seqs=seqs, **_options(c))
    if stage == "block_scores":
        return partial(block_scores, x.index_q, x.index_k, seqs, **_options(c))
    if stage == "select_blocks":
        return choose
    if stage == "sparse_attention":
        return partial(attend, blocks=c.x.selection(selection))
    options = _options(c) | {"certified": form == "certified"}
    return partial(msa_attention, c.x.q, x.k, x.v, x.index_q, x.index_k, topk, seqs, **options)


def _decode_plan(c: Context, form: str = "plain") -> partial[Any]:
    w = c.x.workload
    plan = DecodePlan(
        max_batch=w.batch,
        num_q_heads=w.num_q_heads,
        num_kv_heads=w.num_kv_heads,
        head_dim=w.head_dim,
        index_dim=w.index_dim,
        page_size=w.block_size,
        max_pages=w.num_blocks,
        topk=w.topk,
        block_size=w.block_size,
        dtype=w.dtype,
        device=c.x.device,
    )
    if form == "plain":
        pages = c.x.pages()
        return partial(plan.run, c.x.q, pages.kv, c.x.index_q, pages.index)
    stored: Any = c.x.stored(form, paged=True)
    return partial(plan.run, c.x.q, stored.k, stored.index_q, stored.index_k)


def _without_vllm(c: Context) -> str | None:
    return vllm_peer.absent(c.x.device, c.peers)


def _vllm_rows(form: str) -> dict[str, Row]:
    """Returns vLLM's stages on plain tensors ("") or all in e4m3."""

    def row(build: Callable[..., Any], costing: Callable[..., cost.Cost], *arguments: Any) -> Row:
        costing = partial(costing, form=cost.FORMS.get(form, cost.PLAIN))
        return Row(lambda c: build(c.x, c.peers, *arguments, e4m3=bool(form)), costing, absent=_without_vllm)

    suffix = f"/{form}" if form else ""
    return {
        f"vllm_path{suffix}": row(vllm_peer.path, cost.msa_attention),
        f"vllm_scores{suffix}": row(vllm_peer.scores, cost.block_scores),
        f"vllm_select{suffix}": row(vllm_peer.select, cost.select_blocks),
        f"vllm_attend{suffix}/random": row(vllm_peer.attend, cost.sparse_attention, "random"),
        f"vllm_attend{suffix}/clustered": row(vllm_peer.attend, cost.sparse_attention_clustered, "clustered"),
    }


def _in_form(stage: str, form: str, paged: bool = False, selection: str = "random") -> Row:
    """Makes a row of `_stored`; its peers are what a bf16 user would run instead."""
    clustered = "_clustered" if stage == "sparse_attention" and selection == "clustered" else ""
    costing = partial(getattr(cost, stage + clustered), form=cost.FORMS[form])
    peers = {
        "msa_attention": ("sdpa", "vllm_path"),
        "block_scores": ("vllm_scores",),
        "select_blocks": ("vllm_select",),
        "sparse_attention": (f"vllm_attend/{selection}",),
    }
    return Row(partial(_stored, stage=stage, form=form, paged=paged, selection=selection), costing, peers[stage])


ROWS: dict[str, Row] = {
    "msa_attention": Row(_msa_attention, cost.msa_attention, ("sdpa", "vllm_path")),
    "msa_attention/paged": Row(partial(_msa_attention, paged=True), cost.msa_attention, ("sdpa", "vllm_path")),
    "decode_plan": Row(_decode_plan, cost.msa_attention, ("sdpa", "vllm_path")),
    **{
        f"decode_plan/{form}": Row(
            partial(_decode_plan, form=form), partial(cost.msa_attention, form=cost.FORMS[form]), ("sdpa", "vllm_path")
        )
        for form in cost.FORMS
    },
    "block_scores": Row(_block_scores, cost.block_scores, ("vllm_scores",)),
    "block_scores/paged": Row(partial(_block_scores, paged=True), cost.block_scores, ("vllm_scores",)),
    "select_blocks": Row(_select_blocks, cost.select_blocks, ("vllm_select",)),
    "select_blocks/paged": Row(partial(_select_blocks, paged=True), cost.select_blocks, ("vllm_select",)),
    "select_blocks_from_scores": Row(_select_blocks_from_scores, cost.select_blocks_from_scores, ("vllm_topk",)),
    "sparse_attention": Row(_sparse_attention, cost.sparse_attention, ("sdpa",)),
    **{
        f"sparse_attention{form}/{kind}": Row(
            partial(_sparse_attention, selection=kind, paged=bool(form)), costing, (f"vllm_attend/{kind}",)
        )
        for form in ("", "/paged")
        for kind, costing in (("random", cost.sparse_attention), ("clustered", cost.sparse_attention_clustered))
    },
    "sparse_attention/recorded": Row(partial(_sparse_attention, selection="recorded"), cost.sparse_attention, ("sdpa",)),
    **{
        f"sparse_attention/{form}{kept}/{kind}": _in_form("sparse_attention", form, bool(kept), kind)
        for form in ("e4m3", "nvfp4")
        for kept in ("", "/paged")
        for kind in ("random", "clustered")
    },
    **{
        f"{stage}/{form}{kept}": _in_form(stage, form, bool(kept))
        for stage in ("block_scores", "select_blocks", "msa_attention")
        for form in cost.FORMS
        for kept in ("", "/paged")
        if (stage, form) != ("block_scores", "certified")
    },
    "dense_attention": Row(_dense_attention, cost.dense_attention, ("sdpa",)),
    "dense_attention/paged": Row(partial(_dense_attention, paged=True), cost.dense_attention, ("sdpa",)),
    "sdpa": Row(lambda c: dense_peer(c.x, c.clock), cost.dense_attention, compiles=False),
    **_vllm_rows(""),
    **_vllm_rows("e4m3"),
    "vllm_topk": Row(lambda c: vllm_peer.topk(c.x, c.peers), cost.select_blocks_from_scores, absent=_without_vllm),
}


def with_peers(rows: tuple[str, ...], available: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `rows` and the peers that they are compared with, as far as the workload has them, in the workload's order."""
    wanted = set(rows) | {peer for row in rows for peer in ROWS[row].peers}
    return tuple(row for row in available if row in wanted)
