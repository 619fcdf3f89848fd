# SPDX-License-Identifier: MIT
"""The kernels of the block cache do what its plain implementation does, in Triton's interpreter."""
