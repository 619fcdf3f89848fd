# SPDX-License-Identifier: MIT
"""This module runs MiniMax-M3 of vLLM (0.33) on this library outside SM100. It follows vLLM's published sources and is tested
against stand-ins with the same names and signatures, not against vLLM itself.

It has two plug-ins of vLLM's entry point group `vllm.general_plugins`, which vLLM loads in each of its processes. They do
nothing unless named, so that installing this package changes no server:

    VLLM_PLUGINS=openmsa_attend,openmsa_indexer vllm serve MiniMaxAI/MiniMax-M3 ...

openmsa_attend:   prefill attention (`build_k2q_csr`, `sparse_atten_func`). Decode stays with vLLM's Triton kernels unless its
                  own setting ``minimax_m3_msa_decode_backend`` says otherwise.
openmsa_indexer:  block scores and top-k of prefill, and the top-k of decode. vLLM's CuTe-DSL kernel makes the scores of decode.

Both put this distribution's `fmha_sm100` in the place of the copy that vLLM ships, ``vllm.third_party.fmha_sm100``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

MODELS = "vllm.models.minimax_m3"
VENDORED = "vllm.third_party.fmha_sm100"
logger = logging.getLogger(__name__)


def attend_plugin() -> None:
    """Calls `register_attend` where ``VLLM_PLUGINS`` names the entry point `openmsa_attend`, which this is."""
    if _asked_for("openmsa_attend"):
        register_attend()


def indexer_plugin() -> None:
    """Calls `register_indexer` where ``VLLM_PLUGINS`` names the entry point `openmsa_indexer`, which this is."""
    if _asked_for("openmsa_indexer"):
        register_indexer()


def register_attend() -> None:
    """Lets vLLM choose its MSA attention on every CUDA device where it would for SM100. Calling it again changes nothing."""
    provide_package()
    _wrap(f"{MODELS}.common.sparse_attention", "select_main_backend_and_impl_cls", _select_main)


def register_indexer() -> None:
    """Lets vLLM choose its MSA indexer on every CUDA device where it would for SM100. Calling it again changes nothing."""
    provide_package()
    _wrap(f"{MODELS}.common.indexer", "select_indexer_impl_cls", _select_indexer)


def provide_package() -> None:
    """Makes ``vllm.third_party.fmha_sm100`` and its modules this distribution's `fmha_sm100`."""
    package = importlib.import_module("fmha_sm100")
    if sys.modules.get(VENDORED) is package:
        return
    if any(name == VENDORED or name.startswith(VENDORED + ".") for name in sys.modules):
        logger.warning("%s was imported before the plug-in; modules that hold names of it keep them", VENDORED)
    sys.modules[VENDORED] = package
    for found in pkgutil.iter_modules(package.__path__):
        sys.modules[f"{VENDORED}.{found.name}"] = importlib.import_module(f"fmha_sm100.{found.name}")
    parent = sys.modules.get("vllm.third_party")
    if parent is not None:
        parent.fmha_sm100 = package  # type: ignore[attr-defined]


def _select_main(original: Callable[..., Any], *, topk_blocks: int, kv_cache_dtype: str, **more: Any) -> Any:
    """Returns (backend, implementation): vLLM's own choice wherever it is not Triton, and for what the MSA path never takes."""
    chosen = original(topk_blocks=topk_blocks, kv_cache_dtype=kv_cache_dtype, **more)
    fits = topk_blocks in (4, 8, 16, 32) and kv_cache_dtype != "fp8_e5m2"
    if not (fits and "Triton" in chosen[1].__name__ and _on_cuda()):
        return chosen
    msa = importlib.import_module(f"{MODELS}.nvidia.sparse_attention_msa")
    logger.info("MiniMax M3 sparse attention: MSA through openmsa (kv_cache_dtype=%s)", kv_cache_dtype)
    return msa.MiniMaxM3SparseMSABackend, msa.MiniMaxM3SparseMSAImpl


def _select_indexer(original: Callable[..., Any], *, topk_blocks: int, indexer_kv_dtype: str = "bf16", **more: Any) -> Any:
    """Returns the implementation's class. Outside SM100 vLLM itself takes Triton for bf16 and refuses fp8."""
    fits = topk_blocks == 16 and indexer_kv_dtype in ("bf16", "fp8", "fp8_e4m3")
    if not (fits and _on_cuda()):
        return original(topk_blocks=topk_blocks, indexer_kv_dtype=indexer_kv_dtype, **more)
    msa = importlib.import_module(f"{MODELS}.nvidia.indexer_msa")
    logger.info("MiniMax M3 indexer: MSA through openmsa (indexer_kv_dtype=%s)", indexer_kv_dtype)
    return msa.MiniMaxM3IndexerMSAImpl


def _on_cuda() -> bool:
    platform = importlib.import_module("vllm.platforms").current_platform
    return bool(platform.is_cuda())


def _asked_for(name: str) -> bool:
    asked = name in [part.strip() for part in os.environ.get("VLLM_PLUGINS", "").split(",")]
    if not asked:
        logger.debug("%s does nothing: VLLM_PLUGINS does not name it", name)
    return asked


def _wrap(module_name: str, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function of a module, and every name in vLLM's modules of this model that was bound to it."""
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    if hasattr(original, "__wrapped_by_openmsa__"):
        return

    @functools.wraps(original)
    def wrapped(**keywords: Any) -> Any:
        return around(original, **keywords)

    wrapped.__wrapped_by_openmsa__ = True  # type: ignore[attr-defined]
    for holder in [m for key, m in sys.modules.items() if key.startswith(MODELS) and m is not None]:
        if getattr(holder, name, None) is original:
            setattr(holder, name, wrapped)
