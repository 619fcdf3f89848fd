# SPDX-License-Identifier: MIT
"""This module passes on the CSR of key blocks to queries of `fmha_sm100.sparse`, under the public package's name."""

from __future__ import annotations

from fmha_sm100.sparse import build_k2q_csr, build_k2q_csr_torch_reference, k2q_to_q2k, q2k_to_k2q

__all__ = ["build_k2q_csr", "build_k2q_csr_torch_reference", "k2q_to_q2k", "q2k_to_k2q"]
