# SPDX-License-Identifier: MIT
"""The dense kernel as the host code launches it, for the compile check."""

from __future__ import annotations

from collections.abc import Iterator

from openmsa.dense_attention.triton_config import Config, configure, padded_dim, spans
from openmsa.dense_attention.triton_kernel import dense_kernel
from openmsa.dense_attention.triton_operands import GROUP_WORDS, GROUPS, HEAD_SCALE, NO_SCALE, PAGE_SCALE, SWIZZLED_WORDS
from openmsa.kv_cache.triton_numbers import FORMAT_IDS
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.runtime.variants import Variant


def dense_variants(arch: int) -> Iterator[Variant]:
    """Prefill, short queries and decode of M3 heads, flat and paged, with each result, and other dims; then the formats."""
    cases = (  # name, q, batch, queries, keys, group, head_dim, page_size, block_size, results
        ("prefill flat", "bf16", 1, 16384, 131072, 16, 128, 0, None, ("out",)),
        ("prefill pages", "bf16", 1, 16384, 131072, 16, 128, 128, None, ("out", "lse")),
        ("prefill max score", "bf16", 1, 16384, 131072, 16, 128, 0, 128, ("out", "lse", "max_score")),
        ("max score alone", "bf16", 1, 16384, 131072, 16, 128, 0, 128, ("max_score",)),
        ("short queries", "fp16", 1, 64, 131072, 16, 128, 128, None, ("out", "lse")),
        ("decode pages", "bf16", 32, 1, 32768, 16, 128, 128, None, ("out", "lse")),
        ("decode pages of 16", "bf16", 32, 1, 32768, 16, 128, 16, None, ("out",)),
        ("decode max score", "bf16", 8, 1, 32768, 16, 128, 64, 16, ("out", "max_score")),
        ("prefill d64", "fp16", 1, 8192, 8192, 3, 64, 0, None, ("out", "lse")),
        ("prefill d96", "bf16", 1, 8192, 8192, 1, 96, 0, None, ("out", "lse")),
        ("prefill d256", "bf16", 1, 8192, 8192, 8, 256, 0, 48, ("out", "max_score")),
        ("decode d256", "bf16", 8, 1, 32768, 8, 256, 64, None, ("out",)),
    )
    for name, *case in cases:
        yield _of_case(arch, name, "plain", NO_SCALE, *case)
    stored = (
        ("prefill flat", "fp8e4nv", 1, 16384, 131072, 16, 128, 0, None, ("out",), "e4m3", HEAD_SCALE),
        ("prefill max score", "fp8e4nv", 1, 16384, 131072, 16, 128, 0, 128, ("out", "lse", "max_score"), "e4m3", HEAD_SCALE),
        ("prefill flat", "bf16", 1, 16384, 131072, 16, 128, 0, None, ("out",), "e4m3", HEAD_SCALE),
        ("prefill pages", "bf16", 1, 16384, 131072, 16, 128, 128, None, ("out", "lse"), "e4m3", PAGE_SCALE),
        ("prefill flat", "bf16", 1, 16384, 131072, 16, 128, 0, None, ("out",), "nvfp4", GROUP_WORDS),
        ("prefill d96", "bf16", 1, 16384, 131072, 3, 96, 128, None, ("out",), "nvfp4", GROUPS),
        ("decode d16", "fp16", 32, 1, 32768, 16, 16, 128, None, ("out",), "nvfp4", GROUPS),
        ("prefill d256", "bf16", 1, 8192, 8192, 8, 256, 0, None, ("out",), "e4m3", HEAD_SCALE),
        ("prefill", "fp8e4nv", 1, 8192, 8192, 16, 128, 0, None, ("out",), "plain", NO_SCALE),
        ("decode pages", "fp8e4nv", 32, 1, 32768, 16, 128, 128, None, ("out", "lse"), "e4m3", HEAD_SCALE),
        ("decode pages", "bf16", 32, 1, 32768, 16, 128, 128, None, ("out", "lse"), "e4m3", HEAD_SCALE),
        ("decode pages of 16", "bf16", 32, 1, 32768, 16, 128, 16, None, ("out",), "e4m3", PAGE_SCALE),
        ("decode pages", "bf16", 32, 1, 32768, 16, 128, 128, None, ("out", "lse"), "nvfp4", GROUP_WORDS),
        ("decode pages of 16", "fp16", 32, 1, 32768, 16, 128, 16, None, ("out",), "nvfp4", SWIZZLED_WORDS),
        ("decode max score", "bf16", 8, 1, 32768, 16, 128, 128, 128, ("max_score",), "nvfp4", GROUP_WORDS),
    )
    for name, *case, key_format, scales in stored:
        yield _of_case(arch, name, key_format, scales, *case)


