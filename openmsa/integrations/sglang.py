# SPDX-License-Identifier: MIT
"""This module runs MiniMax-M3 of SGLang (0.5.23) on this library outside SM100. It follows SGLang's published sources and is
tested against a stand-in with the same names and signatures, not against SGLang itself.

It is a plug-in of SGLang's entry point group `sglang.srt.plugins`. It does nothing unless named, so that installing this
package changes no server:

    SGLANG_PLUGINS=openmsa python -m sglang.launch_server --model-path MiniMaxAI/MiniMax-M3 --page-size 128 ...

SGLang imports `fmha_sm100` by that name, so this distribution's package serves it as it is; the one gate is `msa_available`,
which requires compute capability 10.0 or 10.3. The indexer stays SGLang's own, and so does decode inside CUDA graphs unless
``SGLANG_OPT_USE_MSA_DECODE_UNDER_GRAPH`` is set. ``SGLANG_DISABLE_MSA=1`` still turns the whole path off.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

GATE = "sglang.srt.layers.attention.minimax_sparse_ops.msa.msa_available"
logger = logging.getLogger(__name__)


def plugin() -> None:
    """Calls `register` where ``SGLANG_PLUGINS`` names the entry point `openmsa`, which this is."""
    if "openmsa" in [part.strip() for part in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        register()
    else:
        logger.debug("openmsa does nothing: SGLANG_PLUGINS does not name it")


def register() -> None:
    """Registers a hook around SGLang's gate; SGLang applies it when all plug-ins are loaded."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(GATE, available, registry.HookType.AROUND)


def available(original: Callable[[], bool]) -> bool:
    """Tells whether the MSA path can run: where SGLang says so, and on every other CUDA device that our kernels serve."""
    if original():
        return True
    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability() >= (8, 0)
