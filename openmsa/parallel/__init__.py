# SPDX-License-Identifier: MIT
"""This room runs sparse attention over the ranks of a torch.distributed group, for sequences that one GPU does not hold or not
fast enough.

`TokenShards`, `PageStripes` and `shard_heads` say which rank owns which tokens, pages and heads. `context_attention` computes
prompts whose tokens are spread over ranks, `ContextDecodePlan` decode steps over caches whose pages are. `gather_tokens` brings
tokens together for other stages, with gradients.
"""

from openmsa.parallel.decode import ContextDecodePlan
from openmsa.parallel.heads import HeadShare, shard_heads
from openmsa.parallel.prefill import context_attention
from openmsa.parallel.shards import PageStripes, TokenShards
from openmsa.parallel.tokens import gather_tokens

__all__ = [
    "ContextDecodePlan",
    "HeadShare",
    "PageStripes",
    "TokenShards",
    "context_attention",
    "gather_tokens",
    "shard_heads",
]
