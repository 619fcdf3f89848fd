# SPDX-License-Identifier: MIT
"""OpenMSA runs MiniMax Sparse Attention on every machine.

index_q, index_k -> `block_scores` -> `select_blocks` -> `sparse_attention` <- q, k, v; `msa_attention` is the whole path.
Importing this package loads no kernel and touches no GPU.
"""

from openmsa.runtime import torch_version  # isort: skip # noqa: F401 - it says in a sentence where PyTorch is missing or old
from openmsa.types import Sequences  # isort: skip
from openmsa.attention import msa_attention
from openmsa.block_scores import block_scores
from openmsa.block_topk import select_blocks, select_blocks_from_scores
from openmsa.decode import DecodePlan
from openmsa.dense_attention import dense_attention
from openmsa.explain import explain
from openmsa.host_kv import HostDecodePlan, HostKV
from openmsa.index_loss import index_loss
from openmsa.kv_cache import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.plan import AttentionPlan
from openmsa.sparse_attention import sparse_attention

from openmsa import operators  # noqa: F401 isort: skip

__version__ = "0.1.0"

__all__ = [
    "E4M3",
    "MXFP4",
    "NVFP4",
    "AttentionPlan",
    "CertifiedKeys",
    "DecodePlan",
    "HostDecodePlan",
    "HostKV",
    "Int8",
    "PagedIndexKeys",
    "PagedKV",
    "Sequences",
    "block_scores",
    "dense_attention",
    "explain",
    "index_loss",
    "msa_attention",
    "select_blocks",
    "select_blocks_from_scores",
    "sparse_attention",
]
