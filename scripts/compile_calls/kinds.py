# SPDX-License-Identifier: MIT
"""Each kind of call is a NamedTuple here, whose `run` makes the inputs and calls a public function."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch

import fmha_sm100
import openmsa
from fmha_sm100 import sparse
from openmsa.decode import memory
from openmsa.dense_attention import STAGE as DENSE
from openmsa.dense_attention import triton_backward as dense_backward
from openmsa.index_loss import STAGE as LOSS
from openmsa.index_loss import triton_loss
from openmsa.integrations import new_tokens
from openmsa.integrations.sizes import LayerSizes
from openmsa.parallel import triton_exchange
from openmsa.parallel.exchange import Choice
from openmsa.runtime import devices
from openmsa.runtime.recording import GPU
from openmsa.sparse_attention import STAGE as SPARSE
from openmsa.sparse_attention import triton_backward as sparse_backward

from .inputs import DTYPES, PAGES, empty, index_keys, kv, lengths, paged, rows

LONG = 131072


class Scores(NamedTuple):
    """Calls `block_scores`."""

    q: str
    k: str
    queries: int
    batch: int = 1
    keys: int = LONG
    dim: int = 128
    block: int = 128
    page: int = 0
    heads: tuple[int, int] = (4, 1)

    def run(self) -> Any:
        index_q = rows(self.q, self.batch * self.queries, self.heads[0], self.dim)
        held = index_keys(self.k, self.batch, self.keys, self.heads[1], self.dim, self.page)
        seqs = lengths(self.batch, self.queries, self.keys, not self.page)
        return openmsa.block_scores(index_q, held, seqs, block_size=self.block)


class Select(NamedTuple):
    """Calls `select_blocks`, with certified=True where the keys are certified."""

    q: str
    k: str
    queries: int
    batch: int = 1
    keys: int = LONG
    dim: int = 128
    block: int = 128
    page: int = 0
    topk: int = 16
    init: int = 0
    local: int = 1
    heads: tuple[int, int] = (4, 1)

    def run(self) -> Any:
        index_q = rows(self.q, self.batch * self.queries, self.heads[0], self.dim)
        held = index_keys(self.k, self.batch, self.keys, self.heads[1], self.dim, self.page)
        seqs = lengths(self.batch, self.queries, self.keys, not self.page)
        forced = {"init_blocks": self.init, "local_blocks": self.local}
        certified = self.k.startswith("certified")
        return openmsa.select_blocks(index_q, held, self.topk, seqs, block_size=self.block, certified=certified, **forced)


class TopK(NamedTuple):
    """Calls `select_blocks_from_scores`."""

    queries: int
    blocks: int
    topk: int

    def run(self) -> Any:
        scores = empty((4, self.queries, self.blocks), torch.float32)
        return openmsa.select_blocks_from_scores(scores, self.topk)


class Sparse(NamedTuple):
    """Calls `sparse_attention`."""

    q: str
    k: str
    queries: int
    batch: int = 1
    keys: int = 32768
    dim: int = 128
    block: int = 128
    page: int = 0
    heads: tuple[int, int] = (64, 4)
    topk: int = 16
    scale: float = 0.1
    impl: str = "auto"

    def run(self) -> Any:
        total = self.batch * self.queries
        q = rows(self.q, total, self.heads[0], self.dim)
        k, v = kv(self.k, self.batch, self.keys, self.heads[1], self.dim, self.page)
        blocks = torch.empty(total, self.heads[1], self.topk, dtype=torch.int32, device=GPU)
        seqs = lengths(self.batch, self.queries, self.keys, not self.page)
        options = {"block_size": self.block, "softmax_scale": self.scale, "impl": self.impl}
        return openmsa.sparse_attention(q, k, v, blocks, seqs, return_lse=True, **options)


class SparseBackward(NamedTuple):
    """Calls the backward of `sparse_attention`. tuned: as the backward itself says."""

    kind: str
    queries: int = 4096
    dim: int = 128
    block: int = 128
    heads: tuple[int, int] = (64, 4)
    topk: int = 16
    selection_heads: int = 0
    tuned: bool | None = None

    def run(self) -> Any:
        q, k, v = (rows(self.kind, self.queries, heads, self.dim) for heads in (*self.heads, self.heads[1]))
        shape = (self.queries, self.selection_heads or self.heads[1], self.topk)
        blocks = torch.zeros(shape, dtype=torch.int32, device=GPU)
        call = SPARSE.check(q, k, v, blocks, block_size=self.block)
        lse = empty(q.shape[:2], torch.float32)
        given = (*call._replace(out=q, lse=lse), q, lse)
        return sparse_backward.sparse_attention_backward(*given, tuned=self.tuned)


class Dense(NamedTuple):
    """Calls `dense_attention`. results: the letters of those returned, "o" output, "l" lse and "m" max score."""

    q: str
    k: str
    queries: int
    batch: int = 1
    keys: int = LONG
    dim: int = 128
    block: int = 128
    page: int = 0
    heads: tuple[int, int] = (64, 4)
    results: str = "o"

    def run(self) -> Any:
        q = rows(self.q, self.batch * self.queries, self.heads[0], self.dim)
        k, v = kv(self.k, self.batch, self.keys, self.heads[1], self.dim, self.page)
        seqs = lengths(self.batch, self.queries, self.keys, not self.page)
        wanted = {f"return_{name}": name[0] in self.results for name in ("out", "lse", "max_score")}
        return openmsa.dense_attention(q, k, v, seqs, block_size=self.block, **wanted)


class DenseBackward(NamedTuple):
    """Calls the backward of `dense_attention`."""

    kind: str
    dim: int = 128
    heads: tuple[int, int] = (64, 4)
    causal: bool = True
    queries: int = 4096

    def run(self) -> Any:
        q, k, v = (rows(self.kind, self.queries, heads, self.dim) for heads in (*self.heads, self.heads[1]))
        call = DENSE.check(q, k, v, causal=self.causal)
        lse = empty(q.shape[:2], torch.float32)
        return dense_backward.dense_attention_backward(*call._replace(out=q, lse=lse), q, lse)


class IndexLoss(NamedTuple):
    """Calls `index_loss`. visible: whether all visible keys are read. lse: whether the main attention's is given."""

    kind: str
    index_kind: str = "bf16"
    visible: bool = False
    queries: int = 4096
    dim: int = 128
    index_dim: int = 128
    block: int = 128
    heads: tuple[int, int] = (64, 4)
    index_heads: int = 4
    key_heads: int = 1
    selection_heads: int = 4
    lse: bool = True
    return_loss: bool = True
    gradients: bool = True

    def run(self) -> Any:
        q, k = (rows(self.kind, self.queries, heads, self.dim) for heads in self.heads)
        index_q, index_k = (rows(self.index_kind, self.queries, n, self.index_dim) for n in (self.index_heads, self.key_heads))
        blocks = torch.zeros((self.queries, self.selection_heads, 16), dtype=torch.int32, device=GPU)
        call = LOSS.check(
            q, k, index_q, index_k, None if self.visible else blocks, block_size=self.block, return_loss=self.return_loss,
            lse=empty(q.shape[:2], torch.float32) if self.lse else None,
        )  # fmt: skip
        return triton_loss.loss_and_gradients(*call, gradients=self.gradients)


