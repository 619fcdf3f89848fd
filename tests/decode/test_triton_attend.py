# SPDX-License-Identifier: MIT
"""A layer of two launches, the second of which selects and attends, gives the bits of one of three launches."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa import DecodePlan
from openmsa.decode import kernels, scored, triton_attend
from openmsa.decode import plan as decode
from openmsa.decode.sizes import Sizes
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TAKES_TWO = scored.takes_two
CASES = [  # new_tokens, index_heads, block, page, topk, init, local, room: keys that the plan is made for
    (1, 2, 32, 32, 4, 0, 1, 1024),
    (3, 1, 32, 64, 5, 1, 2, 1024),
    (2, 2, 64, 32, 3, 1, 1, 2048),
    (1, 1, 32, 32, 3, 2, 1, 1024),  # every block of a selection is forced
    (1, 2, 32, 32, 16, 0, 0, 4096),  # several splits
]


def _ran(monkeypatch, two, p, lens, case):
    """Returns blocks, output and lse of a plan; lens: the lengths of keys and of index keys."""
    tokens, index_heads, block, page, topk, init, local, room = case
    monkeypatch.setattr(kernels, "takes_two", TAKES_TWO if two else lambda *given: False)
    if DEVICE == "cpu":
        monkeypatch.setattr(decode, "uses_kernels", lambda device: True)
    batch = len(lens[0])
    plan = DecodePlan(
        max_batch=batch, num_q_heads=8, num_kv_heads=2, head_dim=64, page_size=page, max_pages=room // page, new_tokens=tokens,
        index_heads=index_heads, index_dim=32, topk=topk, block_size=block, init_blocks=init, local_blocks=local,
        certified_keys=False, dtype=torch.float16, device=DEVICE,
    )  # fmt: skip
    plan._kernels.one_launch = [None] * batch
    plan._kernels.shared = plan._kernels.shared._replace(cuts=[None] * batch)
    caches = []
    for cache, own in zip(paged(p, page), lens, strict=True):
        width = room // page
        table = torch.full((batch, width), -1, dtype=torch.int32)
        table[:, : cache.page_table.shape[1]] = cache.page_table[:, :width]
        kept = {name: x.to(DEVICE) for name, x in vars(cache).items()} | {"page_table": table.to(DEVICE)}
        caches.append(type(cache)(**kept | {"seq_lens": torch.tensor(own, dtype=torch.int32, device=DEVICE)}))
    plan._kernels.scores.fill_(torch.nan)
    out = torch.full_like(p.q, torch.nan, device=DEVICE)
    plan.run(p.q.to(DEVICE), caches[0], p.index_q.to(DEVICE), caches[1], out=out)
    return plan.blocks.cpu().clone(), out.cpu(), plan.lse.cpu().clone()


@pytest.mark.parametrize("near", [32, 256])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_three_launches(monkeypatch, case, near):
    """Ragged and empty sequences, rows that each warp selects from and rows that a program selects from, equal scores, and
    caches that disagree about their lengths."""
    tokens, index_heads, block, *_ = case
    launched, launch = [], triton_attend.launch
    monkeypatch.setattr(triton_attend, "NEAR", near)
    monkeypatch.setattr(triton_attend, "launch", lambda *given: (launched.append(given), launch(*given)))
    lens = (22 * block + 5, 0, block - 1, 9 * block)
    p = problem(
        [tokens] * 4, lens, kv_heads=2, group=4, head_dim=64, index_dim=32, index_heads=index_heads, integer_index=True,
        dtype=torch.float16, seed=block + near,
    )  # fmt: skip
    for of_keys, of_index_keys in ((lens, lens), ((9 * block, 0, 3, 9 * block), (22 * block + 5, 0, block - 1, block))):
        three = _ran(monkeypatch, False, p, (of_keys, of_index_keys), case)
        assert not launched
        two = _ran(monkeypatch, True, p, (of_keys, of_index_keys), case)
        assert len(launched) == 1
        launched.clear()
        for name, a, b in zip(("blocks", "out", "lse"), two, three, strict=True):
            assert_equal(name, a, b)


def test_what_a_lane_holds_does_not_grow_with_the_room():
    sizes = Sizes(1, 16, 1, 128, 1, 1, 128, 128, 2048, 16, 0, 1, 128)
    assert triton_attend.choice(sizes, 4) == triton_attend.Choice(1, 16, 0, 1, 8, 16, 128, 256)
    assert triton_attend.choice(sizes._replace(num_blocks=128), 4) == triton_attend.Choice(1, 16, 0, 1, 4, 0, 128, 128)
    assert triton_attend.choice(sizes._replace(page_size=16), 4).pages == 0
