# SPDX-License-Identifier: MIT
"""Decode steps over host memory give what steps over resident caches give, however small the block cache is."""

import importlib.util
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openmsa import E4M3, NVFP4, DecodePlan, HostDecodePlan, HostKV, PagedIndexKeys, PagedKV
from openmsa.decode import plan as decode
from openmsa.host_kv import cpu
from openmsa.host_kv.block_cache import BlockCache, row_bytes
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem, strided
from openmsa.testing.timing import captured
from tests import oracle
from tests.low_precision import stored_problem

CUDA = torch.cuda.is_available()
HOW = ["stages"] if CUDA or importlib.util.find_spec("triton") is None else ["stages", "kernels"]
HOW += [pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else []
SHAPE = {"max_batch": 4, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "index_dim": 32, "topk": 4, "block_size": 32}
PAGE = 64


@pytest.fixture(params=HOW)
def device(request, monkeypatch):
    """Returns the device of a test; "kernels" runs the GPU's path on CPU tensors in the interpreter, in stages as steps over
    host memory run."""
    if request.param == "kernels":
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
        monkeypatch.setattr("openmsa.decode.memory.LAYER_BLOCKS", 0)
    return "cuda" if request.param == "cuda" else "cpu"


def step(k_lens, new_tokens=1, seed=0, **options):
    """Draws a problem whose queries are the newest tokens."""
    options = {"dtype": torch.float16, "index_heads": 2} | options
    sizes = {"kv_heads": 2, "group": 4, "head_dim": 64, "index_dim": 32, "integer_index": True, "shared_prefix": 130}
    return problem([new_tokens] * len(k_lens), k_lens, seed=seed, **sizes, **options)


def in_host_memory(kv, **options):
    """Returns a `HostKV` of the pages of a `PagedKV`, with slots for all blocks."""
    return HostKV.of(kv, cache_blocks=kv.num_pages * kv.num_heads * PAGE // 32, block_size=32, topk=4, **options)


def test_a_step_that_fails_says_why(monkeypatch):
    pytest.importorskip("triton")
    device = "cuda" if CUDA else "cpu"
    monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    p = step((600, 65)).to(device)
    kv, keys = paged(p, PAGE)
    plan = HostDecodePlan(**SHAPE, page_size=PAGE, max_pages=16, dtype=torch.float16, device=device)

    def stop(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan._kernels, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        plan.run(p.q, in_host_memory(kv), p.index_q, keys)


@pytest.mark.parametrize(("new_tokens", "least"), [(1, True), (2, False), (2, True)])
def test_equals_a_resident_cache(device, new_tokens, least):
    """The selections of the steps are unrelated, so that a small cache is thrashed."""
    lens = (600, 0, 65, 1)
    kv, keys = (cache.to(device) for cache in paged(step(lens, new_tokens), PAGE))
    host, chosen = in_host_memory(kv, new_tokens=new_tokens), sum(_visible(n, new_tokens) for n in lens)
    if least:
        host.cache = BlockCache.allocate(host.k, host.v, chosen, 32, host.device)
    options = SHAPE | {"page_size": PAGE, "max_pages": 16, "dtype": torch.float16, "device": device, "new_tokens": new_tokens}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)
    for seed in range(3):
        other = step(lens, new_tokens, seed=seed).to(device)
        q, index_q = other.q, other.index_q
        assert_equal("out", plan.run(q, host, index_q, keys), resident.run(q, kv, index_q, keys))
        assert_equal("blocks", plan.blocks, resident.blocks)
        assert_equal("lse", plan.lse, resident.lse)
    found = host.statistics()
    assert (found.steps, found.blocks) == (3, 3 * chosen)
    fetched_twice = found.misses - int((host.cache.held >= 0).sum())
    assert fetched_twice > 0 if least else fetched_twice == 0


def _visible(k_len, new_tokens):
    """Counts the blocks that the new tokens of a sequence choose for two KV heads."""
    positions = range(k_len - new_tokens, k_len)
    return 2 * sum(min(4, position // 32 + 1) for position in positions if position >= 0)


FORMATS = [("e4m3", "e4m3"), ("nvfp4", "nvfp4"), ("plain", "certified"), ("nvfp4", "int8")]


@pytest.mark.parametrize(("key_format", "index_format"), FORMATS)
def test_formats_of_keys_and_index_keys(device, key_format, index_format):
    p = problem([1, 1], [200, 65], kv_heads=2, group=4, head_dim=64, index_dim=32, dtype=torch.bfloat16)
    stored = stored_problem(p, key_format, index_format, "paged", PAGE, "plain")
    kv, keys = stored.kv[0], stored.index_k
    if key_format == "e4m3":  # Scales of heads are refused.
        pools = (E4M3(pool.data, torch.tensor(scale)) for pool, scale in ((kv.k, 0.01), (kv.v, 0.02)))
        kv = PagedKV(*pools, kv.page_table, kv.seq_lens)
    p, kv, keys = p.to(device), kv.to(device), keys.to(device)
    host = in_host_memory(kv)
    options = SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": p.q.dtype, "device": device}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)
    for scale in (1, -1):
        expected = resident.run(p.q, kv, scale * p.index_q, keys)
        assert_equal("out", plan.run(p.q, host, scale * p.index_q, keys), expected)
        assert_equal("lse", plan.lse, resident.lse)
    assert host.on_host().format == key_format
    assert host.statistics().bytes <= host.statistics().misses * 32 * row_bytes(host.k, host.v)


def test_against_the_truth(device):
    """Results agree with the truth for ragged lengths, and for queries and outputs of odd strides."""
    p = step((300, 33, 64), dtype=torch.float16)
    kv, keys = (cache.to(device) for cache in paged(p, PAGE))
    host = in_host_memory(kv)
    options = SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": p.q.dtype, "device": device, "softmax_scale": 0.2}
    plan = HostDecodePlan(**options)
    out = strided(torch.full_like(p.q, torch.nan), 2).to(device)
    assert plan.run(strided(p.q).to(device), host, strided(p.index_q).to(device), keys, out=out) is out
    reads = oracle.reads_of_blocks(plan.blocks.long().cpu(), 32)
    truth, honest = oracle.attention(p, reads, 0.2), oracle.honest_attention(p, reads, 0.2)
    assert_close("out", out, honest[0], truth[0])
    assert_close("lse", plan.lse, honest[1], truth[1])
    expected = oracle.select_blocks(p, oracle.block_scores(p, 32), 32, 4, 0, 1)
    assert_equal("blocks", plan.blocks, expected.to(torch.int32))


def test_one_selection_for_all_heads(device):
    p = step((300, 100), index_heads=1)
    kv, keys = (cache.to(device) for cache in paged(p, PAGE))
    p = p.to(device)
    options = SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": p.q.dtype, "device": device, "index_heads": 1}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)
    out = plan.run(p.q, in_host_memory(kv), p.index_q, keys)
    assert_equal("out", out, resident.run(p.q, kv, p.index_q, keys))


def test_appends_write_through(device):
    """After each append results are those of a resident cache: of prompts and tokens in odd numbers, after lengths are set
    back, and after pages are given to other sequences."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(12, generator=generator).int().view(3, 4).to(device)
    resident_kv = PagedKV.allocate(table, 12, 2, PAGE, 64, torch.float16)
    keys = PagedIndexKeys.allocate(table, 12, 1, PAGE, 32, torch.float16)
    host = HostKV.allocate(table, 12, 2, PAGE, 64, torch.float16, cache_blocks=24, block_size=32, topk=4)
    options = SHAPE | {"page_size": PAGE, "max_pages": 4, "dtype": torch.float16, "device": device}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)

    def append(*lens):
        cu = torch.tensor([0, *lens], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
        k, v = (torch.randn(sum(lens), 2, 64, generator=generator).to(device) for _ in range(2))
        for cache in (resident_kv, host):
            cache.append(k, v, cu)
        keys.append(torch.randn(sum(lens), 1, 32, generator=generator).to(device), cu)

    def check():
        sizes = ((3, 8, 64), (3, 2, 32))
        q, index_q = (torch.randn(size, generator=generator).to(device, torch.float16) for size in sizes)
        assert_equal("out", plan.run(q, host, index_q, keys), resident.run(q, resident_kv, index_q, keys))

    append(130, 1, 70)
    check()
    for _ in range(3):
        append(1, 1, 1)
        check()
    for cache in (resident_kv, keys, host):  # Tokens that were guessed wrong are taken back.
        cache.seq_lens.sub_(torch.tensor([40, 2, 9], dtype=torch.int32, device=device))
    append(3, 40, 100)
    check()
    table[:] = table.flip(0)  # All pages change hands.
    for cache in (resident_kv, keys, host):
        cache.seq_lens.zero_()
    append(60, 128, 33)
    check()
    for mine, theirs in zip(host.on_host().gather(), resident_kv.to("cpu").gather(), strict=True):
        assert_equal("held", mine, theirs)
    assert_equal("held", host.on_device().k.cpu(), host.k)
    host.k.neg_(), resident_kv.k.neg_()
    host.clear()
    check()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_a_graph_holds_appends_and_steps():
    """Replays read lengths and page tables anew and change the block cache: as eager steps of a resident cache."""
    kv, keys = (cache.to("cuda") for cache in paged(step((300, 33, 64)), PAGE))
    host, other = in_host_memory(kv), PagedIndexKeys(keys.keys.clone(), keys.page_table, keys.seq_lens.clone())
    options = SHAPE | {"page_size": PAGE, "max_pages": 12, "dtype": torch.float16}
    plan, resident = HostDecodePlan(**options), DecodePlan(**options)
    q, index_q, new = (torch.randn(3, n, d, dtype=torch.float16, device="cuda") for n, d in ((8, 64), (2, 32), (2, 64)))
    start = kv.seq_lens.clone()

    def run():
        host.append(new, new)
        other.append(new[:, :1, :32])
        plan.run(q, host, index_q, other)

    replay = captured(run)
    for cache in (host, other):
        cache.seq_lens.copy_(start)
    for _ in range(20):
        for x in (q, index_q, new):
            x.normal_()
        replay()
        kv.append(new, new)
        keys.append(new[:, :1, :32])
        assert_equal("out", plan._out[:3], resident.run(q, kv, index_q, keys))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_block_unused_for_the_longest_time_leaves(data):
    """Against a list of blocks in the order of their last use: blocks of one step stay in the order that they had."""
    slots, blocks = data.draw(st.integers(4, 8)), 12
    table = torch.arange(blocks, dtype=torch.int32)[None]
    kv = HostKV.allocate(table, blocks, 1, 16, 16, cache_blocks=blocks, block_size=16, topk=4)
    kv.seq_lens.fill_(16 * blocks)
    kv.cache = BlockCache.allocate(kv.k, kv.v, slots, 16, kv.device)
    order, misses = [None] * slots, 0  # what each slot holds, that of the slot unused for the longest time first
    for _ in range(data.draw(st.integers(1, 12))):
        ids = data.draw(st.lists(st.integers(0, blocks - 1), unique=True, min_size=1, max_size=4).map(sorted))
        cpu.bring(kv, torch.tensor([[ids + [-1] * (4 - len(ids))]], dtype=torch.int32), 1)
        idle = [i for i, block in enumerate(order) if block not in ids]
        missed = [block for block in ids if block not in order]
        for i, block in zip(idle, missed, strict=False):
            order[i] = block
        order = [block for block in order if block not in ids] + [block for block in order if block in ids]
        misses += len(missed)
        now = kv.statistics().steps
        held = [kv.cache.held[slot].item() for slot in kv.cache.order[now % 2].tolist()]
        assert held == [-1 if block is None else block for block in order]
        assert kv.statistics().misses == misses
        for slot, block in enumerate(kv.cache.held.tolist()):
            assert block < 0 or kv.cache.slot_of[block] == slot
    assert kv.statistics().hit_rate == 1 - misses / kv.statistics().blocks


def test_layers_share_a_budget():
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    options = {"block_size": 32, "topk": 2, "cache_bytes": 3 * 10 * 32 * 2 * 16 * 2}
    layers = HostKV.layers(3, table, 8, 2, 64, 16, torch.bfloat16, **options)
    assert [layer.cache_blocks for layer in layers] == [10] * 3
    assert layers[0].device_bytes > 10 * 32 * 2 * 16 * 2 > layers[0].device_bytes - 600
    assert layers[0].host_bytes == 2 * 8 * 2 * 64 * 16 * 2
    layers[0].append(torch.ones(2, 2, 16), torch.ones(2, 2, 16))
    assert [layer.seq_lens.tolist() for layer in layers] == [[1, 1], [0, 0], [0, 0]]
    assert layers[0].on_device().k.data_ptr() == layers[0].k.data_ptr()
    need = 3 * 8 * 32 * 2 * 16 * 2
    for bytes_given in (1, need - 1):
        message = rf"cache_bytes must be at least {need} \(3 layers, batch 2, 2 KV heads, topk 2, .*\), got {bytes_given}"
        with pytest.raises(ValueError, match=message):
            HostKV.layers(3, table, 8, 2, 64, 16, torch.bfloat16, **options | {"cache_bytes": bytes_given})


def test_misuse_names_the_argument_the_rule_and_the_value():
    table, lens = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    pool = torch.zeros(8, 2, 64, 16)
    make = partial(HostKV, pool, pool.clone(), table, lens)
    with pytest.raises(
        ValueError, match=r"cache_blocks must be at least .*\(16: batch 2, 2 KV heads, topk 4, 1 new.*\), got 15"
    ):
        make(15, block_size=32, topk=4)
    with pytest.raises(ValueError, match=r"page_size must be a multiple of block_size \(48\), got 64"):
        make(999, block_size=48)
    with pytest.raises(ValueError, match=r"new_tokens must be from 1 to 16, got 17"):
        make(999, block_size=32, new_tokens=17)
    with pytest.raises(TypeError, match=r"cache_blocks must be an int, got float"):
        make(16.0, block_size=32, topk=4)
    with pytest.raises(ValueError, match=r"v must have the shape of k"):
        HostKV(pool, pool[:4], table, lens, 64)
    with pytest.raises(ValueError, match=r"k must be contiguous, got strides"):
        HostKV(pool.transpose(1, 2).contiguous().transpose(1, 2), pool, table, lens, 64, block_size=32)
    meta = {name: value.to("meta") for name, value in (("table", table), ("lens", lens), ("pool", pool))}
    for arguments, error, words in (
        (
            (pool, pool, table.tolist(), lens),
            TypeError,
            r"page_table must be a torch.Tensor of shape \[batch, max_pages\], got list",
        ),
        ((pool, pool, table, [0, 0]), TypeError, r"seq_lens must be a torch.Tensor of shape \[batch\], got list"),
        ((pool, [pool], table, lens), TypeError, r"v must be a torch.Tensor of shape .*, got list"),
        ((pool, pool, table, meta["lens"]), ValueError, r"seq_lens must be on the device of page_table \(cpu\), got meta"),
        ((pool, pool, meta["table"], meta["lens"]), NotImplementedError, r"page_table must hold values"),
        ((pool, meta["pool"], table, lens), ValueError, r"v must be on the CPU, got meta"),
    ):
        with pytest.raises(error, match=words):
            HostKV(*arguments, 64, block_size=32)
    with pytest.raises(NotImplementedError, match=r"kv must hold values"):
        HostKV.of(PagedKV(meta["pool"], meta["pool"], meta["table"], meta["lens"]), "cpu", cache_blocks=64)
    scaled = E4M3.quantize(pool, per="head")
    with pytest.raises(NotImplementedError, match=r"k must have one scale for the tensor, got E4M3 scales \(2,\)"):
        HostKV(scaled, scaled, table, lens, 64, block_size=32)
    swizzled = NVFP4.quantize(pool, layout="128x4")
    with pytest.raises(NotImplementedError, match=r"k must have linear NVFP4 scales, got layout '128x4'"):
        HostKV(swizzled, swizzled, table, lens, 64, block_size=32)
    with pytest.raises(TypeError, match=r"kv must be an openmsa.PagedKV, got Tensor"):
        HostKV.of(pool, cache_blocks=64)
    for name, value in (("block_size", 0), ("head_dim", -1)):
        sizes = {"num_kv_heads": 2, "page_size": 64, "head_dim": 16, "cache_bytes": 1 << 20} | {name: value}
        with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
            HostKV.layers(1, table, 8, **sizes)
    with pytest.raises(ValueError, match=r"format must be 'plain' or one of .*, got 'int8'"):
        HostKV.allocate(table, 8, 2, 64, 16, format="int8", cache_blocks=64)
    kv = make(16, block_size=32, topk=4)
    with pytest.raises(NotImplementedError, match=r"a HostKV does not move"):
        kv.to("cpu")
    sizes = {
        "max_batch": 2,
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "index_dim": 16,
        "page_size": 64,
        "max_pages": 4,
    }
    sizes |= {"dtype": torch.float32, "device": "cpu", "block_size": 32}
    with pytest.raises(ValueError, match=r"page_size must be a multiple of block_size \(48\), got 64"):
        HostDecodePlan(**sizes | {"block_size": 48})
    keys = PagedIndexKeys.allocate(table, 8, 1, 64, 16)
    q, index_q = torch.zeros(2, 4, 16), torch.zeros(2, 2, 16)
    with pytest.raises(ValueError, match=r"kv.topk must be at least that of the plan \(5\), got 4"):
        HostDecodePlan(**sizes, topk=5).run(q, kv, index_q, keys)
    with pytest.raises(ValueError, match=r"kv.block_size must be that of the plan \(64\), got 32"):
        HostDecodePlan(**sizes | {"block_size": 64}, topk=4).run(q, kv, index_q, keys)
    plan = HostDecodePlan(**sizes, topk=4)
    with pytest.raises(TypeError, match=r"kv must be an openmsa.HostKV, got PagedKV"):
        plan.run(q, kv.on_host(), index_q, keys)
    with pytest.raises(NotImplementedError, match=r"q must be a plain tensor beside a HostKV, got E4M3"):
        plan.run(E4M3.quantize(q), kv, index_q, keys)
    with pytest.raises(TypeError, match=r"kv must be an openmsa.PagedKV, got HostKV"):
        DecodePlan(**sizes, topk=4).run(q, kv, index_q, keys)
    assert kv.statistics() == (0, 0, 0, 0)
