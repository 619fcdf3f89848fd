# SPDX-License-Identifier: MIT
"""These cases run on every rank of a group: each computes this rank's share and compares it with the same on one rank."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist

from openmsa import PagedIndexKeys, PagedKV, index_loss, msa_attention, select_blocks, sparse_attention
from openmsa.parallel import ContextDecodePlan, PageStripes, TokenShards, context_attention, gather_tokens, shard_heads
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import problem

SMALL = {"kv_heads": 2, "group": 2, "head_dim": 32}
WIDE = {"kv_heads": 4, "group": 16, "head_dim": 128}


def one_rank(p, options):
    """Returns the selection, out and lse of one rank, and out and lse in float64 over the same selection."""
    blocks = select_blocks(p.index_q, p.index_k, seqs=p.seqs, **options)
    results = msa_attention(p.q, p.k, p.v, p.index_q, p.index_k, seqs=p.seqs, return_lse=True, **options)
    q, k, v = (x.double().cpu() for x in (p.q, p.k, p.v))
    cpu = p.to("cpu").seqs
    truth = sparse_attention(q, k, v, blocks.cpu(), cpu, block_size=options["block_size"], return_lse=True)
    return blocks, results, truth


def check_results(results, honest, truth, rows=slice(None)):
    for name, mine, one, true in zip(("out", "lse"), results, honest, truth, strict=True):
        assert_close(name, mine, one[rows], true[rows.cpu() if isinstance(rows, torch.Tensor) else rows])


def prefill(group, rank, size, lengths, order, dtype, device, sizes, options, exact):
    """Prompts without caches have the results of one rank."""
    p = problem(lengths, lengths, dtype=dtype, integer_index=exact, seed=len(lengths), **sizes).to(device)
    _, honest, truth = one_rank(p, options)
    shards = TokenShards(lengths, size, order)
    mine = [shards.shard(x, rank) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    results = context_attention(*mine, shards, group=group, return_lse=True, **options)
    check_results(results, honest, truth, shards.rows(rank, device))


def query_chunks(group, rank, size, lengths, options, chunk):
    """Queries handled a few at a time give what they give together."""
    p = problem(lengths, lengths, **SMALL)
    shards = TokenShards(lengths, size)
    mine = [shards.shard(x, rank) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    whole, in_chunks = (context_attention(*mine, shards, group=group, query_chunk=n, **options) for n in (None, chunk))
    torch.testing.assert_close(in_chunks, whole, atol=1e-6, rtol=1e-6)


def prefill_selection(group, rank, size, lengths, order, dtype, device, sizes, options):
    """The selection of each piece, from gathered index keys, is that of one rank, bit for bit."""
    p = problem(lengths, lengths, dtype=dtype, **sizes).to(device)
    blocks = select_blocks(p.index_q, p.index_k, seqs=p.seqs, **options)
    shards = TokenShards(lengths, size, order)
    index_k = gather_tokens(shards.shard(p.index_k, rank), shards, group)
    assert_equal("index_k", index_k, p.index_k)
    mine, wanted = shards.shard(p.index_q, rank), shards.shard(blocks, rank)
    for rows, seqs in shards.pieces(rank, device=device):
        assert_equal("blocks", select_blocks(mine[rows], index_k, seqs=seqs, **options), wanted[rows])


def backward(group, rank, size, lengths, order, device, sizes, options):
    """Gradients of attention and of the index loss are those of one rank."""
    p = problem(lengths, lengths, dtype=torch.float64, **sizes).to(device)
    whole, _ = attention_gradients(p, options)
    shards = TokenShards(lengths, size, order)
    for name, grad, one in zip("qkv", shard_gradients(group, rank, p, shards, options), whole, strict=True):
        torch.testing.assert_close(grad, shards.shard(one, rank), atol=1e-12, rtol=1e-9, msg=f"gradient of {name}")
    index_loss_backward(group, rank, p, shards, options)


def rounded_backward(group, rank, size, lengths, dtype, device, sizes, options):
    """Gradients of attention are as near to those of float64 as those of one rank."""
    p = problem(lengths, lengths, dtype=dtype, integer_index=True, **sizes).to(device)
    honest, blocks = attention_gradients(p, options)
    on_host = p.to("cpu")
    wide = replace(on_host, **{name: getattr(on_host, name).double() for name in ("q", "k", "v")})
    truth, _ = attention_gradients(wide, options, blocks.cpu())
    shards = TokenShards(lengths, size)
    for name, grad, one, true in zip("qkv", shard_gradients(group, rank, p, shards, options), honest, truth, strict=True):
        assert_close(f"gradient of {name}", grad, shards.shard(one, rank), shards.shard(true, rank).to(grad.device))


def weights_of(p):
    """Returns what the results are summed with: numbers that every dtype holds, the same on all ranks."""
    return torch.randint(-3, 4, p.q.shape, generator=torch.Generator().manual_seed(3)).to(p.q)


def attention_gradients(p, options, blocks=None):
    """Returns gradients of q, k and v on one rank, and the selection. blocks: a selection to attend to."""
    leaves = [x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v)]
    if blocks is None:
        blocks = select_blocks(p.index_q, p.index_k, seqs=p.seqs, **options)
    size = {"block_size": options["block_size"], "return_lse": True}
    out, lse = sparse_attention(*leaves, blocks, p.seqs, **size)
    ((out * weights_of(p)).sum() + lse.where(lse.isfinite(), 0).sum()).backward()
    return [x.grad for x in leaves], blocks


def shard_gradients(group, rank, p, shards, options):
    """Returns gradients of this rank's q, k and v."""
    mine = [shards.shard(x, rank).requires_grad_() for x in (p.q, p.k, p.v)]
    index = [shards.shard(x, rank) for x in (p.index_q, p.index_k)]
    out, lse = context_attention(*mine, *index, shards, group=group, return_lse=True, **options)
    ((out * shards.shard(weights_of(p), rank)).sum() + lse.where(lse.isfinite(), 0).sum()).backward()
    return [x.grad for x in mine]


