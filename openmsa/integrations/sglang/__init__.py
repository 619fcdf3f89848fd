# SPDX-License-Identifier: MIT
"""This package serves MiniMax-M3 in SGLang (0.5.16 and 0.5.23) with this library's attention, on NVIDIA GPUs from sm_80 on. It
follows SGLang's published sources; `docs/serving.md` says what of SGLang has run with it.

It is a plug-in of SGLang's entry point group `sglang.srt.plugins`, which SGLang loads in each of its processes. It does nothing
unless named, so that installing this package changes no server; other plug-ins that a server uses must then be named, too:

    SGLANG_PLUGINS=openmsa python -m sglang.launch_server --model-path MiniMaxAI/MiniMax-M3 --page-size 128 ...

SGLang's registry of attention backends holds those of dense layers; for MiniMax-M3 the function `WRAPPER` then sets a backend
of sparse layers beside the chosen one. The plug-in registers a hook around that function in SGLang's `HookRegistry`, which is
made for this, and sets its own backend (`backend`) there. Weights, dense layers, normalisation, rotation, the pools and the
writing of them stay SGLang's.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
"""SGLang's function that sets a backend of sparse layers beside that of dense ones."""
logger = logging.getLogger(__name__)


def plugin() -> None:
    """Calls `register` where ``SGLANG_PLUGINS`` names the entry point `openmsa`, which this is."""
    if "openmsa" in [part.strip() for part in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        register()
    else:
        logger.debug("openmsa does nothing: SGLANG_PLUGINS does not name it")


def register() -> None:
    """Registers a hook around `WRAPPER`; SGLang applies it when all plug-ins are loaded."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(WRAPPER, wrap, registry.HookType.AROUND)


def wrap(original: Callable[..., Any], runner: Any, full_attn_backend: Any) -> Any:
    """Returns what `original` does for other models, and for MiniMax-M3 SGLang's pair of backends with ours for sparse layers.

    runner: SGLang's `ModelRunner`, whose pools exist. full_attn_backend: the backend of dense layers.
    Raises NotImplementedError where this server's sparse layers cannot be served.
    """
    if not importlib.import_module("sglang.srt.configs.model_config").is_minimax_sparse(runner.model_config.hf_config):
        return original(runner, full_attn_backend)
    from openmsa.integrations.sglang.backend import OpenMSASparseBackend

    pair = importlib.import_module("sglang.srt.layers.attention.minimax_sparse_backend").MiniMaxHybridAttnBackend
    sparse = OpenMSASparseBackend(runner)
    return pair(full_attn_backend, sparse, sparse.sparse_layer_ids)
