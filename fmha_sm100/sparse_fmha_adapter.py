# SPDX-License-Identifier: MIT
"""Attends over selected pages, planned by requests, under the public names `sparse_fmha_plan` and `sparse_fmha`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha_sm100.operands import Scale
from fmha_sm100.plan import _fmha_sm100_plan
from openmsa.runtime import checks


def sparse_fmha_plan(
    qo_segment_lens: Tensor,
    kv_segment_lens: Tensor,
    num_qo_heads: int,
    num_kv_heads: int = -1,
    qo_offset: int | Tensor | None = None,
    num_kv_splits: int = -1,
    page_size: int = -1,
    output_maxscore: bool = False,
    kv_block_num: int = -1,
    causal: bool = True,
    usable_SM_count: int = -1,
    use_fp8_kvcache: bool = False,
    *,
    device: torch.device | str | int | None = None,
    max_kv_len: int | None = None,
) -> dict[str, Any]:
    """Plans `sparse_fmha` as `_fmha_sm100_plan` does with ``sparse_kernel_mode="prefill"``, with a row for each request.

    Names, order, defaults and the dict with "MM-SA-Nv" are those of the public function. Beyond it, this one takes kv_block_num
    from 1 to 64, page sizes from 16 to 256 and ``causal=False``. Both require output_maxscore to be False.
    """
    if output_maxscore:
        raise ValueError("output_maxscore must be False: attention over selected blocks gives no max scores, got True")
    checks.integer("kv_block_num", kv_block_num, 1, 64)
    checks.integer("page_size", page_size, 16, 256)
    return _fmha_sm100_plan(
        qo_segment_lens,
        kv_segment_lens,
        num_qo_heads,
        num_kv_heads,
        qo_offset,
        num_kv_splits,
        page_size,
        kv_block_num=kv_block_num,
        usable_SM_count=usable_SM_count,
        causal=causal,
        sparse_kernel_mode="prefill",
        use_fp8_kvcache=use_fp8_kvcache,
        device=device,
        max_kv_len=max_kv_len,
    )


def sparse_fmha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_info: dict[str, Any],
    out: Tensor | None = None,
    max_score: Tensor | None = None,
    sm_scale: float | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    o_scale: float | None = None,
    kv_indices: Tensor | None = None,
    output_maxscore: bool = True,
    output_o: bool = True,
    kv_block_indexes: Tensor | None = None,
    q_offset_override: int | Tensor | None = None,
    check_input_valid: bool = False,
    *,
    return_lse: bool = False,
    lse: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Does what `fmha_sm100` does over selected pages, for the dict of `sparse_fmha_plan`. Returns ``(out, None)``, with
    `return_lse` or `lse` a third item.

    Names, order and defaults are those of the public function. Beyond it, this one honours every scale, writes into `out`,
    reads nothing on the host, and gives each query head its own selection where kv_block_indexes has num_qo_heads heads.
    """
    from fmha_sm100.api import _fmha_sm100  # That module offers this function too.

    if kv_block_indexes is None:
        raise ValueError("kv_block_indexes must be given, got None")
    return _fmha_sm100(
        *(q, k, v, plan_info, kv_indices, kv_block_indexes, q_offset_override, out, max_score),
        sm_scale=sm_scale,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        o_scale=o_scale,
        output_maxscore=output_maxscore,
        output_o=output_o,
        check_input_valid=check_input_valid,
        return_lse=return_lse,
        lse=lse,
    )