def index_loss_backward(group, rank, p, shards, options):
    """The loss of all tokens is the sum over ranks and pieces, each weighed with its share of the queries."""
    blocks = select_blocks(p.index_q, p.index_k, seqs=p.seqs, **options)
    index = [x.clone().requires_grad_() for x in (p.index_q, p.index_k)]
    whole = index_loss(p.q, p.k, *index, blocks, p.seqs, block_size=options["block_size"])
    whole.backward()
    index_q, index_k = (shards.shard(x, rank).requires_grad_() for x in (p.index_q, p.index_k))
    keys, index_keys = gather_tokens(shards.shard(p.k, rank), shards, group), gather_tokens(index_k, shards, group)
    q, mine, total = shards.shard(p.q, rank), shards.shard(blocks, rank), sum(shards.lengths)
    loss = index_keys.sum() * 0 + index_q.sum() * 0
    for rows, seqs in shards.pieces(rank):
        share = {"coefficient": (rows.stop - rows.start) / total, "block_size": options["block_size"]}
        loss = loss + index_loss(q[rows], keys, index_q[rows], index_keys, mine[rows], seqs, **share)
    loss.backward()
    for name, x, one in (("index_q", index_q, index[0]), ("index_k", index_k, index[1])):
        torch.testing.assert_close(x.grad, shards.shard(one.grad, rank), atol=1e-12, rtol=1e-9, msg=f"gradient of {name}")


