# SPDX-License-Identifier: MIT
"""A plan's kernels run a layer of a step: in one launch for few sequences, and in two to ten for many."""

from __future__ import annotations

from torch import Tensor

from openmsa.block_topk import triton_certified
from openmsa.block_topk.triton_topk import launch_topk
from openmsa.decode import triton_attend, triton_layer
from openmsa.decode.memory import PlanMemory
from openmsa.decode.scored import score, scores_of, takes_two
from openmsa.decode.sizes import Sizes
from openmsa.decode.triton_layer import ATTEND, EVERY, MERGE, SCORE, Step
from openmsa.decode.two_parts import Buffers, Part, selection
from openmsa.inputs import exact_keys
from openmsa.kv_cache import E4M3, CertifiedKeys, PagedIndexKeys, PagedKV
from openmsa.runtime import devices
from openmsa.runtime.kinds import computes
from openmsa.sparse_attention import triton_decode, triton_decode_shared
from openmsa.sparse_attention.triton_decode import UNSERVED
from openmsa.sparse_attention.triton_decode_walk import refuse


class Kernels(PlanMemory):
    """Runs steps with the memory of a plan. A run never waits for the device. It allocates nothing, except where
    `TwoParts.serve` loads kernels outside of a graph."""

    def refuse(self, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys) -> str | None:
        """Says why the kernels cannot read these formats; returns None where they can."""
        if index_keys.format == "certified" and not isinstance(index_q, Tensor):
            return f"index_q must be plain ({index_keys.dtype}) beside certified index keys, got {index_q.format}"
        return refuse(q, kv, None, self.sizes.block_size)

    def run(
        self,
        q: Tensor | E4M3,
        kv: PagedKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        softmax_scale: float,
        blocks: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Runs one layer; the arguments are taken as checked."""
        config, keys = self.one_launch[kv.batch - 1], index_keys.keys
        plain = isinstance(q, Tensor) and isinstance(kv.k, Tensor) and isinstance(index_q, Tensor)
        served = Tensor if config is not None and config.strided else (Tensor, CertifiedKeys)
        if config is None or self.words is None or not (plain and isinstance(keys, served)):
            self._stages(Step(q, kv, index_q, index_keys, softmax_scale, blocks, out, lse))
            return
        exact = exact_keys(index_keys) if isinstance(keys, CertifiedKeys) else index_keys
        assert isinstance(exact, PagedIndexKeys)
        step = Step(q, kv, index_q, exact, softmax_scale, blocks, out, lse)
        for kind in (SCORE, ATTEND, MERGE) if self.interpreted else (EVERY,):
            triton_layer.launch(config, self.sizes, self.words, step, pdl=self.pdl, kind=kind.value)

    def _stages(self, step: Step) -> None:
        """Runs one layer with a launch or more a stage."""
        sizes, batch, capacity = self.sizes, step.kv.batch, step.index_keys.capacity
        certified, starts = self.bounds_that_pay(batch, capacity), self.cu_seqlens_q[: batch + 1]
        if certified is not None and self.parts is not None and self._pays(batch, capacity):
            due = step.index_keys.format == "certified" and self.parts.due(step.kv, step.index_keys)
            plain = isinstance(step.q, Tensor) and isinstance(step.index_q, Tensor)
            if due and plain and self.parts.serve(Part(step, starts, sizes, Buffers(certified, self.partials))):
                return
        config, bounds = self.attend["plain"][batch - 1], certified is not None and step.index_keys.format == "certified"
        if not bounds and self.shared.cuts[batch - 1] is None and takes_two(config, sizes, step):
            self._two_launches(config, step, starts)
            return
        self.select(step.index_q, step.index_keys, step.blocks)
        form = step.kv.format if isinstance(step.q, Tensor) else "e4m3"
        shared, served = self.shared.cuts[batch - 1] if form == "plain" else None, UNSERVED
        if shared is not None:  # It leaves tokens whose blocks differ too much to the next launch.
            served = triton_decode_shared.launch(
                *(shared, self.shared, step.q, step.kv, step.blocks, sizes.new_tokens, sizes.block_size),
                *(step.softmax_scale, step.out, step.lse, self.pdl),
            )
        triton_decode.launch(
            *(self.attend[step.kv.format][batch - 1], self.partials, step.q, step.kv, None, step.blocks, step.kv.seq_lens),
            *(sizes.new_tokens, sizes.block_size, step.softmax_scale, step.out, step.lse, self.pdl, served),
        )

    def _two_launches(self, config: triton_decode.Config, step: Step, starts: Tensor) -> None:
        """Runs one layer by a launch that scores, and one that selects and attends."""
        sizes, pairs, best = self.sizes, self.best[step.kv.batch - 1], False
        scores, visible = scores_of(step.index_q, step.index_keys, sizes, self.scores)
        if pairs:
            from openmsa.decode import gluon_sm90_best

            best = gluon_sm90_best.reads(step.q, step.kv.k, step.kv.v)
        absent = self.handed if best and self.hands_on[step.kv.batch - 1] else None
        scores, handed = score(step.index_q, step.index_keys, starts, sizes, scores, visible, self.pdl, absent)
        if best:
            gluon_sm90_best.launch(sizes, scores, step, self.pdl, pairs, config.splits, self.partials, handed)
        else:
            triton_attend.launch(config, self.partials, sizes, scores, step, self.pdl)

    def select(self, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, blocks: Tensor) -> None:
        """Selects the blocks of a step, with a launch or more a stage; the arguments are taken as checked."""
        certified = self.bounds_that_pay(index_keys.batch, index_keys.capacity)
        starts = self.cu_seqlens_q[: index_keys.batch + 1]
        select(index_q, index_keys, starts, self.sizes, self.scores, certified, blocks)

    def bounds_that_pay(self, batch: int, capacity: int) -> triton_certified.Workspace | None:
        """Returns the buffers of bounds where certified keys of so many sequences are read as bounds first."""
        return self.certified if batch * capacity > self.most_unbounded else None


def select(
    index_q: Tensor | E4M3,
    index_keys: PagedIndexKeys,
    starts: Tensor,
    sizes: Sizes,
    held: Tensor,
    certified: triton_certified.Workspace | None,
    out: Tensor,
) -> None:
    """Selects the blocks that each new token reads, as `openmsa.select_blocks` does, in two launches, or four with bounds. The
    arguments are taken as checked. It never allocates and never waits, and all lengths are read on the device when it runs.

    starts:     int32 ``[batch + 1]``: where each sequence's new tokens start; it has at most sizes.new_tokens of them.
    held:       float32, contiguous, at least `scores_held` elements (`openmsa.decode.memory`), whose content after the call is
                undefined.
    certified:  buffers with which `CertifiedKeys` are read as bounds first, for the same selection; `held` is then left alone.
    out:        int32 ``[total_q, index_heads, topk]``, contiguous, which receives the ids.
    """
    if index_q.shape[0] == 0 or index_keys.capacity == 0:
        computes("the selection of queries that see nothing")
        out.fill_(-1)
        return
    if certified is not None and isinstance(index_keys.keys, CertifiedKeys):
        assert isinstance(index_q, Tensor)
        bounds_first = selection(index_q, index_keys, starts, sizes, certified)
        bounds_first.run(sizes.init_blocks, sizes.local_blocks, out)
        return
    scores, visible = scores_of(index_q, index_keys, sizes, held)
    score(index_q, index_keys, starts, sizes, scores, visible)
    launch_topk(
        scores.transpose(0, 1), visible, sizes.init_blocks, sizes.local_blocks, out, pdl=devices.has_pdl(index_q.device)
    )