class Plan(NamedTuple):
    """Runs a step of a `DecodePlan`. strided: most tokens of one launch whose scoring programs take tiles in strides."""

    batch: int
    keys: int
    q: str = "bf16"
    k: str = "bf16"
    index_q: str = "bf16"
    index_k: str = "bf16"
    new: int = 1
    heads: tuple[int, int] = (64, 4)
    index_heads: int | None = None
    dim: int = 128
    index_dim: int = 128
    block: int = 128
    page: int = 128
    topk: int = 16
    init: int = 0
    local: int = 1
    strided: int = memory.STRIDED_TOKENS

    def run(self) -> Any:
        with mock.patch.object(memory, "STRIDED_TOKENS", self.strided):
            return self.step()

    def step(self) -> Any:
        q_heads, kv_heads = self.heads
        dtype = DTYPES[next(kind for kind in (self.q, self.k, self.index_q, self.index_k, "bf16") if kind in DTYPES)]
        plan = openmsa.DecodePlan(
            max_batch=self.batch, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=self.dim, page_size=self.page,
            max_pages=-(-self.keys // self.page), new_tokens=self.new, index_heads=self.index_heads, index_dim=self.index_dim,
            topk=self.topk, block_size=self.block, init_blocks=self.init, local_blocks=self.local, dtype=dtype,
        )  # fmt: skip
        tokens, index_heads = self.batch * self.new, self.index_heads or kv_heads
        cache, _ = kv(self.k, self.batch, self.keys, kv_heads, self.dim, self.page)
        held = index_keys(self.index_k, self.batch, self.keys, 1, self.index_dim, self.page)
        index_q = rows(self.index_q, tokens, index_heads, self.index_dim)
        return plan.run(rows(self.q, tokens, q_heads, self.dim), cache, index_q, held)


class Exchange(NamedTuple):
    """Exchanges the candidates and partial results of a decode step with ranks that share memory, as rank 1 of them."""

    ranks: int
    dtype: str = "bf16"
    topk: int = 16
    dim: int = 128
    init: int = 0
    local: int = 1
    page_blocks: int = 1

    def run(self) -> Any:
        tokens, reach = 32, triton_exchange.Reach(1, self.ranks, 10**9)
        words = torch.zeros(1, dtype=torch.int64, device=GPU)
        mail = triton_exchange.Mailbox(torch.zeros(self.ranks, dtype=torch.int64, device=GPU), words, words.clone())
        ids, visible = (empty(shape, torch.int32) for shape in ((tokens, 4, self.topk), (tokens,)))
        choice = Choice(self.topk, self.init, self.local, self.page_blocks)
        scores = empty((4, tokens, 512), torch.float32)
        triton_exchange.launch_choose(scores, ids, visible, ids.clone(), ids.clone(), mail, 128, choice, reach)
        for blocks in (512, 8192):
            scores = empty((tokens, 4, blocks), torch.float32).transpose(0, 1)
            places = (scores, visible, visible.clone(), ids.clone(), ids.clone(), mail, 128, choice, reach)
            for opened in (None, scores.view(torch.int32)):
                triton_exchange.launch_select(*places, pdl=devices.has_pdl(GPU), opened=opened)
        part, lse = rows(self.dtype, tokens, 64, self.dim), empty((tokens, 64), torch.float32)
        places = (part, lse, part.clone(), lse.clone(), mail, 2048, reach)
        triton_exchange.launch_merge(*places)
        triton_exchange.launch_blend(*places, pdl=devices.has_pdl(GPU))


class HostPlan(NamedTuple):
    """Appends to a `HostKV` and runs a step of a `HostDecodePlan`."""

    batch: int
    keys: int
    k: str = "plain"
    new: int = 1
    heads: tuple[int, int] = (64, 4)
    dim: int = 128
    block: int = 128
    page: int = 128
    topk: int = 16

    def run(self) -> Any:
        q_heads, kv_heads = self.heads
        table, _ = paged(self.batch, self.keys, self.page)
        steps: dict[str, int] = {"block_size": self.block, "topk": self.topk, "new_tokens": self.new}
        slots = self.batch * kv_heads * self.topk * self.new
        sizes = (PAGES, kv_heads, self.page, self.dim, DTYPES["bf16"], self.k)
        cache = openmsa.HostKV.allocate(table, *sizes, cache_blocks=slots, **steps)
        plan = openmsa.HostDecodePlan(
            max_batch=self.batch, num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=self.dim, page_size=self.page,
            max_pages=-(-self.keys // self.page), **steps,
        )  # fmt: skip
        tokens = self.batch * self.new
        new = rows("bf16", tokens, kv_heads, self.dim)
        cache.append(new, new)
        held = index_keys("bf16", self.batch, self.keys, 1, 128, self.page)
        index_q = rows("bf16", tokens, kv_heads, 128)
        return plan.run(rows("bf16", tokens, q_heads, self.dim), cache, index_q, held)


class Append(NamedTuple):
    """Calls `append` of a cache, and `dequantize` of its rows where they have a format."""

    k: str
    dim: int = 128
    page: int = 128

    def run(self) -> Any:
        held = index_keys(self.k, 4, 512, 4, self.dim, self.page)
        new = rows("bf16", 64, 4, self.dim)
        held.append(new, torch.arange(5, dtype=torch.int32, device=GPU) * 16)
        if self.k != "bf16":
            held.keys.dequantize(torch.bfloat16)


class NewTokens(NamedTuple):
    """Prepares an engine's new tokens in caches of a kind, "e4m3" as bytes."""

    kind: str
    tokens: int
    heads: tuple[int, int] = (64, 4)
    dim: int = 128

    def run(self) -> Any:
        (q_heads, kv_heads), dim = self.heads, self.dim
        layer = LayerSizes(
            num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim, index_heads=kv_heads, index_dim=dim, topk=16,
            block_size=128, init_blocks=0, local_blocks=1, softmax_scale=0.1,
        )  # fmt: skip
        qkv = empty((self.tokens, (q_heads + 3 * kv_heads + 1) * dim), torch.bfloat16)
        norms = new_tokens.Norms(*(empty((dim,), torch.bfloat16) for _ in range(4)))
        positions, slots = (torch.zeros(self.tokens, dtype=torch.int64, device=GPU) for _ in range(2))
        places = new_tokens.Places(positions, empty((LONG, dim // 2), torch.bfloat16), slots, slots)
        dtypes = (torch.uint8, torch.float8_e4m3fn) if self.kind == "e4m3" else (DTYPES[self.kind],) * 2
        shapes = (PAGES, kv_heads, 128, 2 * dim), (PAGES, 128, dim)
        caches = new_tokens.Caches(*(empty(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)))
        return new_tokens.prepare(qkv, norms, 1e-6, places, caches, layer, dtypes[1])


class DropIn(NamedTuple):
    """Calls `fmha_sm100` with MiniMax-M3's heads on pages. what: "scores", "dense" or "sparse"."""

    what: str
    kind: str
    batch: int
    queries: int
    heads: tuple[int, int] = (64, 4)
    keys: int = 32768
    page: int = 128

    def run(self) -> Any:
        dtype = torch.float8_e4m3fn if self.kind == "e4m3" else DTYPES[self.kind]
        (q_heads, kv_heads), scores, total = self.heads, self.what == "scores", self.batch * self.queries
        q_heads, kv_heads = (kv_heads, 1) if scores else self.heads
        lens = (torch.full((self.batch,), n, dtype=torch.int32) for n in (self.queries, self.keys))
        pages = self.keys // self.page
        table = torch.zeros(self.batch * pages, dtype=torch.int32, device=GPU)
        options: dict[str, Any] = {"num_kv_heads": kv_heads, "page_size": self.page, "device": "cuda"}
        options |= {"kv_block_num": 16} if self.what == "sparse" else {"output_maxscore": scores}
        plan = fmha_sm100.fmha_sm100_plan(*lens, q_heads, use_fp8_kvcache=self.kind == "e4m3", **options)
        q = empty((total, q_heads, 128), dtype)
        k, v = empty((PAGES, kv_heads, self.page, 256), dtype).split(128, dim=-1)
        more: dict[str, Any] = {"output_o": not scores, "output_maxscore": scores}
        if self.what == "sparse":
            more["kv_block_indexes"] = torch.zeros(total, kv_heads, 16, dtype=torch.int32, device=GPU)
        return fmha_sm100.fmha_sm100(q, k, v, plan, kv_indices=table, **more)


class TopKDropIn(NamedTuple):
    """Calls `sparse_topk_select` on scores in one of their two layouts."""

    queries: int
    blocks: int
    layout: str

    def run(self) -> Any:
        shape = (4, self.blocks, self.queries) if self.layout == "HKT" else (self.queries, 4, self.blocks)
        scores = empty(shape, torch.float32)
        options = {"force_end_blocks": 1, "max_score_layout": self.layout}
        return fmha_sm100.sparse_topk_select(scores, 16, self.blocks, **options)


class ByKeys(NamedTuple):
    """Calls `build_k2q_csr` and `sparse_atten_func` for one request."""

    kind: str
    queries: int
    keys: int = 4096
    page: int = 0

    def run(self) -> Any:
        dtype = torch.float8_e4m3fn if self.kind == "e4m3" else DTYPES[self.kind]
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=GPU) for n in (self.queries, self.keys))
        lens = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": self.queries, "max_seqlen_k": self.keys}
        ids = torch.arange(16, dtype=torch.int32, device=GPU).expand(4, self.queries, -1).contiguous()
        longest = {"max_seqlen_q": self.queries, "max_seqlen_k": self.keys}
        csr = sparse.build_k2q_csr(ids, cu_q, cu_k, 128, total_k=self.keys, qhead_per_kv=16, **longest)
        shape = (PAGES, 4, self.page, 128) if self.page else (self.keys, 4, 128)
        pages = {"page_table": paged(1, self.keys, self.page)[0], "seqused_k": cu_k.diff()} if self.page else {}
        rows = (empty((self.queries, 64, 128), dtype), empty(shape, dtype), empty(shape, dtype))
        return sparse.sparse_atten_func(*rows, *csr[:2], 16, blk_kv=128, causal=True, **lens, **pages)
