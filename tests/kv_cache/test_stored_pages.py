# SPDX-License-Identifier: MIT
"""What is appended to caches in low-precision formats comes back as the format rounds it, wherever it lies."""

import pytest
import torch

from openmsa import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, strided
from tests.contract import CUDA, DEVICES

devices = pytest.mark.parametrize("device", DEVICES)
TABLE = ([6, 1, 4, 9], [0, -1, -1, -1], [2, 8, -1, 99])  # shuffled; not assigned; wild past the end
LENS = (21, 0, 9)
HEADS, PAGE, DIM = 2, 8, 64
POOL = (10, HEADS, PAGE, DIM)


def page_scales(device):
    return torch.rand(POOL[0], HEADS, generator=torch.Generator().manual_seed(1)).add(0.05).to(device)


POOLS = {
    "e4m3": lambda d: E4M3.allocate(POOL, d),
    "e4m3 tensor": lambda d: E4M3.allocate(POOL, d, 0.03),
    "e4m3 head": lambda d: E4M3.allocate(POOL, d, torch.tensor([0.01, 0.7], device=d)),
    "e4m3 page": lambda d: E4M3.allocate(POOL, d, page_scales(d)),
    "e4m3 page for all heads": lambda d: E4M3.allocate(POOL, d, page_scales(d)[:, :1]),
    "e4m3 half of a packed cache": lambda d: E4M3(
        torch.zeros(10, HEADS, PAGE, 2 * DIM, dtype=torch.uint8, device=d)[..., DIM:]
    ),
    "e4m3 pages inside": lambda d: E4M3(
        torch.zeros(PAGE, 10, HEADS, DIM, dtype=torch.uint8, device=d).permute(1, 2, 0, 3), 0.1
    ),
    "int8": lambda d: Int8.allocate(POOL, d),
    "nvfp4": lambda d: NVFP4.allocate(POOL, d, 0.02),
    "nvfp4 one tensor of slots": lambda d: nvfp4_slots(d),
    "nvfp4 128x4": lambda d: NVFP4.allocate(POOL, d, torch.tensor(0.02, device=d), "128x4"),
    "mxfp4": lambda d: MXFP4.allocate(POOL, d),
    "certified": lambda d: CertifiedKeys.allocate(POOL, d),
    "certified float32": lambda d: CertifiedKeys.allocate(POOL, d, torch.float32),
}
pools = pytest.mark.parametrize("name", POOLS)


