# SPDX-License-Identifier: MIT
"""A user writes such a script. `test_types_of_a_user` checks it strictly, and runs it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import assert_type

from openmsa import (
    E4M3,
    MXFP4,
    NVFP4,
    CertifiedKeys,
    DecodePlan,
    Int8,
    PagedIndexKeys,
    PagedKV,
    Sequences,
    block_scores,
    dense_attention,
    explain,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)


def lengths(total: int) -> Sequences:
    """Any sequence of numbers gives lengths, here a tuple."""
    q_lens: Sequence[int] = (total,)
    return Sequences.from_lengths(q_lens, [total], device="cpu")


def prefill(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, wants_lse: bool) -> int:
    seqs = lengths(q.shape[0])
    out = msa_attention(q, k, v, index_q, index_k, topk=4, seqs=seqs)
    assert_type(out, Tensor)
    assert_type(msa_attention(q, k, v, index_q, index_k, 4, seqs, block_size=16, return_lse=False), Tensor)
    assert_type(msa_attention(q, k, v, index_q, index_k, return_lse=True), tuple[Tensor, Tensor])
    either = msa_attention(q, k, v, index_q, index_k, return_lse=wants_lse)
    assert_type(either, Tensor | tuple[Tensor, Tensor])

    scores = block_scores(index_q, index_k, seqs, block_size=16)
    blocks = select_blocks(index_q, index_k, 4, seqs, block_size=16)
    assert_type(select_blocks_from_scores(scores, 4, seqs, block_size=16), Tensor)
    rescored = torch.zeros(index_q.shape[:2], dtype=torch.int32)
    keys = CertifiedKeys.quantize(index_k)
    assert_type(select_blocks(index_q, keys, 4, block_size=16, certified=True, rescored=rescored), Tensor)
    assert_type(sparse_attention(q, k, v, blocks, seqs, block_size=16), Tensor)
    sparse, lse = sparse_attention(q, k, v, blocks, seqs, block_size=16, return_lse=True)
    assert_type(sparse_attention(q, k, v, blocks, return_lse=wants_lse), Tensor | tuple[Tensor, Tensor])
    return out.shape[0] + sparse.shape[0] + lse.shape[0]


def dense(q: Tensor, k: Tensor, v: Tensor, wants: bool) -> None:
    assert_type(dense_attention(q, k, v), Tensor)
    assert_type(dense_attention(q, k, v, causal=False, softmax_scale=0.1, block_size=16, impl="reference", check=True), Tensor)
    assert_type(dense_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
    assert_type(dense_attention(q, k, v, return_max_score=True), tuple[Tensor, Tensor])
    assert_type(dense_attention(q, k, v, return_lse=True, return_max_score=True), tuple[Tensor, Tensor, Tensor])
    assert_type(dense_attention(q, k, v, return_out=False, return_lse=True), Tensor)
    assert_type(dense_attention(q, k, v, return_out=False, return_max_score=True), Tensor)
    assert_type(dense_attention(q, k, v, return_out=False, return_lse=True, return_max_score=True), tuple[Tensor, Tensor])
    assert_type(dense_attention(q, k, v, return_lse=wants), Tensor | tuple[Tensor, ...])


def formats(rows: Tensor) -> None:
    e4m3 = E4M3(E4M3.quantize(rows, 0.5).data, 0.5)
    assert_type(e4m3.to("cpu"), E4M3)
    assert_type(e4m3[2:], E4M3)
    assert_type(e4m3.detach(), E4M3)
    assert_type(Int8.quantize(rows).to("cpu").error, Tensor)
    assert_type(NVFP4.quantize(rows, 1.0).in_layout("128x4").to("cpu").dequantize(), Tensor)
    assert_type(MXFP4.allocate((3, 1, 32)).to("cpu").scale, Tensor)
    assert_type(CertifiedKeys.quantize(rows).to("cpu").coarse, Int8)


def decode(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> None:
    table = torch.arange(4, dtype=torch.int32)[None]
    kv = PagedKV.allocate(table, 4, k.shape[1], 64, k.shape[2])
    index_keys = PagedIndexKeys.allocate(table, 4, index_k.shape[1], 64, index_k.shape[2], format="certified")
    kv.append(k, v)
    index_keys.append(index_k)
    k_held, v_held, starts = kv.gather()
    keys_held, _ = index_keys.gather()
    assert_type((k_held, v_held, starts, keys_held), tuple[Tensor, Tensor, Tensor, Tensor])
    assert_type(kv.to("cpu"), PagedKV)
    assert_type(index_keys.to("cpu").seq_lens, Tensor)
    plan = DecodePlan(
        max_batch=1,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        index_dim=index_q.shape[2],
        page_size=64,
        max_pages=4,
        dtype=q.dtype,
        device="cpu",
    )
    assert_type(plan.run(q[-1:], kv, index_q[-1:], index_keys), Tensor)
    assert_type((plan.blocks, plan.lse), tuple[Tensor, Tensor])
    with tempfile.TemporaryFile() as file:
        torch.save(kv, file)


def explained(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> list[str | None]:
    stages = explain(msa_attention, q, k, v, index_q, index_k).by_stage
    return [stage.chosen for stage in (*stages, *explain(dense_attention, q, k, v).by_stage)]


def main() -> None:
    q, k, v = torch.randn(200, 4, 32), torch.randn(200, 2, 32), torch.randn(200, 2, 32)
    index_q, index_k = torch.randn(200, 2, 32), torch.randn(200, 1, 32)
    assert prefill(q, k, v, index_q, index_k, True) == 600
    dense(q, k, v, True)
    formats(k)
    decode(q, k, v, index_q, index_k)
    assert explained(q, k, v, index_q, index_k) == ["cpu", "cpu", "cpu"]


if __name__ == "__main__":
    main()
