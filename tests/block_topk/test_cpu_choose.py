# SPDX-License-Identifier: MIT
"""The C kernel's top-k is that of the reference, bit for bit."""

import pytest
import torch

from openmsa import select_blocks_from_scores
from openmsa.block_topk import cpu, cpu_choose
from openmsa.runtime import c_library
from openmsa.testing.allocations import PoisonedOutputs
from openmsa.testing.compare import assert_equal
from tests import instructions

pytestmark = instructions.needs_compiler


@pytest.fixture(autouse=True)
def tasks(monkeypatch):
    """Returns the tasks of the kernel, which the smallest scores are enough for."""
    made, run = [], c_library.run
    monkeypatch.setattr(c_library, "run", lambda *tasks: (made.extend(tasks), run(*tasks))[1])
    monkeypatch.setattr(cpu, "FEW_SCORES", 0)
    return made


def draw(kind, heads, total_q, num_blocks):
    scores = torch.randn(heads, total_q, num_blocks)
    if kind == "ties":
        scores = (2 * scores).round() * torch.tensor([1.0, -0.0])[torch.randint(2, scores.shape)]
    elif kind == "special":
        values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
        scores = torch.where(torch.rand(scores.shape) < 0.6, values[torch.randint(5, scores.shape)], scores)
    elif kind == "nothing":
        scores = torch.full_like(scores, -torch.inf).masked_fill(torch.rand(scores.shape) < 0.5, torch.nan)
    elif kind == "ascending":
        scores = scores.sort(-1).values
    return scores


@pytest.mark.parametrize("kind", ["random", "ties", "special", "nothing", "ascending"])
@pytest.mark.parametrize(
    ("num_blocks", "topk", "forced"),
    [(1, 1, (0, 1)), (7, 16, (1, 2)), (300, 16, (0, 1)), (515, 64, (30, 34)), (1000, 5, (0, 0))],
)
def test_the_selection_is_that_of_the_reference(num_blocks, topk, forced, kind, processor, tasks):
    scores = draw(kind, 3, 40, num_blocks)
    visible = torch.randint(0, num_blocks + 1, (40,), dtype=torch.int32)
    visible[:2] = torch.tensor([0, num_blocks])
    options = {"visible_blocks": visible, "init_blocks": forced[0], "local_blocks": forced[1]}
    with PoisonedOutputs():
        found = select_blocks_from_scores(scores, topk, impl="cpu", **options)
    assert_equal("blocks", found, select_blocks_from_scores(scores, topk, impl="reference", **options))
    assert tasks


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_strides_change_nothing(threads, monkeypatch, tasks):
    scores = draw("ties", 2, 50, 200)
    visible = torch.full((50,), 200, dtype=torch.int32)
    expected = select_blocks_from_scores(scores, 16, visible_blocks=visible)
    monkeypatch.setattr(c_library, "threads_for", lambda products: threads)
    wide = torch.full((50, 2, 220), torch.nan)
    wide[..., 7:207] = scores.transpose(0, 1)
    assert_equal("blocks", select_blocks_from_scores(wide[..., 7:207].transpose(0, 1), 16, visible_blocks=visible), expected)
    assert tasks[-1].pieces >= threads


@pytest.mark.parametrize("why", ["float64", "gaps", "no compiler"])
def test_what_the_kernel_does_not_read_is_left_to_pytorch(why, monkeypatch, tasks):
    scores = draw("ties", 2, 5, 200)
    visible = torch.full((5,), 200, dtype=torch.int32)
    scores = scores.double() if why == "float64" else scores.repeat_interleave(2, 2)[..., ::2] if why == "gaps" else scores
    if why == "no compiler":
        instructions.use_none(monkeypatch)
    options = {"visible_blocks": visible}
    found, expected = (select_blocks_from_scores(scores, 16, impl=impl, **options) for impl in ("cpu", "reference"))
    assert_equal("blocks", found, expected)
    assert not tasks
    assert cpu_choose.SOURCE.exists()
