# SPDX-License-Identifier: MIT
"""MSACache keeps what is appended while it grows, in every format, and says how many bytes it takes."""

import pytest
import torch

from openmsa.modules import MSACache, MSAConfig

CONFIG = MSAConfig(2, index_head_dim=32, index_block_size=16, index_topk_blocks=2)


def rows(total, heads, dim, seed):
    return torch.randn(total, heads, dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_format", ["plain", "e4m3", "nvfp4"])
@pytest.mark.parametrize("index_format", ["plain", "e4m3", "int8", "nvfp4", "mxfp4", "certified"])
def test_growth_changes_nothing(kv_format, index_format):
    """A cache that grew gives what one gives that had room from the start."""
    options = {"page_size": 16, "kv_format": kv_format, "index_format": index_format}
    growing, roomy = (MSACache(2, 2, 2, 16, CONFIG, dense_layers=[0], **options) for _ in range(2))
    roomy.reserve(90)
    memory = roomy.memory()
    for step, new in enumerate([(20, 3), (1, 0), (40, 60), (1, 1), (1, 20)]):
        total = sum(new)
        k, v, index_k = rows(total, 2, 16, step), rows(total, 2, 16, step + 10), rows(total, 1, 32, step + 20)
        for cache in (growing, roomy):
            cache.extend(new)
            cache.layers[0].append(v, k)
            cache.layers[1].append(k, v, index_k)
    assert roomy.memory() == memory
    assert growing.lengths == roomy.lengths == [63, 84]
    for mine, other in zip(growing.layers, roomy.layers, strict=True):
        assert mine.kv.seq_lens.tolist() == [63, 84]
        for x, y in zip(mine.kv.gather(), other.kv.gather(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert growing.layers[0].index is None
    for x, y in zip(growing.layers[1].index.gather(), roomy.layers[1].index.gather(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_a_cache_grows_by_an_eighth_and_a_page_a_sequence():
    cache = MSACache(1, 2, 1, 16, page_size=16)
    rooms = set()
    for new in ([1600, 1600], *([1, 1] for _ in range(600))):
        cache.extend(new)
        for layer in cache.layers:
            layer.begun = False
        assert sum(cache.lengths) <= cache.room <= sum(cache.lengths) * 9 // 8 + 2 * 2 * 16
        assert cache.layers[0].kv.num_pages * 16 == cache.room
        rooms.add(cache.room)
    assert sorted(rooms) == [3200, 3600, 4048, 4544]


def test_a_longer_sequence_takes_pages_that_others_leave():
    """The page table becomes wider; the pools, which have room, stay as they are."""
    cache = MSACache(2, 2, 2, 16, CONFIG, page_size=16)
    cache.reserve(32)
    pools = [(held.kv.k, held.index.keys) for held in cache.layers]
    cache.extend([48, 16])
    assert cache.room == 4 * 16
    assert all(held.kv.k is k and held.index.keys is keys for held, (k, keys) in zip(cache.layers, pools, strict=True))
    assert cache.layers[0].kv.page_table.tolist() == [[0, 1, 2], [3, -1, -1]]


def test_positions_and_lengths_of_a_step():
    cache = MSACache(1, 3, 1, 16, CONFIG, page_size=16)
    cache.extend([4, 0, 2])
    with pytest.raises(ValueError, match="every layer has appended"):
        cache.extend([2, 1, 0])
    kv, index = torch.zeros(6, 1, 16), torch.zeros(6, CONFIG.index_n_key_heads, CONFIG.index_head_dim)
    cache.layers[0].append(kv, kv, index)
    seqs = cache.extend([2, 1, 0])
    assert cache.positions.tolist() == [4, 5, 0]
    assert seqs.cu_seqlens_q.tolist() == [0, 2, 3, 3]
    assert (seqs.max_seqlen_q, seqs.max_seqlen_k) == (2, 6)
    assert cache.layers[0].seqs is seqs


def test_memory_is_that_of_the_pools():
    cache = MSACache(3, 2, 4, 16, CONFIG, dense_layers=[2], page_size=16, dtype=torch.bfloat16)
    assert cache.memory() == 5 * 2 * 4  # the lengths of five caches
    cache.reserve(33)
    pages = 2 * 3
    kv, index = pages * 4 * 16 * 16 * 2 * 2, pages * 16 * 32 * 2
    assert cache.memory() == 3 * kv + 2 * index + 5 * 2 * 4 + pages * 4


def test_a_cache_without_tokens():
    cache = MSACache(1, 0, 1, 16)
    cache.extend([])
    assert cache.positions.tolist() == []
    assert cache.memory() == 0


def test_refusals():
    cache = MSACache(1, 2, 1, 16, CONFIG)
    with pytest.raises(ValueError, match=r"new_tokens must have one entry a sequence \(2\), got 1"):
        cache.extend([1])
    with pytest.raises(ValueError, match=r"new_tokens\[1\] must be at least 0, got -1"):
        cache.extend([1, -1])
    assert cache.lengths == [0, 0]
    cache.extend([1, 0])
    with pytest.raises(ValueError, match="index_k must be given, as this layer's cache holds index keys, got None"):
        cache.layers[0].append(rows(1, 1, 16, 0), rows(1, 1, 16, 0))
    k, index_k = rows(1, 1, 16, 0), rows(1, 1, 32, 0)
    with pytest.raises(ValueError, match=r"index_k\.shape\[2\] must be 32 .*, got 16"):
        cache.layers[0].append(k, k, k)
    with pytest.raises(ValueError, match=r"index_k\.shape\[0\] must be 1 .*, got 2"):
        cache.layers[0].append(k, k, index_k.expand(2, 1, 32))
    assert cache.layers[0].kv.seq_lens.tolist() == [0, 0]
    cache.layers[0].append(k, k, index_k)
    with pytest.raises(ValueError, match="a layer must append once in each step"):
        cache.layers[0].append(k, k, index_k)
    assert cache.layers[0].kv.seq_lens.tolist() == cache.layers[0].index.seq_lens.tolist() == [1, 0]
    for wrong, got in (
        ({0: 1, 1: 1}, "dict"),
        (1, "int"),
        (torch.ones(2, dtype=torch.int32), "Tensor; pass new_tokens.tolist"),
    ):
        with pytest.raises(TypeError, match=f"new_tokens must be a list of ints, one a sequence, got {got}"):
            cache.extend(wrong)
    with pytest.raises(ValueError, match=r"sum\(new_tokens\) must be from 0 to 2147483646, got 2147483647"):
        cache.extend([2**31 - 1, 0])
    assert cache.lengths == [1, 0]
    with pytest.raises(TypeError, match=r"config must be an openmsa\.modules\.MSAConfig or None, got dict"):
        MSACache(1, 2, 1, 16, {})
    with pytest.raises(TypeError, match="dense_layers must be a list of ints, got int"):
        MSACache(1, 2, 1, 16, CONFIG, dense_layers=0)
    with pytest.raises(ValueError, match="dense_layers must be from 0 to 0, got 1"):
        MSACache(1, 2, 1, 16, dense_layers=[1])
    with pytest.raises(ValueError, match="format must be 'plain' or one of"):
        MSACache(1, 2, 1, 16, kv_format="int8")