def empty_caches(k_lens, rank, size, page, p, formats=("plain", "plain"), seed=0):
    """Returns caches of this rank for sequences that grow to `k_lens`, with pages in random order."""
    stripes = PageStripes(size, page)
    width = max((-(-stripes.held(n, rank) // page) for n in k_lens), default=0) + 1
    pages = len(k_lens) * width
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(seed + rank)).int().view(-1, width).to(p.device)
    kv = PagedKV.allocate(table, pages, p.k.shape[1], page, p.k.shape[2], p.k.dtype, formats[0])
    index = PagedIndexKeys.allocate(table.clone(), pages, p.index_k.shape[1], page, p.index_k.shape[2], p.k.dtype, formats[1])
    return kv, index


def spread_caches(p, rank, size, page, formats=("plain", "plain")):
    """Returns caches that hold this rank's share of all keys."""
    stripes, first = PageStripes(size, page), list(accumulate(p.k_lens, initial=0))
    kv, index = empty_caches(p.k_lens, rank, size, page, p, formats)
    own = [stripes.positions(0, n, rank) + first[b] for b, n in enumerate(p.k_lens)]
    rows = torch.cat([torch.arange(0), *own]).to(p.device)
    starts = torch.tensor(list(accumulate(map(len, own), initial=0)), dtype=torch.int32, device=p.device)
    kv.append(p.k[rows], p.v[rows], starts)
    index.append(p.index_k[rows], starts)
    return kv, index


def chunked(group, rank, size, chunks, order, dtype, device, sizes, options, page, formats=("plain", "plain"), moves="keys"):
    """Prompts that come in chunks, to caches in any format, have the results of one rank that has caches of these formats."""
    lengths = [sum(new) for new in zip(*chunks, strict=True)]
    p = problem(lengths, lengths, dtype=dtype, seed=page, **sizes).to(device)
    kv, index = empty_caches(lengths, rank, size, page, p, formats)
    whole = empty_caches(lengths, 0, 1, page, p, formats)
    cached, first = [0] * len(lengths), list(accumulate(lengths, initial=0))
    for new in chunks:
        spans = [torch.arange(f + c, f + c + n) for f, c, n in zip(first, cached, new, strict=False)]
        rows, shards = torch.cat(spans).to(device), TokenShards(new, size, order)
        starts = torch.tensor(list(accumulate(new, initial=0)), dtype=torch.int32, device=device)
        q, k, v, index_q, index_k = (x[rows] for x in (p.q, p.k, p.v, p.index_q, p.index_k))
        whole[0].append(k, v, starts)
        whole[1].append(index_k, starts)
        lens = type(p.seqs).from_lengths(new, [c + n for c, n in zip(cached, new, strict=True)], device)
        honest = msa_attention(q, whole[0], None, index_q, whole[1], seqs=lens, return_lse=True, **options)
        mine = [shards.shard(x, rank) for x in (q, k, v, index_q, index_k)]
        caches = {"kv": kv, "index_keys": index, "cached": cached, "moves": moves}
        out, lse = context_attention(*mine, shards, group=group, return_lse=True, **caches, **options)
        for name, result, one in (("out", out, honest[0]), ("lse", lse, honest[1])):
            torch.testing.assert_close(result, shards.shard(one, rank), atol=2e-5, rtol=2e-5, msg=f"{name} of chunk {new}")
        cached = [c + n for c, n in zip(cached, new, strict=True)]
        held = [PageStripes(size, page).held(n, rank) for n in cached]
        assert kv.seq_lens.tolist() == index.seq_lens.tolist() == held


def decode(group, rank, size, k_lens, new, dtype, device, sizes, options, page, formats=("plain", "plain"), exchange="auto"):
    """Decode steps of sequences that grow have the selection of one rank, bit for bit, and its results."""
    p = problem([new] * len(k_lens), k_lens, dtype=dtype, integer_index=new == 1, seed=new, **sizes).to(device)
    kv, index = spread_caches(p, rank, size, page, formats)
    whole = spread_caches(p, 0, 1, page, formats)
    lens = torch.zeros(len(k_lens), dtype=torch.int32, device=device)
    plan = ContextDecodePlan(
        seq_lens=lens, page_table=kv.page_table, page_size=page, group=group, new_tokens=new, exchange=exchange, **options
    )
    starts = torch.arange(len(k_lens) + 1, dtype=torch.int32, device=device) * new
    for less in (max(k_lens, default=0), 7, 0):  # the first steps see fewer keys of the same caches
        now = [max(n - less, 0) for n in k_lens]
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        plan.refresh()
        keys = torch.tensor(list(accumulate(now, initial=0)), dtype=torch.int32, device=device)
        seqs = type(p.seqs)(starts, keys, new, max(now, default=0))
        wanted = select_blocks(p.index_q, whole[1], seqs=seqs, **options)
        assert_equal("blocks", plan.select(p.index_q, index.keys), wanted)
        lse = torch.empty(p.q.shape[:2], dtype=torch.promote_types(dtype, torch.float32), device=device)
        out = plan.attend(p.q, kv.k, kv.v, lse=lse)
        size_of = {"block_size": options["block_size"], "return_lse": True}
        honest = sparse_attention(p.q, whole[0], None, wanted, seqs, **size_of)
        k, v, cu = (x.cpu() for x in whole[0].gather(keys.diff(), torch.float64))
        on_host = type(p.seqs)(starts.cpu(), cu)
        truth = sparse_attention(p.q.double().cpu(), k.double(), v.double(), wanted.cpu(), on_host, **size_of)
        check_results((out, lse), honest, truth)
        for name, mine in (("out", out), ("lse", lse)) if size > 1 else ():
            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine.contiguous(), group)
            assert_equal(f"{name} of all ranks", torch.stack(parts), mine.expand(size, *mine.shape))
    return plan.exchange


def tensor_parallel(group, rank, size, heads, k_lens, options):
    """Each rank computes its heads with a share of the same keys; together they are the result of one rank."""
    q_heads, kv_heads, index_heads = heads
    sizes = {"kv_heads": kv_heads, "group": q_heads // kv_heads, "head_dim": 32, "index_heads": index_heads}
    p = problem([3] * len(k_lens), k_lens, **sizes)
    whole = msa_attention(p.q, p.k, p.v, p.index_q, p.index_k, seqs=p.seqs, **options)
    share = shard_heads(q_heads, kv_heads, rank, size, index_heads=index_heads)
    mine = p.q[:, share.q], p.k[:, share.kv], p.v[:, share.kv], p.index_q[:, share.index_q], p.index_k[:, share.index_k]
    out = msa_attention(*mine, seqs=p.seqs, **options)
    torch.testing.assert_close(out, whole[:, share.q], atol=1e-5, rtol=1e-5)
    return share


def misuse(group, rank, size):
    """Errors come before anything is sent: were it otherwise, the other ranks would wait."""
    p = problem((9,), (9,), **SMALL)
    shards = TokenShards((9,), size)
    mine = [shards.shard(x, rank) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    found = []
    for change in (
        {"shards": TokenShards((9,), size + 1)},
        {"shards": TokenShards((900,), size)},
        {"topk": 0},
        {"certified": True},
        {"kv": spread_caches(p, rank, size, 16)[0]},
        {"group": 3},
    ):
        arguments = {"shards": shards, "group": group, "block_size": 16} | change
        try:
            context_attention(*mine, **arguments)
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def dies(group, rank, size):
    """The last rank dies where the others wait for its keys."""
    if rank == size - 1:
        os._exit(1)
    p = problem((40,), (40,), **SMALL)
    shards = TokenShards((40,), size)
    mine = [shards.shard(x, rank) for x in (p.q, p.k, p.v, p.index_q, p.index_k)]
    context_attention(*mine, shards, group=group, block_size=16)


def certified(group, rank, size, chunks, options, page):
    """Caches of certified keys select what their exact keys select."""
    formats, options = ("plain", "certified"), options | {"certified": True}
    chunked(group, rank, size, chunks, "zigzag", torch.float32, "cpu", SMALL, options, page, formats)
