# SPDX-License-Identifier: MIT
"""`fp4_indexer_block_scores` and its scale layouts agree with float64 scores of the numbers and with plain formulas."""

import pytest
import torch

from fmha_sm100.sparse import (
    fp4_indexer_block_scores,
    fp4_indexer_mma_scale_shape,
    fp4_indexer_mma_scale_storage_shape,
    fp4_indexer_mma_scale_storage_stride,
    fp4_indexer_mma_scale_stride,
    fp4_indexer_reorder_scales_for_mma_cute,
)
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import problem
from tests import oracle
from tests.contract import DEVICES
from tests.fmha_sm100.test_nvfp4 import e2m1, e4m3

devices = pytest.mark.parametrize("device", DEVICES)
formats = pytest.mark.parametrize("fp4_format", ["mxfp4", "nvfp4"])
GROUP = {"mxfp4": 32, "nvfp4": 16}
SCALE = {"mxfp4": torch.float8_e8m0fnu, "nvfp4": torch.float8_e4m3fn}


def fp4(shape, fp4_format, generator):
    """Returns random codes and scale codes, and their numbers in float64."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    low, high = (120, 134) if fp4_format == "mxfp4" else (40, 72)
    scales = torch.randint(low, high, (*shape[:-1], shape[-1] // GROUP[fp4_format]), generator=generator, dtype=torch.uint8)
    table = torch.tensor([e2m1(c) for c in range(16)], dtype=torch.float64)
    elements = torch.stack((table[codes.long() & 15], table[codes.long() >> 4]), -1).flatten(-2)
    number = [2.0 ** (c - 127) if fp4_format == "mxfp4" else e4m3(c) for c in range(256)]
    scale = torch.tensor(number, dtype=torch.float64)[scales.long()]
    return codes, scales, elements * scale.repeat_interleave(GROUP[fp4_format], -1)


def setup(q_lens, k_lens, q_heads, k_heads, fp4_format, page_size=128, dim=128, offsets=None):
    """Returns the problem with the numbers as its index branch, and the arguments of the call."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-n // page_size) for n in k_lens]
    pages = sum(counts) + 2
    q, q_scale, q_numbers = fp4((sum(q_lens), q_heads, dim), fp4_format, generator)
    k, k_scale, k_numbers = fp4((pages, k_heads, page_size, dim), fp4_format, generator)
    order = torch.randperm(pages, generator=generator)[: sum(counts)].int()
    offsets_of_pages = torch.tensor([0, *counts]).cumsum(0).int()
    keys = [
        k_numbers[order[offsets_of_pages[b] : offsets_of_pages[b + 1]].long()].transpose(1, 2).reshape(-1, k_heads, dim)[:n]
        for b, n in enumerate(k_lens)
    ]
    p = problem(q_lens, k_lens, index_heads=q_heads, index_key_heads=k_heads, index_dim=dim, offsets=offsets)
    p = p.__class__(**(vars(p) | {"index_q": q_numbers, "index_k": torch.cat(keys)}))
    arguments = {
        "q_fp4": q,
        "k_fp4": k,
        "q_scale": q_scale,
        "k_scale": k_scale,
        "cu_seqlens_q": p.seqs.cu_seqlens_q,
        "cu_seqlens_k": p.seqs.cu_seqlens_k,
        "cu_page_offsets": offsets_of_pages,
        "max_seqlen_q": max(q_lens),
        "max_seqlen_k": max(k_lens),
        "kv_indices": order,
        "fp4_format": fp4_format,
    }
    return p, arguments


def storage(view):
    """Returns the contiguous tensor behind a view ``[32, 4, restM, 4, restG, L]``."""
    found = view.permute(5, 2, 4, 0, 1, 3)
    assert found.is_contiguous()
    return found


def run(arguments, device, scale_layout, **options):
    here = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    if scale_layout in ("preordered_mma", "storage"):  # the default layout, as the view or as its storage
        views = fp4_indexer_reorder_scales_for_mma_cute(here["q_scale"], here["k_scale"], fp4_format=here["fp4_format"])
        here["q_scale"], here["k_scale"] = views if scale_layout == "preordered_mma" else map(storage, views)
    else:
        options["scale_layout"] = scale_layout
    return fp4_indexer_block_scores(**here, **options)


