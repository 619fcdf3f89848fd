# SPDX-License-Identifier: MIT
"""The kernels of the block cache do what its plain implementation does, in Triton's interpreter without a GPU."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from openmsa import HostKV
from openmsa.host_kv import cpu, triton_fetch
from openmsa.kv_cache import E4M3, NVFP4
from openmsa.testing.compare import assert_equal

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

FORMS = {"plain": lambda x: x, "e4m3": E4M3.quantize, "nvfp4": NVFP4.quantize}


def filled(generator, form="plain", batch=4, heads=2, page=64, dim=32, block=32, pages=9, width=5, **options):
    """Makes a cache of random keys. Its page table shares pages and names some outside the pool; one sequence is empty, one
    longer than the table."""
    k, v = (FORMS[form](torch.randn(pages, heads, page, dim, generator=generator)) for _ in range(2))
    table = torch.randint(-1, pages + 1, (batch, width), generator=generator, dtype=torch.int32)
    lens = torch.tensor([width * page + 13, 0, 250, 61][:batch], dtype=torch.int32)
    return HostKV(k, v, table, lens, pages * heads * page // block, block_size=block, topk=4, **options)


def chosen(kv, tokens, heads, generator, topk=4):
    """Returns ascending ids in front of -1, some past the last block."""
    blocks = kv.capacity // kv.block_size + 1
    ids = torch.rand(kv.batch * tokens, heads, blocks, generator=generator).argsort(-1)[..., :topk]
    count = torch.randint(0, topk + 1, (*ids.shape[:2], 1), generator=generator)
    ids = torch.where(torch.arange(topk) < count, ids, 10**6).sort(-1).values
    return torch.where(ids < 10**6, ids, -1).int()


def assert_same(kv, other, now):
    for name in ("slot_of", "held", "filled", "used", "counts"):
        assert_equal(name, getattr(kv.cache, name), getattr(other.cache, name))
    assert_equal("order", kv.cache.order[now % 2], other.cache.order[now % 2])
    for mine, theirs in zip(*(triton_fetch.planes(x.cache.k, x.cache.v) for x in (kv, other)), strict=True):
        assert_equal("rows", mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize(("entries", "slots", "piece"), [(1024, 2048, 2048), (16, 8, 64)], ids=["one turn", "many turns"])
@pytest.mark.parametrize(("form", "tokens", "heads"), [("plain", 1, 2), ("e4m3", 3, 1), ("nvfp4", 2, 2)])
def test_bring_does_what_the_plain_implementation_does(monkeypatch, form, tokens, heads, entries, slots, piece):
    monkeypatch.setattr(triton_fetch, "ENTRIES", entries)
    monkeypatch.setattr(triton_fetch, "SLOTS", slots)
    monkeypatch.setattr(triton_fetch, "PIECE", piece)
    generator = torch.Generator().manual_seed(7 * tokens + entries)
    kv = filled(generator, form, new_tokens=tokens)
    steps = [(kv.seq_lens + now, chosen(kv, tokens, heads, generator)) for now in range(10)]
    most = 0
    for lens, blocks in steps:
        kv.seq_lens.copy_(lens)
        number = cpu.wanted(kv, blocks, tokens)[0]
        most = max(most, number[number >= 0].unique().numel())
    kv.cache = type(kv.cache).allocate(kv.k, kv.v, most, kv.block_size, kv.device)  # so few that all are taken again
    other = copy.deepcopy(kv)
    memory = triton_fetch.Step.allocate(kv.batch * tokens * kv.num_heads, 4, kv.device)
    for now, (now_held, blocks) in enumerate(steps):
        for cache in (kv, other):
            cache.seq_lens.copy_(now_held)
        table, lens = cpu.bring(kv, blocks, tokens)
        triton_fetch.bring(other, blocks, tokens, memory)
        assert_equal("table", memory.table, table)
        assert_equal("lens", memory.lens, lens)
        assert_same(kv, other, now + 1)
    assert int(kv.cache.counts[2]) > most


@pytest.mark.parametrize("given", ["each as many", "ragged"])
def test_outdate_does_what_the_plain_implementation_does(given):
    generator = torch.Generator().manual_seed(3)
    kv = filled(generator, batch=3, width=2, pages=6)
    kv.page_table.copy_(torch.randperm(6, generator=generator).view(3, 2))
    kv.seq_lens.copy_(torch.tensor([5, 60, 100]))
    kv.cache.slot_of.copy_(torch.randperm(24, generator=generator) - 4)
    kv.cache.filled.fill_(32)
    other = copy.deepcopy(kv)
    starts = None if given == "each as many" else torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    cpu.outdate(kv, 12, starts)
    triton_fetch.outdate(other, 12, starts)
    assert_equal("filled", other.cache.filled, kv.cache.filled)
    assert len(set(kv.cache.filled.tolist())) > 3
    triton_fetch.outdate(other, 0, None)


@pytest.mark.parametrize(("dim", "form", "word"), [(32, "plain", torch.int32), (16, "nvfp4", torch.uint8)])
def test_rows_are_copied_in_the_widest_words_that_fit(dim, form, word):
    kv = filled(torch.Generator().manual_seed(0), form, dim=dim)
    host, slots, _, _ = triton_fetch.in_words(kv)
    assert host.k.dtype == slots.k.dtype == word
    assert host.k.data_ptr() == (kv.k if form == "plain" else kv.k.data).data_ptr()
