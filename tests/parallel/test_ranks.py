# SPDX-License-Identifier: MIT
"""The number of ranks changes nothing: up to four processes on a CPU compute what one computes."""

import functools
import time

import pytest
import torch

from tests.parallel import cases
from tests.parallel.world import World

OPTIONS = {"topk": 3, "block_size": 16}
FORCED = {"topk": 4, "block_size": 16, "init_blocks": 1, "local_blocks": 2}
RAGGED = (37, 0, 1, 70, 16, 5)
SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def world():
    world = World(4)
    yield world
    world.close()


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
def test_prefill(world, size, order):
    for dtype, lengths, exact in (
        (torch.float32, RAGGED, True),
        (torch.bfloat16, (90,), False),
        (torch.float64, (0, 0), False),
    ):
        world.run(size, cases.prefill, size, lengths, order, dtype, "cpu", cases.SMALL, FORCED, exact)


@pytest.mark.parametrize("size", SIZES)
def test_prefill_selection(world, size):
    for order, lengths in (("zigzag", RAGGED), ("contiguous", (200, 3))):
        world.run(size, cases.prefill_selection, size, lengths, order, torch.bfloat16, "cpu", cases.SMALL, OPTIONS)


def test_query_chunks(world):
    world.run(3, cases.query_chunks, 3, RAGGED, OPTIONS, 7)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("lengths", [(37, 0, 1, 70), (2,)])
def test_backward(world, lengths, order):
    """With two tokens, some of three ranks have none."""
    world.run(3, cases.backward, 3, lengths, order, "cpu", cases.SMALL, OPTIONS)


def test_rounded_backward(world):
    for dtype in (torch.float32, torch.bfloat16):
        world.run(2, cases.rounded_backward, 2, (150, 1, 0, 33), dtype, "cpu", cases.SMALL, OPTIONS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_chunks_with_caches(world, size):
    chunks = ((40, 5, 0), (50, 0, 20), (0, 0, 13), (3, 60, 1))
    world.run(size, cases.chunked, size, chunks, "zigzag", torch.float32, "cpu", cases.SMALL, OPTIONS, 16)
    world.run(size, cases.chunked, size, chunks, "contiguous", torch.float32, "cpu", cases.SMALL, FORCED, 32)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_whose_queries_travel(world, size):
    chunks = ((40, 5, 0), (50, 0, 20), (0, 0, 13), (3, 60, 1), (7, 1, 30))
    plain = ("plain", "plain")
    run = functools.partial(world.run, size, cases.chunked, size, chunks)
    run("zigzag", torch.float32, "cpu", cases.SMALL, OPTIONS, 16, plain, "queries")
    run("contiguous", torch.float32, "cpu", cases.SMALL, FORCED, 32, plain, "queries")
    run("zigzag", torch.float64, "cpu", cases.SMALL, OPTIONS | {"local_blocks": 0}, 16, plain, "queries")
    run("zigzag", torch.float32, "cpu", cases.SMALL, OPTIONS, 16, ("nvfp4", "certified"), "queries")


@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("nvfp4", "mxfp4"), ("plain", "int8"), ("plain", "nvfp4")])
def test_formats(world, formats):
    options = {"order": "zigzag", "dtype": torch.float32, "device": "cpu", "sizes": cases.SMALL, "options": OPTIONS, "page": 32}
    world.run(2, cases.chunked, 2, ((40, 5), (30, 1)), *options.values(), formats)
    world.run(3, cases.decode, 3, (200, 33, 0, 97), 1, torch.float32, "cpu", cases.SMALL, OPTIONS, 32, formats)


def test_certified_keys(world):
    world.run(2, cases.certified, 2, ((40, 5), (30, 1)), OPTIONS, 16)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_decode(world, size, new):
    lens = (200, 1, 33, 0, 97, 16, 50)
    for dtype, options in ((torch.float32, OPTIONS), (torch.bfloat16, FORCED), (torch.float64, FORCED | {"topk": 20})):
        world.run(size, cases.decode, size, lens, new, dtype, "cpu", cases.SMALL, options, 32)


def test_decode_without_forced_blocks(world):
    options = {"topk": 3, "block_size": 16, "local_blocks": 0}
    assert world.run(3, cases.decode, 3, (100, 7), 1, torch.float32, "cpu", cases.SMALL, options, 16) == ["collective"] * 3


@pytest.mark.parametrize(("heads", "size"), [((8, 4, 4), 2), ((8, 4, 1), 4), ((8, 2, 2), 4), ((6, 3, 3), 3)])
def test_tensor_parallel(world, heads, size):
    shares = world.run(size, cases.tensor_parallel, size, heads, (50, 9), OPTIONS)
    assert [share.q for share in shares] == [slice(r * heads[0] // size, (r + 1) * heads[0] // size) for r in range(size)]


def test_misuse(world):
    for found in world.run(2, cases.misuse, 2):
        for text, part in zip(
            found,
            (
                "group must have 3 ranks",
                "q.shape[0] must be 450",
                "topk must be from 1 to 64, got 0",
                "certified must be False without caches",
                "must be given together, got None for index_keys and cached",
                "group must be a torch.distributed ProcessGroup",
            ),
            strict=True,
        ):
            assert part in text


def test_a_rank_that_dies_is_an_error_of_the_others():
    world = World(3, timeout=5.0)
    world.run(3, cases.prefill, 3, (9,), "zigzag", torch.float32, "cpu", cases.SMALL, OPTIONS, True)
    start = time.monotonic()
    first, second, dead = world.outcomes(3, cases.dies, 3)
    assert dead is None
    assert first.kind == second.kind == "RuntimeError"
    assert time.monotonic() - start < 30
    world.close()
