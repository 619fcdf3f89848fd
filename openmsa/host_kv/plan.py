# SPDX-License-Identifier: MIT
"""`HostDecodePlan` runs the sparse attention of a decode step over keys and values in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmsa.decode import DecodePlan
from openmsa.decode import cpu as decode_cpu
from openmsa.host_kv import cpu
from openmsa.host_kv.cache import HostKV, refuse_to_trace
from openmsa.kv_cache import E4M3, PagedIndexKeys, PagedKV
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences


@dataclass(kw_only=True, eq=False)
class HostDecodePlan(DecodePlan):
    """Does what `DecodePlan` does for layers whose keys and values a `HostKV` holds: selects by index keys on the device,
    fetches those chosen blocks that the layer's block cache lacks, and attends to its slots.

    The fields are those of `DecodePlan`; `page_size` is a multiple of `block_size`. One plan serves layers that follow each
    other, each with its own `HostKV`. Selections are those of a `DecodePlan`, bit for bit, and on a GPU so are outputs and lse
    where a `DecodePlan` takes three launches or more. With several new tokens they may be rounded otherwise, because those of a
    `DecodePlan` may share the reading of blocks.

    On a GPU a run is five launches, more with certified index keys, and waits for nothing. Queries whose heads do not lie next
    to each other are copied first, and such an `out` is written by a copy.
    """

    _kv_type = HostKV  # type: ignore[assignment]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size % self.block_size:
            raise ValueError(f"page_size must be a multiple of block_size ({self.block_size}), got {self.page_size}")

    def _allocate_for_kernels(self) -> None:
        from openmsa.host_kv.kernels import HostKernels

        super()._allocate_for_kernels()
        self._kernels = HostKernels(self._kernels, torch.empty_like(self._out))  # type: ignore[assignment]

    def _check_call(  # type: ignore[override]
        self, q: Tensor, kv: HostKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor | None
    ) -> None:
        super()._check_call(q, kv, index_q, index_keys, out)  # type: ignore[arg-type]
        if not isinstance(q, Tensor):
            raise NotImplementedError(f"q must be a plain tensor beside a HostKV, got {type(q).__name__}")
        if kv.block_size != self.block_size:
            raise ValueError(f"kv.block_size must be that of the plan ({self.block_size}), got {kv.block_size}")
        for name in ("topk", "new_tokens"):
            most, got = getattr(self, name), getattr(kv, name)
            if got < most:
                raise ValueError(f"kv.{name} must be at least that of the plan ({most}), got {got}")

    def run(  # type: ignore[override]
        self,
        q: Tensor,
        kv: HostKV,
        index_q: Tensor | E4M3,
        index_keys: PagedIndexKeys,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Runs one layer, as `DecodePlan.run` does. kv: the layer's cache, whose block cache the run changes. The queries must
        be plain, the index queries may also be `E4M3`."""
        refuse_to_trace("HostDecodePlan.run")
        return super().run(q, kv, index_q, index_keys, out=out)  # type: ignore[arg-type]

    def _run_stages(  # type: ignore[override]
        self, q: Tensor, kv: HostKV, index_q: Tensor | E4M3, index_keys: PagedIndexKeys, out: Tensor
    ) -> None:
        kv.check_pages(kv.seq_lens)
        _, blocks = decode_cpu.select(self, index_q, index_keys)
        table, lens = cpu.bring(kv, blocks, self.new_tokens)
        lines, short = len(lens), PagedKV(kv.cache.k, kv.cache.v, table, lens)
        seqs = Sequences(cu_seqlens_q=torch.arange(lines + 1, dtype=torch.int32, device="cpu"), max_seqlen_q=1)
        places = torch.arange(self.topk, dtype=torch.int32, device="cpu").expand(lines, 1, -1)
        grouped = q.reshape(lines, -1, self.head_dim)
        result, lse = sparse_attention(
            *(grouped, short, None, places, seqs), block_size=self.block_size, softmax_scale=self.softmax_scale, return_lse=True
        )
        for buffer, value in ((self.blocks, blocks), (out, result.view_as(q)), (self.lse, lse.view_as(self.lse))):
            buffer.copy_(value)
