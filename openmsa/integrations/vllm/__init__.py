# SPDX-License-Identifier: MIT
"""This package serves MiniMax-M3 in vLLM (0.26 and 0.33) with this library's attention, on NVIDIA GPUs from sm_80 on.

It is a plug-in of vLLM's entry point group `vllm.general_plugins`, which vLLM loads in each of its processes. It does nothing
unless named, so that installing this package changes no server; other plug-ins that a server uses must then be named, too:

    VLLM_PLUGINS=openmsa vllm serve MiniMaxAI/MiniMax-M3 ...

The plug-in registers the text model and its drafter (MTP) out of tree, by module and class name, so that vLLM imports them when
it imports its own. They are vLLM's models, whose sparse layers are given (`model`) an attention backend with its metadata
builders (`backend`) and implementations of indexer and attention (`layers`). Weights, dense layers, normalisation, rotation and
the writing of both caches stay vLLM's. vLLM's wrapper for images and video makes its text model through the same registry.
"""

from __future__ import annotations

import importlib
import os

PLUGINS = ("openmsa", "openmsa_attend", "openmsa_indexer")
"""Any of these names in ``VLLM_PLUGINS`` asks for the plug-in; the last two are those of earlier plug-ins."""
MODELS = {
    "MiniMaxM3SparseForCausalLM": "openmsa.integrations.vllm.model:MiniMaxM3ForCausalLM",
    "MiniMaxM3MTP": "openmsa.integrations.vllm.model:MiniMaxM3MTP",
}
"""vLLM's names of architectures, and the classes that serve them."""


def plugin() -> None:
    """Calls `register` where ``VLLM_PLUGINS`` names one of `PLUGINS`; this is their entry point."""
    named = {part.strip() for part in os.environ.get("VLLM_PLUGINS", "").split(",")}
    if not named.isdisjoint(PLUGINS):
        register()


def register() -> None:
    """Registers `MODELS` in vLLM's `ModelRegistry`. Nothing of them is imported yet. Calling it again changes nothing."""
    registry = importlib.import_module("vllm").ModelRegistry
    for architecture, path in MODELS.items():
        registry.register_model(architecture, path)
