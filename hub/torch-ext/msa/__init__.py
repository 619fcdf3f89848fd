# SPDX-License-Identifier: MIT
"""The kernels library loads this: MiniMax Sparse Attention for every machine, with the operations of the public `fmha_sm100`.

`build_k2q_csr` and `sparse_atten_func` are what the MiniMax-M3 integration of transformers looks for.
"""

from .fmha_sm100 import fmha_sm100, fmha_sm100_plan, sparse_topk_select
from .fmha_sm100.sparse import build_k2q_csr, sparse_atten_func, sparse_atten_nvfp4_kv_func, sparse_decode_atten_func
from .openmsa import __version__

__all__ = [
    "__version__",
    "build_k2q_csr",
    "fmha_sm100",
    "fmha_sm100_plan",
    "sparse_atten_func",
    "sparse_atten_nvfp4_kv_func",
    "sparse_decode_atten_func",
    "sparse_topk_select",
]
