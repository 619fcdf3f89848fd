# SPDX-License-Identifier: MIT
"""`AttentionPlan` runs the sparse attention of one step of a model, layer after layer, at little cost of the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmsa import step_lengths
from openmsa.attention import QUERY_CHUNK, rounded_rows
from openmsa.block_topk import CERTIFIED_STAGE as CERTIFIED
from openmsa.block_topk import STAGE as SELECTION
from openmsa.inputs import SelectionCall, check_counts, check_selection
from openmsa.kv_cache import PagedIndexKeys, PagedKV, Stored
from openmsa.kv_cache.results import check_places, made_out
from openmsa.runtime import checks, dispatch, tracing, value_checks
from openmsa.runtime.kinds import Call, Kinds, Steps, tensors_in
from openmsa.runtime.memory import Memory
from openmsa.sparse_attention import STAGE as ATTENTION
from openmsa.sparse_attention.call import SparseCall, check_sparse
from openmsa.types import INT32_MAX, Layout, Sequences

LAYERS = Kinds()
"""Launches of layers of all plans: plans of like steps need not record again."""


@dataclass(kw_only=True, eq=False)
class AttentionPlan(tracing.Numbered):
    """Scores index keys, selects blocks and attends for the queries of one step: prefill, chunks of prefill, decode, several
    new tokens, and mixed batches in any order. It is made once a step and serves all layers.

    cu_seqlens_q:   int32 ``[batch + 1]``, where each sequence's queries start. Sequences may be empty. Queries past the last
                    start (padding of a graph) are not read, and their outputs are left as they are.
    total_q:        queries of a layer, padding included.
    max_seqlen_q, max_seqlen_k:  bounds on the queries and on the keys of a sequence, known on the host.
    page_table, seq_lens, page_size:  of paged keys: int32 ``[batch, max_pages]``, int32 ``[batch]`` (the keys of each
                    sequence, new ones included) and the keys of a page. None: keys are packed.
    cu_seqlens_k:   of packed keys: int32 ``[batch + 1]``, where each sequence's keys start.
    q_offset:       as in `Sequences`; None: queries are the last positions of their keys.
    topk, block_size, init_blocks, local_blocks, softmax_scale, certified, query_chunk, impl:  as in `msa_attention`.

    Tensors lie on one device. On a GPU nothing is read from them on the host; they are read when `refresh` and the layers run.
    A plan owns its memory: use one plan a stream, and let its layers follow each other. The first layer of a kind (of its
    shapes, strides and dtypes; numbers of queries and bounds count rounded up, by at most a sixteenth) is checked and its
    launches are recorded; further layers only launch: they allocate nothing (but `out`, where it is not given), never wait and
    run no kernel of PyTorch. They can be captured in a CUDA graph after a first layer of their kind has run; `refresh`,
    captured in front of them, then follows changes in the step's tensors.

    No gradients are computed. Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    """

    cu_seqlens_q: Tensor
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int
    page_table: Tensor | None = None
    seq_lens: Tensor | None = None
    page_size: int | None = None
    cu_seqlens_k: Tensor | None = None
    q_offset: Tensor | None = None
    topk: int = 16
    block_size: int = 128
    init_blocks: int = 0
    local_blocks: int = 1
    softmax_scale: float | None = None
    certified: bool = False
    query_chunk: int | None = None
    impl: str = "auto"
    _memory: Memory = field(init=False, repr=False, default_factory=Memory)
    _blocks: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)
    _reasons: dict[str, None] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        dispatch.check_name(self.impl, CERTIFIED if checks.flag("certified", self.certified) else SELECTION, ATTENTION)
        checks.integer("total_q", self.total_q, 0, INT32_MAX)
        check_counts(self.topk, self.block_size, self.init_blocks, self.local_blocks)
        checks.scale("softmax_scale", 1.0 if self.softmax_scale is None else self.softmax_scale)
        self._chunk = QUERY_CHUNK if self.query_chunk is None else checks.integer("query_chunk", self.query_chunk, 1)
        checks.tensor("cu_seqlens_q", self.cu_seqlens_q, "[batch + 1]", (torch.int32, torch.int64))
        self._device = self.cu_seqlens_q.device
        exact = self._device.type != "cuda" or self.certified
        self._most = self.total_q if exact else rounded_rows(self.total_q, self._chunk)
        self._layout = self._made_layout()
        self._parts = self._made_parts(self._layout)
        self._own = (*dict.fromkeys((self._layout, *self._parts)), self.page_table, self.seq_lens)  # Launches read these too.
        counts = (self._most, self.topk, self.block_size, self.init_blocks, self.local_blocks)
        step = LAYERS.look(*counts, self.softmax_scale, self.certified, self._chunk, self.impl, *self._own)
        self._addresses, self._kind, self.number = step.addresses, LAYERS.number(step.kind), tracing.numbered(self)

    def _made_layout(self) -> Layout:
        seqs = Sequences(self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k, self.q_offset)
        return step_lengths.of_step(seqs, self.page_table, self.seq_lens, self.page_size, self._most)

    def _made_parts(self, whole: Layout) -> list[Layout]:
        """Cuts the queries into chunks, on a CPU without padding, and returns the lengths of each."""
        end = int(whole.cu_seqlens_q[-1]) if self._device.type == "cpu" else self._most
        checks.integer("total_q", self._most, end)
        self._rows = [slice(i, max(i, min(i + self._chunk, end))) for i in range(0, self.total_q, self._chunk)]
        return [whole.query_chunk(x.start, x.stop) for x in self._rows] if len(self._rows) > 1 else [whole] * len(self._rows)

    def refresh(self) -> None:
        """Follows changes that were made in place to the tensors that the plan was made from, within its bounds. On a GPU it
        launches a few small kernels and never waits."""
        made = self._made_layout()
        for old, new in dict.fromkeys([(self._layout, made), *zip(self._parts, self._made_parts(made), strict=True)]):
            for name in ("cu_seqlens_q", "cu_seqlens_k", "q_offset"):
                kept, value = getattr(old, name), getattr(new, name)
                if kept is not None and kept.data_ptr() != value.data_ptr():
                    kept.copy_(value)

    @dispatch.operator("openmsa::plan_select")
    def select(self, index_q: Tensor | Stored, index_k: Tensor | Stored) -> Tensor:
        """Selects the blocks that each query of a layer reads.

        index_q:  ``[total_q, index_heads, index_dim]``, any strides, as in `select_blocks`.
        index_k:  the layer's index keys: packed ``[total_k, index_key_heads, index_dim]``, or a pool ``[num_pages,
                  index_key_heads, page_size, index_dim]`` for the plan's page table; any strides and formats.

        Returns int32 ``[total_q, index_heads, topk]``, the plan's own memory, which the next `select` overwrites.
        """
        call = LAYERS.look(self._kind, "select", index_k, by_row=(index_q,), rows=self.total_q)
        selection = self._selection(index_q, index_k) if call.replay is None else None
        blocks = self._room(index_q.shape[1])
        self._launch(call, self._selecting(selection, blocks), blocks, index_q, index_k)
        return blocks

    @dispatch.operator("openmsa::plan_attend")
    def attend(
        self,
        q: Tensor | Stored,
        k: Tensor | Stored,
        v: Tensor | Stored,
        blocks: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attends to selected blocks, and returns `out`.

        q:         ``[total_q, num_q_heads, head_dim]``, any strides, as in `sparse_attention`.
        k, v:      the layer's keys and values: packed ``[total_k, num_kv_heads, head_dim]``, or pools ``[num_pages,
                   num_kv_heads, page_size, head_dim]`` for the plan's page table; any strides and formats.
        blocks:    int32 ``[total_q, num_kv_heads or 1, topk]``, as `select` returns them.
        out, lse:  where to write, contiguous, ``[total_q, num_q_heads, head_dim]`` in q's dtype (bfloat16 for `E4M3`) and
                   float32 ``[total_q, num_q_heads]``; None: out is made, lse is dropped.
        """
        out = made_out(q) if out is None else out
        by_row = (blocks, q, out, lse)
        call = LAYERS.look(self._kind, "attend", k, v, by_row=by_row, rows=self.total_q)
        steps = self._attention(q, k, v, blocks, out, lse) if call.replay is None else []
        self._launch(call, steps, None, *by_row, k, v)
        return out

    def run(
        self,
        q: Tensor | Stored,
        k: Tensor | Stored,
        v: Tensor | Stored,
        index_q: Tensor | Stored,
        index_k: Tensor | Stored,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Does what `select` and `attend` do, one after the other, for one layer; see there. Returns `out`."""
        if torch.compiler.is_compiling():
            return self.attend(q, k, v, self.select(index_q, index_k), out=out, lse=lse)
        out = made_out(q) if out is None else out
        by_row = (index_q, q, out, lse)
        call = LAYERS.look(self._kind, "run", index_k, k, v, by_row=by_row, rows=self.total_q)
        selection = self._selection(index_q, index_k) if call.replay is None else None
        blocks = self._room(index_q.shape[1])
        steps = self._selecting(selection, blocks)
        if call.replay is None:
            steps += self._attention(q, k, v, blocks, out, lse)
            check_places(q, list(tensors_in(index_q, index_k)), out, lse)
        self._launch(call, steps, blocks, *by_row, index_k, k, v)
        return out

    @property
    def not_recorded(self) -> tuple[str, ...]:
        """Says why layers of some kinds run the host's whole code each time, a sentence each; empty where none do."""
        return tuple(self._reasons)

    def _paged(self, name: str, kind: type[Any], *pools: Any) -> Any:
        cache = kind(*pools, self.page_table, self.seq_lens)
        checks.size(name, pools[0], 2, self.page_size or 0, "page_size of the plan")
        return cache

    def _room(self, heads: int) -> Tensor:
        """Returns the memory of a selection of so many heads."""
        if heads not in self._blocks:
            room = torch.full((self._most, heads, self.topk), -1, dtype=torch.int32, device=self._device)
            self._blocks[heads] = room[: self.total_q]
        return self._blocks[heads]

    def _selection(self, index_q: Tensor | Stored, index_k: Any) -> SelectionCall:
        """Checks what `select` is given."""
        checks.size("index_q", index_q, 0, self.total_q, "total_q of the plan")
        value_checks.reaches("index_k", index_k, self.cu_seqlens_k)
        if self.page_table is not None:
            checks.rows("index_k", index_k, "[num_pages, heads, page_size, dim]", PagedIndexKeys.formats)
            index_k = self._paged("index_k", PagedIndexKeys, index_k)
        counts = (self.block_size, self.init_blocks, self.local_blocks)
        return check_selection(index_q, index_k, self.topk, self._layout, *counts, self.certified, None, False)

    def _selecting(self, call: SelectionCall | None, blocks: Tensor) -> Steps:
        """Returns the steps of a checked selection; none of a call whose kind is known."""
        if call is None:
            return []
        return [partial(self._select, call, blocks, *x) for x in zip(self._rows, self._parts, strict=True)]

    def _attention(self, q: Tensor | Stored, k: Any, v: Any, blocks: Tensor, out: Tensor | None, lse: Tensor | None) -> Steps:
        """Checks what `attend` is given, and returns its steps."""
        checks.size("q", q, 0, self.total_q, "total_q of the plan")
        value_checks.reaches("k", k, self.cu_seqlens_k)
        k, v = (k, v) if self.page_table is None else (self._paged("k", PagedKV, k, v), None)
        call = check_sparse(q, k, v, blocks, self._layout, self.block_size, self.softmax_scale, True, False).writing(out, lse)
        return [partial(self._attend, call, *x) for x in zip(self._rows, self._parts, strict=True)]

    def _select(self, call: SelectionCall, blocks: Tensor, rows: slice, seqs: Layout) -> None:
        chunk = call._replace(index_q=call.index_q[rows], seqs=seqs, blocks=blocks[rows])
        (CERTIFIED if self.certified else SELECTION).run(self.impl, chunk)

    def _attend(self, call: SparseCall, rows: slice, seqs: Layout) -> None:
        chunk = call._replace(q=call.q[rows], blocks=call.blocks[rows], seqs=seqs)
        out, lse = (None if x is None else x[rows] for x in (call.out, call.lse))
        ATTENTION.run(self.impl, chunk._replace(out=out, lse=lse))

    def _launch(self, call: Call, steps: Steps, own: Tensor | None, *values: Any) -> None:
        """Launches a layer of a known kind; runs the steps of any other, and records their launches on a GPU. own: the plan's
        memory of a selection. values: those of the call, by row first."""
        if call.replay is not None:
            if own is not None:
                call.addresses.append(own.data_ptr())
            call.addresses.extend(self._addresses)
            LAYERS.again(call, self._memory)
            return
        if checks.needs_grad(*tensors_in(*values)):
            raise NotImplementedError("a plan computes no gradients, got tensors that require one; use torch.no_grad()")
        with torch.no_grad():
            if self._device.type != "cuda" or not dispatch.has_triton():
                for step in steps:
                    step()
            elif steps and (failed := LAYERS.first(call, steps, (*values, own, *self._own))) is not None:
                self._reasons[failed] = None
