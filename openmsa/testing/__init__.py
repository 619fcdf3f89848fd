# SPDX-License-Identifier: MIT
"""What a kernel author needs to trust a kernel: the tolerance rule (`compare`), nasty inputs (`inputs`), poisoned outputs and
peak memory (`allocations`), cold-cache timing (`timing`)."""
