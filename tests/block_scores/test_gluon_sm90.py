# SPDX-License-Identifier: MIT
"""The Gluon scoring kernel for Hopper is chosen where it should be; on such a GPU its scores agree with the reference and, bit
for bit, with the Triton kernel."""

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from openmsa import E4M3, PagedIndexKeys
from openmsa.block_scores import gluon_sm90_scores, reference
from openmsa.block_scores.gluon_sm90_scores import CONFIG, serves
from openmsa.primitives.rows import Tile
from openmsa.primitives.walks import Kind
from openmsa.runtime.devices import COMPILE_TARGETS
from openmsa.testing.compare import assert_close, assert_equal
from openmsa.testing.inputs import paged, problem
from openmsa.types import layout
from tests import oracle
from tests.block_scores.launched import launched_scores
from tests.hopper.marks import DEVICE, in_turn, on_hopper
from tests.low_precision import codes_of

# name: query lengths, key lengths, index dim, index heads, key heads, page size or None, scales, positions of first queries
CASES = {
    "one tile": ((70,), (128,), 128, 1, 1, None, "tensor", None),
    "odd": ((301,), (1733,), 128, 4, 1, None, "head", None),
    "long": ((70,), (9001,), 128, 4, 1, None, "tensor", None),
    "ragged": ((3, 170, 0, 65, 129), (3, 900, 9, 0, 2047), 128, 4, 1, None, "head", None),
    "a head a key head": ((300, 77), (1400, 200), 128, 4, 4, None, "head", None),
    "eight heads": ((100, 33), (1500, 4000), 128, 8, 1, None, "tensor", None),
    "two key heads": ((100, 33), (1500, 4000), 128, 8, 2, None, "head", None),
    "offsets": ((200, 150, 90), (1000, 3000, 513), 128, 4, 1, None, "head", (-20, 1000, 5000)),
    "four tiles": ((200,), (512,), 128, 4, 1, None, "head", (312,)),
    "five tiles": ((130,), (640,), 128, 4, 1, None, "tensor", (900,)),
    "dim 64": ((200, 150), (1000, 3001), 64, 4, 1, None, "head", None),
    "pages": ((200, 150, 0), (1000, 3001, 5), 128, 4, 1, 128, "head", None),
    "wide pages": ((200, 150, 0), (1000, 3001, 5), 128, 4, 1, 256, "tensor", None),
    "pages of dim 64": ((200, 150), (1000, 3001), 64, 4, 2, 128, "head", None),
}


def test_what_it_serves():
    def kind(dim=128, format=1, product=tl.float8e4nv, tma=True):
        return Kind.of(dim, 128, format, product, False, tma)

    block, hopper = Tile.of(128), COMPILE_TARGETS[90]
    assert serves(hopper, kind(), block, 65, 4)
    assert serves(hopper, kind(64), block, 65536, 4)
    assert not serves(hopper, kind(), block, 64, 4)
    assert not serves(hopper, kind(80), block, 65536, 4)
    assert not serves(hopper, kind(tma=False), block, 65536, 4)
    assert not serves(hopper, kind(product=tl.bfloat16), block, 65536, 4)
    assert not serves(hopper, kind(format=0, product=tl.bfloat16), block, 65536, 4)
    assert not serves(hopper, kind(format=2, product=tl.bfloat16), block, 65536, 4)
    assert not serves(hopper, kind(format=3, product=tl.bfloat16), block, 65536, 4)
    assert all(serves(hopper, kind(), block, 65536, group) for group in (1, 8, 64))
    assert not any(serves(hopper, kind(), block, 65536, group) for group in (3, 12, 128))
    assert not any(serves(hopper, kind(), Tile.of(size), 65536, 4) for size in (64, 100, 256))
    assert not any(serves(COMPILE_TARGETS[arch], kind(), block, 65536, 4) for arch in (80, 100, 120))


def test_configuration_fits():
    assert CONFIG.resident * (4 * 128 * 128 + 4096) <= COMPILE_TARGETS[90].shared_bytes
    assert CONFIG.rows == 32 * CONFIG.num_warps


@on_hopper
@pytest.mark.parametrize(("name", "visible"), in_turn(CASES, [False, True]))
def test_on_the_device(name, visible, monkeypatch):
    q_lens, k_lens, dim, heads, key_heads, page_size, per, offsets = CASES[name]
    device = DEVICE
    p = problem(
        q_lens, k_lens, kv_heads=heads, index_heads=heads, index_key_heads=key_heads, index_dim=dim, offsets=offsets,
        dtype=torch.bfloat16,
    ).to(device)  # fmt: skip
    p.index_k[sum(k_lens) // 2, 0, 3], p.index_k[256:384] = torch.nan, torch.nan
    index_q = E4M3.quantize(p.index_q, per=per)
    if page_size is None:
        index_k, lengths = E4M3.quantize(p.index_k, per=per), layout(p.seqs, sum(q_lens), sum(k_lens), device)
    else:
        cache = paged(p, page_size)[1]
        index_k = PagedIndexKeys(E4M3.quantize(cache.keys, per=per), cache.page_table, cache.seq_lens)
        lengths = index_k.layout(p.seqs, sum(q_lens), device)
    num_blocks = lengths.num_blocks(128)

    def run():
        return launched_scores(index_q, index_k, lengths, visible)

    launched = []
    launch = gluon_sm90_scores.launch
    monkeypatch.setattr(gluon_sm90_scores, "launch", lambda *args: (launched.append(1), launch(*args)))
    tuned = run()
    assert launched
    assert_equal("repeated", run(), tuned.cpu())
    monkeypatch.setattr(gluon_sm90_scores, "serves", lambda *args: False)
    assert_equal("Triton's", run(), tuned.cpu())
    truth = reference.block_scores(index_q.dequantize(torch.float64), index_k, lengths, 128)
    pages = () if page_size is None else (index_k.page_table, index_k.seq_lens)
    factors = codes_of(index_q), codes_of(index_k if page_size is None else index_k.keys, *pages)
    assert_close("scores", tuned, oracle.honest_scores(p, 128, *factors, num_blocks=num_blocks), truth)