def _of_case(
    arch: int,
    name: str,
    key_format: str,
    scales: int,
    q: str,
    batch: int,
    queries: int,
    keys: int,
    group: int,
    head_dim: int,
    page_size: int,
    block_size: int | None,
    results: tuple[str, ...],
) -> Variant:
    query_format = "e4m3" if q == "fp8e4nv" else "plain"
    config = configure(
        batch, queries, keys, 4, group, head_dim, COMPILE_TARGETS[arch], key_format, query_format, "max_score" in results
    )
    return variant(name, config, q, key_format, scales, group, head_dim, page_size, block_size, results, arch)


def variant(
    name: str,
    config: Config,
    q: str,
    key_format: str,
    scales: int,
    group: int,
    head_dim: int,
    page_size: int,
    block_size: int | None,
    results: tuple[str, ...],
    arch: int,
) -> Variant:
    """As `openmsa.dense_attention.triton_forward` launches it. q: Triton's name of the type of queries."""
    eight = "fp8e4nv" if arch >= 90 else "u8"
    rows, out = (eight, "bf16") if q == "fp8e4nv" else (q, q)
    codes = {"plain": "bf16" if q == "fp8e4nv" else q, "e4m3": eight, "nvfp4": "u8"}[key_format]
    strides = [f"stride_{x}" for x in ["qt", "qh", "kp", "kh", "kn", "vp", "vh", "vn", "tb", "ot", "oh"]]
    arguments = {"q": f"*{rows}", "k": f"*{codes}", "v": f"*{codes}", "out": f"*{out}", "part": f"*{out}", "scale": "fp32"}
    arguments |= dict.fromkeys(("lse", "max_score", "part_lse", "q_scale", "k_global", "v_global"), "*fp32")
    arguments |= {"staged": "*i16"} | dict.fromkeys(("cu_q", "cu_k", "q_offset", "page_table", "arrived"), "*i32")
    arguments |= dict.fromkeys(("k_scale", "v_scale"), f"*{eight}" if key_format == "nvfp4" else "*fp32")
    arguments |= dict.fromkeys(strides, "i32:16") | dict.fromkeys(("stride_lt", "stride_mh", "stride_mt"), "i32")
    arguments |= dict.fromkeys(("stride_qs", *(f"stride_{x}s{y}" for x in "kv" for y in "phng")), "i32")
    arguments |= dict.fromkeys(("tiles", "splits", "num_pages", "num_blocks", "capacity"), "i32")
    constants: dict[str, object] = dict.fromkeys(("stride_qd", "stride_kd", "stride_vd", "stride_tp"), 1)
    constants |= dict.fromkeys(("stride_ksg", "stride_vsg"), 1)
    padded = padded_dim(head_dim, FORMAT_IDS[key_format])
    span, blocks_a_tile = spans(config.keys, block_size)
    box = f"tensordesc<{codes}[1, 1, {config.keys}, {padded // (2 if key_format == 'nvfp4' else 1)}]>"
    described = arch >= 90 and span % config.keys == 0 and page_size % config.keys == 0
    (arguments if described else constants).update(dict.fromkeys(("k_desc", "v_desc"), box if described else None))
    absent = {"out", "lse", "max_score"} - set(results)
    absent |= {"part", "part_lse", "arrived"} if config.splits == 1 else set()
    absent |= set() if page_size else {"page_table", "q_offset"}
    absent |= {"k_scale", "v_scale"} if scales == NO_SCALE else set()
    absent |= set() if key_format == "nvfp4" else {"k_global", "v_global"}
    absent |= set() if q == "fp8e4nv" else {"q_scale"}
    absent |= set() if config.stages_rows(key_format != "plain" or q == "fp8e4nv", q == "fp16", arch) else {"staged"}
    constants |= dict.fromkeys(absent)
    constants |= {"G": group, "D": head_dim, "BM": config.rows, "BN": config.keys, "BD": padded, "PAGE": page_size}
    constants |= {"SPAN": span, "NB": blocks_a_tile, "CAUSAL": True, "POSITIVE": True, "SPLIT": config.splits > 1}
    constants |= {"FORMAT": FORMAT_IDS[key_format], "KS": scales, "VS": scales, "QK8": config.qk8}
    constants |= {"STAGES": config.num_stages}
    arguments = {key: kind for key, kind in arguments.items() if key not in constants}
    # 128 rows on 4 warps spill, most of all in the masked tail, and are still the fastest of those measured.
    may_spill = 640 if config.rows == 128 else 128
    form = f"{key_format}{f' scales {scales}' if scales else ''}"
    return Variant(
        f"{name} {q} {form}",
        dense_kernel,
        arguments,
        constants,
        config.num_warps,
        config.num_stages,
        wgmma=config.rows >= 64,
        dot=True,
        may_spill=may_spill,
    )
