# SPDX-License-Identifier: MIT
"""`benchmarks/decode_layers.py` times every way in both places and compares results; clock and graphs are the test's own."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import decode, decode_layers
from openmsa.decode import plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the script itself runs")


class Event:
    """An event whose time is what has run so far: other kernels count 1,000, a layer 1."""

    ran = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.ran

    def synchronize(self):
        pass

    def elapsed_time(self, stop):
        return (stop.at - self.at) / 1e3


def counted(run):
    def replay():
        Event.ran += sum(1000 * (other is not None) + (result is not None) for other, result in run())

    return replay


def test_layers_are_timed_in_a_row_and_behind_others(monkeypatch):
    for module in (decode, decode_layers):
        monkeypatch.setattr(module, "GPU", torch.device("cpu"))
    monkeypatch.setattr(plan, "uses_kernels", lambda device: True)
    monkeypatch.setattr(decode_layers, "captured", counted)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    torch.manual_seed(0)
    steps = [decode.Step(2, 256, 1, (4, 1), near=False) for _ in range(2)]
    others = decode_layers.Others()
    assert others().isfinite().all()
    found = decode_layers.measure(steps, 512, None, others, 3)
    assert found.pop("apart") < 0.01
    assert found == {f"{way} {place}": pytest.approx(1) for way in ("plan", "stages") for place in ("in a row", "behind")}
