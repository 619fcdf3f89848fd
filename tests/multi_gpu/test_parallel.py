# SPDX-License-Identifier: MIT
"""What tests/parallel says of processes on a CPU holds on the GPUs of one host: `make test-multi-gpu`."""

import pytest
import torch

from tests.multi_gpu import graphs
from tests.parallel import cases
from tests.parallel.world import World

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(GPUS < 2, reason="it needs two GPUs or more")]
SIZES = tuple(n for n in (2, 4, 8) if n <= GPUS)
OPTIONS = {"topk": 16, "block_size": 128}
FORCED = {"topk": 7, "block_size": 64, "init_blocks": 1, "local_blocks": 2}
RAGGED = (3700, 0, 1, 7003, 129)


@pytest.fixture(scope="module")
def world():
    world = World(GPUS, "nccl", timeout=90.0)
    yield world
    world.close()


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
def test_prefill(world, size, order):
    for lengths, options in ((RAGGED, OPTIONS), ((5000,), FORCED)):
        world.run(size, cases.prefill_selection, size, lengths, order, torch.bfloat16, "cuda", cases.WIDE, options)
    world.run(size, cases.prefill, size, (700, 65), order, torch.bfloat16, "cuda", cases.WIDE, FORCED, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward(world, dtype):
    """The second sequence has fewer tokens than there are ranks, and the third none."""
    world.run(2, cases.rounded_backward, 2, (1500, 1, 0, 333), dtype, "cuda", cases.WIDE, OPTIONS | {"topk": 4})


@pytest.mark.parametrize("moves", ["keys", "queries"])
def test_chunks_with_caches(world, moves):
    chunks = ((400, 50, 0), (500, 0, 200), (3, 600, 1))
    world.run(2, graphs.chunked_selection, 2, chunks, cases.WIDE, OPTIONS | {"topk": 4}, 128, moves)


@pytest.mark.parametrize("exchange", ["symmetric", "collective"])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_decode(world, size, new, exchange):
    lens = (9000, 1, 330, 0, 4097, 128)
    for options in (OPTIONS, FORCED):
        chosen = world.run(
            size, cases.decode, size, lens, new, torch.bfloat16, "cuda", cases.WIDE, options, 128, ("plain", "plain"), exchange
        )
        assert chosen == [exchange] * size


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_chained_decode(world, size, new):
    lens, plain = (9000, 1, 330, 0, 4097, 128), ("plain", "plain")
    for options, formats in ((OPTIONS, plain), (FORCED, plain), (OPTIONS, ("e4m3", "e4m3"))):
        arguments = (lens, new, torch.bfloat16, "cuda", cases.WIDE, options, 128, formats, "symmetric")
        world.run(size, graphs.chained, size, cases.decode, *arguments)


@pytest.mark.parametrize("chain", [False, True])
def test_many_sequences_give_all_ranks_the_same_bits(world, chain):
    """So many results are merged that one rounded otherwise would be met."""
    arguments = ((3000,) * 32, 1, torch.bfloat16, "cuda", cases.WIDE, OPTIONS, 128, ("plain", "plain"), "symmetric")
    world.run(2, *((graphs.chained, 2, cases.decode) if chain else (cases.decode, 2)), *arguments)


def test_formats(world):
    for formats in (("e4m3", "e4m3"), ("nvfp4", "nvfp4")):
        world.run(2, cases.decode, 2, (3000, 700), 1, torch.bfloat16, "cuda", cases.WIDE, OPTIONS, 128, formats)


@pytest.mark.parametrize("exchange", ["symmetric", "collective"])
def test_graphs(world, exchange):
    world.run(2, graphs.replays, 2, exchange)
    if exchange == "symmetric":
        world.run(2, graphs.chained, 2, graphs.replays, exchange)


def test_a_rank_that_dies_is_an_error_of_the_others():
    world = World(2, "nccl", timeout=20.0)
    first, dead = world.outcomes(2, graphs.dies, 2)
    assert dead is None
    assert first is None or first.kind in ("RuntimeError", "AcceleratorError", "DistBackendError")
    world.close()
