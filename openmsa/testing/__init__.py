# SPDX-License-Identifier: MIT
"""A kernel author needs these to trust a kernel: the tolerance rule (`compare`), nasty inputs (`inputs`), poisoned outputs and
peak memory (`allocations`), cold-cache timing (`timing`)."""