def nvfp4_slots(device):
    """Lays codes and scales of a row side by side, as engines store them."""
    slots = torch.zeros(10, HEADS, PAGE, DIM // 2 + DIM // 16, dtype=torch.uint8, device=device)
    return NVFP4(slots[..., : DIM // 2], slots[..., DIM // 2 :])


def table(device):
    return torch.tensor(TABLE, dtype=torch.int32, device=device)


def starts(device, *lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def cache(name, device):
    lens = torch.zeros(3, dtype=torch.int32, device=device)
    return PagedIndexKeys(POOLS[name](device), table(device), lens)


def keys(device, dtype=torch.float32):
    x = problem((1, 1, 1), LENS, kv_heads=HEADS, head_dim=DIM).k.to(dtype)
    x[3] *= 1e-3
    x[7, 1, 5], x[8, 0, 2], x[9, 1, 0] = torch.nan, torch.inf, -torch.inf
    x[10] = 0
    return x.to(device)


def codes(pool):
    """Returns every tensor of a pool, as bytes where it is one of 8-bit floats."""
    tensors = [vars(pool)[name] for name in vars(pool) if isinstance(vars(pool)[name], torch.Tensor)]
    inner = codes(pool.coarse) if isinstance(pool, CertifiedKeys) else []
    return [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in tensors] + inner


def truth(name, x, device):
    """Writes the same rows directly, one by one, each where its page says."""
    pool, lines, first = POOLS[name](device), table("cpu").tolist(), 0
    for b, n in enumerate(LENS):
        for j in range(n):
            pool.write((lines[b][j // PAGE], slice(None), j % PAGE), x[first + j])
        first += n
    return pool


@devices
@pools
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_append_writes_what_the_format_says(device, name, dtype):
    x = keys(device, dtype)
    c, expected = cache(name, device), truth(name, x, device)
    c.append(strided(x), starts(device, *LENS))
    for tested, wanted in zip(codes(c.keys), codes(expected), strict=True):
        assert_equal(name, tested, wanted)
    assert c.seq_lens.tolist() == list(LENS)
    assert c.format == name.split()[0]


@devices
@pools
def test_pieces_are_the_whole(device, name):
    x = keys(device)
    whole, pieces, done = cache(name, device), cache(name, device), [0, 0, 0]
    whole.append(x, starts(device, *LENS))
    for piece in ([8, 0, 0], [1, 0, 3], [0, 0, 0], [12, 0, 6]):
        rows = [torch.arange(f + n, f + n + m) for f, n, m in zip((0, 21, 21), done, piece, strict=True)]
        pieces.append(x[torch.cat(rows).to(device)], starts(device, *piece))
        done = [a + b for a, b in zip(done, piece, strict=True)]
    for a, b in zip(codes(pieces.keys), codes(whole.keys), strict=True):
        assert_equal(name, a, b)


@devices
@pools
def test_gather_gives_the_numbers(device, name):
    x = keys(device)
    c = cache(name, device)
    c.append(x, starts(device, *LENS))
    whole, lines = c.keys.dequantize(), table("cpu").tolist()
    expected = [whole[lines[b][j // PAGE], :, j % PAGE] for b, n in enumerate(LENS) for j in range(n)]
    assert_equal("keys", c.gather()[0], torch.stack(expected))
    assert_equal("float64", c.gather(dtype=torch.float64)[0].float(), torch.stack(expected))
    fewer, cu = c.gather(torch.tensor([3, 0, 9], dtype=torch.int32, device=device))
    assert_equal("fewer", fewer, torch.stack(expected[:3] + expected[21:]))
    assert_equal("cu_seqlens", cu, starts(device, 3, 0, 9))


@devices
def test_a_shared_prefix_is_read_by_both(device):
    kv = PagedKV.allocate(torch.tensor([[0, 1], [0, 2]], dtype=torch.int32, device=device), 3, 1, 8, 32, format="nvfp4")
    new = keys(device)[11:27, :1, :32]
    kv.append(new, -new, starts(device, 16, 0))
    kv.seq_lens[1] = 8
    k, v, _ = kv.gather()
    assert_equal("k", k[16:], k[:8])
    assert_equal("v", v, -k)


@pytest.mark.parametrize("format", ["plain", "e4m3", "int8", "nvfp4", "mxfp4", "certified"])
def test_allocate(format):
    index_keys = PagedIndexKeys.allocate(table("cpu"), 10, 1, 8, 64, torch.bfloat16, format=format)
    assert index_keys.format == format
    assert index_keys.keys.shape == (10, 1, 8, 64)
    assert not index_keys.gather(torch.tensor([8, 0, 0], dtype=torch.int32))[0].any()
    if format in ("plain", "e4m3", "nvfp4"):
        assert PagedKV.allocate(table("cpu"), 10, 2, 8, 64, format=format).format == format
    else:
        with pytest.raises(ValueError, match=rf"format must be 'plain' or one of .*e4m3.*nvfp4.*got '{format}'"):
            PagedKV.allocate(table("cpu"), 10, 2, 8, 64, format=format)


def test_pools_that_do_not_fit():
    lens, plain = torch.zeros(3, dtype=torch.int32), torch.zeros(POOL)
    for k, v, words in (
        (MXFP4.allocate(POOL), MXFP4.allocate(POOL), ("k ", "e4m3 or nvfp4", "mxfp4")),
        (E4M3.allocate(POOL), plain, ("v ", "stored as k (e4m3)", "plain")),
        (NVFP4.allocate(POOL), NVFP4.allocate(POOL, layout="128x4"), ("v ", "nvfp4 linear", "nvfp4 128x4")),
    ):
        with pytest.raises(TypeError) as caught:
            PagedKV(k, v, table("cpu"), lens)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(ValueError, match="shape of k"):
        PagedKV(E4M3.allocate(POOL), E4M3.allocate((9, *POOL[1:])), table("cpu"), lens)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pools
def test_append_inside_a_graph(name):
    """On a GPU nothing is read on the host: captured once, replayed with other lengths. What has no place is left out."""
    device, x = "cuda", keys("cuda")[:3].clone()
    c, cu = cache(name, device), starts(device, 1, 1, 1)
    c.append(x, cu)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c.append(x, cu)
    fresh, expected = cache(name, device), cache(name, "cpu")
    for a, b in zip(codes(c.keys), codes(fresh.keys), strict=True):
        a.copy_(b)
    c.seq_lens.copy_(torch.tensor([4, 8, 16], device=device))  # inside a page; page -1; page -1
    expected.seq_lens.copy_(torch.tensor([4, 0, 0]))
    graph.replay()
    expected.append(x[:1].cpu(), starts("cpu", 1, 0, 0))
    for a, b in zip(codes(c.keys), codes(expected.keys), strict=True):
        assert_equal(name, a, b)
    assert c.seq_lens.tolist() == [5, 9, 17]
    c.seq_lens.fill_(32)  # full
    graph.replay()
    for a, b in zip(codes(c.keys), codes(expected.keys), strict=True):
        assert_equal("full", a, b)
    assert c.seq_lens.tolist() == [32, 32, 32]
