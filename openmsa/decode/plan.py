# SPDX-License-Identifier: MIT
"""`DecodePlan` runs the sparse attention of a decode step with buffers that live as long as the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openmsa.decode.cpu import run_stages
from openmsa.decode.sizes import Sizes, check_sizes
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.kv_cache.results import check_apart
from openmsa.kv_cache.rows import QUERY_FORMATS
from openmsa.runtime import checks, named_devices, tracing
from openmsa.runtime.kinds import Call, Kinds, tensors_in
from openmsa.runtime.memory import Memory


@dataclass(kw_only=True, eq=False)
class DecodePlan(tracing.Numbered):
    """Scores index keys, selects blocks and attends for the newest tokens of each sequence, one layer a `run`.

    max_batch:        sequences of the largest step; a run may have fewer.
    num_q_heads, num_kv_heads, head_dim:  sizes of the main branch, as in `sparse_attention`.
    page_size, max_pages:  sizes of the caches: keys a page, and the widest page table (pages a sequence).
    new_tokens:       query tokens a sequence, 1 to 16, each with a selection of its own; they are the last of its keys.
    index_heads:      num_kv_heads (None), or 1: one selection shared by all KV heads.
    index_key_heads, index_dim:  sizes of the index branch, as in `block_scores`.
    topk, block_size, init_blocks, local_blocks:  as in `select_blocks`.
    softmax_scale:    as in `sparse_attention`.
    certified_keys:   whether `CertifiedKeys` may come. False promises that none do: the plan refuses them, and holds no memory
                      for bounds and parts.
    dtype:            dtype of outputs, and of plain queries and caches: float16 or bfloat16 on a GPU, any float on a CPU.
                      Queries may also be `E4M3`, and caches may be in any of their formats, which a run may change.
    device:           a CUDA device, which runs Triton kernels, one launch a run for few sequences, two or more for many; or a
                      CPU, which runs the stages `select_blocks` and `sparse_attention` with their own memory.

    `CertifiedKeys` with exact keys of `dtype` give the selection of these, bit for bit: int8 keys are read first, then those
    exact keys of open blocks that can be the best (five launches). Exact keys alone are read where that is as fast: where those
    of a run's page tables are at most 64 MiB (256K keys of dim 128), where one launch serves the run, or where new_tokens *
    index_heads / index_key_heads is more than 16; and where topk - init_blocks - local_blocks is 0 or at least the blocks of
    `max_pages`, where these are more than 8,192, and where bounds and what they find would take more than 256 MiB for
    `max_batch`. Other plans on a GPU hold memory for bounds. Index queries must be plain beside `CertifiedKeys` on a GPU.

    In a CUDA graph, with plain queries, a run whose page tables have room for 1 GiB of exact certified keys, and whose
    attention fills the GPU unsplit, serves its sequences in two parts, ten launches on two streams: with the same selection,
    outputs rounded as for fewer, up to half as much memory again. A like run must come before the capture: it loads kernels.

    On a GPU a run neither allocates nor waits for the device, and lengths and page tables are read when the kernels run:
    capture it in a CUDA graph and update ``seq_lens`` and ``page_table`` in place between replays. No memory is shared
    between plans: use one plan a stream. Runs of one plan must follow each other, on one stream or ordered by events.

    Raises ValueError, TypeError or NotImplementedError, naming the argument, the rule and the value.
    """

    max_batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    new_tokens: int = 1
    index_heads: int | None = None
    index_key_heads: int = 1
    index_dim: int = 128
    topk: int = 16
    block_size: int = 128
    init_blocks: int = 0
    local_blocks: int = 1
    softmax_scale: float | None = None
    certified_keys: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: torch.device | str = "cuda"
    _kv_type, _run_stages = PagedKV, run_stages

    def __post_init__(self) -> None:
        self._device, self._tokens, self._in_graph = named_devices.resolved("device", self.device), 0, False
        self.number = tracing.numbered(self)  # which stands for the plan in graphs
        self._kinds, self._memory = Kinds(), Memory()
        self._index_heads = self.num_kv_heads if self.index_heads is None else self.index_heads
        check_sizes(self, self._index_heads, self._device if uses_kernels(self._device) else None)
        scale = self.softmax_scale
        self._scale = self.head_dim**-0.5 if scale is None else checks.scale("softmax_scale", scale)
        tokens = self.max_batch * self.new_tokens
        self._blocks = torch.full((tokens, self._index_heads, self.topk), -1, dtype=torch.int32, device=self._device)
        self._out = torch.zeros((tokens, self.num_q_heads, self.head_dim), dtype=self.dtype, device=self._device)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        self._lse = torch.full((tokens, self.num_q_heads), -torch.inf, dtype=wide, device=self._device)
        if uses_kernels(self._device):
            self._allocate_for_kernels()

    def _allocate_for_kernels(self) -> None:
        from openmsa.decode.kernels import Kernels

        sizes = Sizes.of(self, self._index_heads)
        self._kernels = Kernels(sizes, self.max_batch, self.max_pages, self.dtype, self._device, self.certified_keys)

    @property
    def blocks(self) -> Tensor:
        """Returns what the last run selected: int32 ``[tokens, index_heads, topk]``, which the next run overwrites."""
        return self._blocks[: self._tokens]

    @property
    def starts(self) -> Tensor:
        """Returns where each sequence's tokens start, int32 ``[max_batch + 1]``."""
        return torch.arange(self.max_batch + 1, dtype=torch.int32, device=self._device) * self.new_tokens

    @property
    def lse(self) -> Tensor:
        """Returns the last run's lse, natural logarithm: ``[tokens, num_q_heads]``, which the next run overwrites."""
        return self._lse[: self._tokens]

    def run(
        self,
        q: Tensor | E4M3,
        kv: PagedKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Runs one layer's sparse attention for the new tokens.

        q:           ``[batch * new_tokens, num_q_heads, head_dim]``, the tokens of a sequence next to each other; any strides.
        kv:          the layer's cache, the new tokens already appended and counted by ``seq_lens``. A sequence of length 0
                     (a padding row of a graph) gives 0.
        index_q:     ``[batch * new_tokens, index_heads, index_dim]``; any strides.
        index_keys:  the layer's index keys, of the same lengths, new tokens appended.
        out:         where to write, ``[batch * new_tokens, num_q_heads, head_dim]``, any strides; None: the plan's own memory,
                     overwritten by the next run.

        Returns `out`. `blocks` and `lse` then hold the selection and the softmax denominators.
        """
        if torch.compiler.is_compiling() and not self._in_graph:
            given = {"self": self, "q": q, "kv": kv, "index_q": index_q, "index_keys": index_keys, "out": out}
            return tracing.TRACED["openmsa::run_decode_plan"](given)
        call = self._kinds.look(q, kv, index_q, index_keys, out)
        if call.replay is None:
            self._check_call(q, kv, index_q, index_keys, out)
        self._tokens, to = q.shape[0], self._out[: q.shape[0]] if out is None else out
        try:
            if call.replay is not None:
                self._kinds.again(call, self._memory)
            elif q.shape[0] > 0:
                self._run_new(call, to, q, kv, index_q, index_keys, out)
        except BaseException:
            if uses_kernels(self._device):
                self._kernels.take_back()
            raise
        return to

    def _run_new(
        self, call: Call, to: Tensor, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys,
        out: Tensor | None,
    ) -> None:  # fmt: skip
        """Runs a layer of a kind that cannot be replayed, or not yet. to: `out`, or where results go without it."""
        with torch.no_grad():
            if uses_kernels(q.device):
                run = partial(self._kernels.run, q, kv, index_q, index_keys, self._scale, self.blocks, to, self.lse)
                # A plan that may serve its sequences in two parts decides anew each time.
                recorded = self._kernels.parts is None and self._device.type == "cuda"
                self._kinds.first(call, [run], (q, kv, index_q, index_keys, out), own=False) if recorded else run()
            else:
                self._run_stages(q, kv, index_q, index_keys, to)

    def _check_call(
        self, q: Tensor | E4M3, kv: PagedKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor | None
    ) -> None:
        for name, cache, kind in (("kv", kv, self._kv_type), ("index_keys", index_keys, PagedIndexKeys)):
            if not isinstance(cache, kind):
                raise TypeError(f"{name} must be an openmsa.{kind.__name__}, got {type(cache).__name__}")
        checks.integer("kv.batch", kv.batch, 0, self.max_batch)
        self._check_rows("q", q, kv.batch, self.num_q_heads, self.head_dim, QUERY_FORMATS)
        self._check_rows("index_q", index_q, kv.batch, self._index_heads, self.index_dim, QUERY_FORMATS)
        if out is not None:
            self._check_rows("out", out, kv.batch, self.num_q_heads, self.head_dim)
            check_apart("out", out, list(tensors_in(kv, index_q, index_keys)), in_place=q)
        self._check_cache("kv", kv, kv.batch, self.num_kv_heads, self.head_dim)
        self._check_cache("index_keys", index_keys, kv.batch, self.index_key_heads, self.index_dim)
        if not self.certified_keys and index_keys.format == "certified":
            raise ValueError("index_keys must not be CertifiedKeys in a plan whose certified_keys is False")
        if uses_kernels(self._device):
            if reason := self._kernels.refuse(q, kv, index_q, index_keys):
                raise NotImplementedError(f"a plan on {self._device} cannot run this: {reason}")
        elif not torch.equal(index_keys.seq_lens, kv.seq_lens):
            held, got = kv.seq_lens.tolist(), index_keys.seq_lens.tolist()
            raise ValueError(f"index_keys.seq_lens must be that of kv ({held}), got {got}")

    def _check_rows(
        self, name: str, value: Tensor | E4M3, batch: int, heads: int, dim: int, formats: tuple[str, ...] = ()
    ) -> None:
        checks.rows(name, value, "[batch * new_tokens, heads, dim]", formats, (self.dtype,))
        checks.no_gradient(name, value, "a plan computes none")
        tokens = batch * self.new_tokens, f"the cache's batch {batch} times new_tokens {self.new_tokens}"
        for axis, (size, meaning) in enumerate((tokens, (heads, "heads of the plan"), (dim, "dim of the plan"))):
            checks.size(name, value, axis, size, meaning)
        if value.device != self._device:
            raise ValueError(f"{name} must be on the device of the plan ({self._device}), got {value.device}")

    def _check_cache(self, name: str, cache: PagedKV | PagedIndexKeys, batch: int, heads: int, dim: int) -> None:
        expected: dict[str, object] = {"batch": batch, "num_heads": heads, "head_dim": dim, "page_size": self.page_size}
        expected |= {"device": self._device} | ({"dtype": self.dtype} if cache.format in ("plain", "certified") else {})
        for attribute, value in expected.items():
            if getattr(cache, attribute) != value:
                raise ValueError(f"{name}.{attribute} must be {value} in this plan, got {getattr(cache, attribute)}")
        if (pages := cache.page_table.shape[1]) > self.max_pages:
            raise ValueError(f"{name}.page_table.shape[1] must be at most max_pages ({self.max_pages}), got {pages}")


def uses_kernels(device: torch.device) -> bool:
    """Tells whether plans on this device run the Triton kernels."""
    return device.type == "cuda"