@devices
@formats
@pytest.mark.parametrize("scale_layout", ["public", "preordered_mma", "storage"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_heads", "k_heads"), [(2, 1), (4, 2), (16, 1)])
def test_scores(device, fp4_format, scale_layout, causal, q_heads, k_heads):
    p, arguments = setup((5, 0, 3), (130, 5, 257), q_heads, k_heads, fp4_format)
    scores = run(arguments, device, scale_layout, causal=causal)
    exact = oracle.block_scores(p, 128, causal=causal, num_blocks=3).transpose(1, 2)
    honest = oracle.honest_scores(p, 128, p.index_q.float(), p.index_k.float(), causal).transpose(1, 2)
    assert scores.shape == (q_heads, 3, 8)
    assert scores.is_contiguous()
    assert_close("scores", scores, honest, exact)


@devices
@formats
@pytest.mark.parametrize("whole", [True, False])
def test_offsets(device, fp4_format, whole):
    offset = 40 if whole else torch.tensor([3, 200], dtype=torch.int32)
    offsets = (40, 40) if whole else (3, 200)
    p, arguments = setup((5, 3), (130, 257), 2, 1, fp4_format, offsets=offsets)
    offset = offset if whole else offset.to(device)
    scores = run(arguments, device, "public", causal=True, qo_offset=offset)
    honest = oracle.honest_scores(p, 128, p.index_q.float(), p.index_k.float()).transpose(1, 2)
    assert_close("scores", scores, honest, oracle.block_scores(p, 128).transpose(1, 2))


@devices
@formats
def test_other_pages_dims_types_and_strides(device, fp4_format):
    """Pages of 64, dim 64, torch's own FP4 and scale types, views of a wider cache and page-strided tiles are served."""
    p, arguments = setup((3,), (300,), 4, 2, fp4_format, page_size=64, dim=64)
    arguments["k_fp4"] = torch.cat((arguments["k_fp4"], arguments["k_fp4"]), 1)[:, :2].view(torch.int8)
    arguments["q_scale"], arguments["k_scale"] = (arguments[n].view(SCALE[fp4_format]) for n in ("q_scale", "k_scale"))
    exact = oracle.block_scores(p, 128).transpose(1, 2)
    honest = oracle.honest_scores(p, 128, p.index_q.float(), p.index_k.float()).transpose(1, 2)
    for layout in ("public", "preordered_mma"):
        assert_close("scores", run(arguments, device, layout, causal=True), honest, exact)
    views = fp4_indexer_reorder_scales_for_mma_cute(arguments["q_scale"], arguments["k_scale"], fp4_format=fp4_format)
    tiles = [storage(x) for x in views]
    pages = tiles[1].view(torch.uint8).unflatten(0, (-1, 2))
    spread = torch.full((pages.shape[0], 3, *pages.shape[2:]), 255, dtype=torch.uint8)
    spread[:, :2] = pages
    strided = {"q_scale": tiles[0].view(torch.uint8), "k_scale": spread[:, :2]}
    here = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in (arguments | strided).items()}
    assert_close("scores", fp4_indexer_block_scores(**here, causal=True), honest, exact)


@devices
@formats
def test_reordered_scales_follow_the_formula(device, fp4_format):
    groups = 128 // GROUP[fp4_format]
    q_scale = torch.randint(0, 255, (130, 2, groups), dtype=torch.uint8, device=device)
    k_scale = torch.randint(0, 255, (3, 2, 128, groups), dtype=torch.uint8, device=device)
    views = fp4_indexer_reorder_scales_for_mma_cute(q_scale, k_scale, fp4_format=fp4_format)
    q, k = (storage(x) for x in views)
    for view, tiles, mn, count in ((views[0], q, 130, 2), (views[1], k, 128, 6)):
        assert tiles.shape == fp4_indexer_mma_scale_storage_shape(mn, count, fp4_format=fp4_format)
        assert tiles.stride() == fp4_indexer_mma_scale_storage_stride(mn, count, fp4_format=fp4_format)
        shape = fp4_indexer_mma_scale_shape(mn, count, fp4_format=fp4_format)
        stride = fp4_indexer_mma_scale_stride(mn, count, fp4_format=fp4_format)
        assert view.shape == shape
        assert view.stride() == stride
        assert_equal("view", view, tiles.as_strided(shape, stride))
    for row in (0, 31, 32, 127, 129):
        for group in (0, groups - 1):
            place = (row // 128, group // 4, row % 32, row % 128 // 32, group % 4)
            assert int(q[(1, *place)]) == int(q_scale[row, 1, group])
            if row < 128:
                assert int(k[(5, *place)]) == int(k_scale[2, 1, row, group])
    assert not q[:, 1, :, 2:].any()  # rows that do not exist


def test_shapes_of_the_public_package():
    assert fp4_indexer_mma_scale_storage_shape(300, 4, fp4_format="nvfp4") == (4, 3, 2, 32, 4, 4)
    assert fp4_indexer_mma_scale_storage_stride(300, 4, fp4_format="nvfp4") == (3072, 1024, 512, 16, 4, 1)
    assert fp4_indexer_mma_scale_shape(300, 4, fp4_format="mxfp4") == (32, 4, 3, 4, 1, 4)
    assert fp4_indexer_mma_scale_stride(300, 4, fp4_format="mxfp4") == (16, 4, 512, 1, 512, 1536)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"fp4_format": "fp4"}, ValueError, "fp4_format must be one of mxfp4, nvfp4, got 'fp4'"),
        ({"scale_layout": "mma"}, ValueError, "scale_layout must be one of preordered_mma, public, got mma"),
        ({"q_fp4": torch.zeros(5, 2, 64)}, TypeError, "q_fp4 must have dtype torch.uint8"),
        ({"k_fp4": torch.zeros(4, 1, 128, 32, dtype=torch.uint8)}, ValueError, r"k_fp4.shape\[3\] must be 64"),
        ({"q_scale": torch.zeros(5, 2, 8)}, TypeError, "q_scale must be uint8 or torch.float8_e4m3fn"),
        ({"q_scale": torch.zeros(5, 2, 4, dtype=torch.uint8)}, ValueError, r"q_scale must have shape \(5, 2, 8\)"),
        (
            {"scale_layout": "preordered_mma"},
            ValueError,
            r"q_scale must have shape \(32, 4, 1, 4, 2, 2\) or \(2, 1, 2, 32, 4, 4\)",
        ),
        ({"qo_offset": 3}, ValueError, "qo_offset must be None with causal=False"),
        ({"causal": True, "qo_offset": torch.zeros(2, dtype=torch.int32)}, ValueError, r"qo_offset.shape\[0\] must be 1"),
        ({"causal": True, "qo_offset": torch.zeros(1)}, TypeError, "qo_offset must have dtype torch.int32 or torch.int64"),
        ({"max_seqlen_q": None}, TypeError, "max_seqlen_q must be an int, got NoneType"),
        ({"max_seqlen_k": 100}, ValueError, r"max_seqlen_k must be at least the longest sequence \(130\), got 100"),
        ({"cu_page_offsets": torch.tensor([0, 1])}, ValueError, "cu_page_offsets must give sequence 0 at least 2 pages"),
        ({"cu_page_offsets": torch.tensor([0, 2, 3])}, ValueError, r"cu_page_offsets.shape\[0\] must be 2"),
        ({"cu_page_offsets": torch.tensor([1, 3])}, ValueError, r"cu_page_offsets must not end past kv_indices \(2\), got 3"),
        (
            {"kv_indices": torch.tensor([0, 99], dtype=torch.int32)},
            ValueError,
            r"kv_indices must lie from 0 .* got 99 at \(1,\)",
        ),
    ],
)
def test_misuse(change, error, match):
    _, arguments = setup((5,), (130,), 2, 1, "nvfp4")
    with pytest.raises(error, match=match):
        fp4_indexer_block_scores(**({"scale_layout": "public"} | arguments | change))
