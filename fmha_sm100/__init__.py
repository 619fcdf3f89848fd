# SPDX-License-Identifier: MIT
"""Place of the drop-in package for the public `fmha_sm100`. It has no operations yet; use `openmsa`."""
