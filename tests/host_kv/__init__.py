# SPDX-License-Identifier: MIT
"""These are tests of openmsa.host_kv, caches in host memory."""
