# SPDX-License-Identifier: MIT
"""This room holds layers of `torch.nn`: attention with an index branch, its position embedding, its stages of training, and its
cache.

`MSAttention` is a whole layer for models trained from scratch; `IndexBranch` is what it adds to attention, and what a converted
model gets. `set_stage` moves a model from "dense" to "warmup" to "sparse". `MSACache` serves generation.
"""

from openmsa.modules.attached_loss import attach
from openmsa.modules.attention import MSAttention
from openmsa.modules.cache import LayerCache, MSACache
from openmsa.modules.config import MSAConfig
from openmsa.modules.index_branch import STAGES, IndexBranch, collected_losses, index_branches, set_stage
from openmsa.modules.rotary import Rotary, rotate

__all__ = [
    "STAGES",
    "IndexBranch",
    "LayerCache",
    "MSACache",
    "MSAConfig",
    "MSAttention",
    "Rotary",
    "attach",
    "collected_losses",
    "index_branches",
    "rotate",
    "set_stage",
]
