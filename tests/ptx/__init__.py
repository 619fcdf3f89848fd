# SPDX-License-Identifier: MIT
"""This machine runs the PTX of kernels that Triton has compiled for Hopper, where there is no GPU, and tells races."""
