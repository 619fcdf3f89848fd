# SPDX-License-Identifier: MIT
"""`python -m benchmarks` is `openmsa bench` from a checkout; the records stand in `benchmarks/results`."""
