# SPDX-License-Identifier: MIT
"""These cases are for ranks that are GPUs: steps in CUDA graphs, chunks of prompts, a rank that dies while a kernel waits for
it."""

from __future__ import annotations

import os
from itertools import accumulate

import torch

from openmsa import msa_attention
from openmsa.parallel import ContextDecodePlan, PageStripes, TokenShards, chain, context_attention
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem
from tests.parallel.cases import WIDE, empty_caches, spread_caches


def a_plan(group, rank, size, exchange="symmetric", timeout=60.0):
    """Returns a plan for three sequences, its inputs and its caches."""
    p = problem([1] * 3, (5000, 700, 2049), dtype=torch.bfloat16, **WIDE).to("cuda")
    kv, index = spread_caches(p, rank, size, 128)
    lens = torch.tensor(p.k_lens, dtype=torch.int32, device="cuda")
    arguments = {"seq_lens": lens, "page_table": kv.page_table, "page_size": 128, "group": group}
    return p, kv, index, ContextDecodePlan(**arguments, exchange=exchange, timeout=timeout)


def chained(group, rank, size, case, *arguments):
    """Runs a case whose layers are chains of launches that overlap."""
    chain.CHAINED = True
    try:
        return case(group, rank, size, *arguments)
    finally:
        chain.CHAINED = None


def replays(group, rank, size, exchange):
    """Steps in a CUDA graph, refreshed in it, give what eager steps give, however often and with whatever lengths."""
    p, kv, index, plan = a_plan(group, rank, size, exchange)
    out = torch.empty_like(p.q)

    def step():
        plan.refresh()
        for _ in range(3):
            plan.run(p.q, kv.k, kv.v, p.index_q, index.keys, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for less in (0, 600, 1, 650):
        plan.seq_lens.copy_(torch.tensor([n - less for n in p.k_lens]))
        step()
        eager = out.clone()
        for _ in range(5):
            out.fill_(torch.nan)
            graph.replay()
            assert_equal("out", out, eager)


def chunked_selection(group, rank, size, chunks, sizes, options, page, moves="keys"):
    """Prompts in chunks give what one rank gives, within the rounding of bfloat16."""
    lengths = [sum(new) for new in zip(*chunks, strict=True)]
    p = problem(lengths, lengths, dtype=torch.bfloat16, integer_index=True, **sizes).to("cuda")
    whole = msa_attention(p.q, p.k, p.v, p.index_q, p.index_k, seqs=p.seqs, **options)
    kv, index = empty_caches(lengths, rank, size, page, p)
    cached, first = [0] * len(lengths), list(accumulate(lengths, initial=0))
    for new in chunks:
        spans = [torch.arange(f + c, f + c + n) for f, c, n in zip(first, cached, new, strict=False)]
        rows, shards = torch.cat(spans).to("cuda"), TokenShards(new, size)
        mine = [shards.shard(x[rows], rank) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
        out = context_attention(*mine, shards, group=group, kv=kv, index_keys=index, cached=cached, moves=moves, **options)
        torch.testing.assert_close(out, shards.shard(whole[rows], rank), atol=0.02, rtol=0.02)
        cached = [c + n for c, n in zip(cached, new, strict=True)]
        assert kv.seq_lens.tolist() == [PageStripes(size, page).held(n, rank) for n in cached]


def dies(group, rank, size):
    """The last rank dies where the kernels of the others wait for its candidates."""
    p, kv, index, plan = a_plan(group, rank, size, timeout=4.0)
    plan.run(p.q, kv.k, kv.v, p.index_q, index.keys)
    torch.cuda.synchronize()
    if rank == size - 1:
        os._exit(1)
    plan.run(p.q, kv.k, kv.v, p.index_q, index.keys)
    torch.cuda.synchronize()
