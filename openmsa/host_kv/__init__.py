# SPDX-License-Identifier: MIT
"""This room serves decode steps whose keys and values lie in host memory: `HostKV` holds them, `HostDecodePlan` runs a step.

A step reads `topk` blocks a query and KV head. The GPU keeps the index keys, which choose them, and a block cache: slots of one
block of one KV head each. Chosen blocks that no slot holds are fetched into the slots that were not used for the longest time.
"""

from openmsa.host_kv.block_cache import Statistics
from openmsa.host_kv.cache import HostKV
from openmsa.host_kv.plan import HostDecodePlan

__all__ = ["HostDecodePlan", "HostKV", "Statistics"]
