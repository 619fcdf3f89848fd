# SPDX-License-Identifier: MIT
"""scripts/timeline.py reads a profile as it should; to take one needs a GPU and is not tested."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

TIMELINE = runpy.run_path(str(Path(__file__).parents[2] / "scripts/timeline.py"))
Span, last_run, table = (TIMELINE[name] for name in ("Span", "last_run", "table"))


def test_only_what_follows_the_last_flush_counts_from_its_end():
    spans = [Span("b", 28, 40), Span("reduce_kernel<512>", 0, 10), Span("b", 12, 20), Span("a", 27, 30)]
    spans.append(Span("reduce_kernel<512>", 20.5, 25))
    assert last_run(spans, "reduce_kernel") == [Span("a", 2, 5), Span("b", 3, 15)]


def test_a_line_says_name_start_end_and_length():
    assert table("plan", [Span("score_kernel" + 40 * "x", 1.25, 3.5)]).splitlines()[2].split() == [
        "score_kernel" + 32 * "x", "1.2", "3.5", "2.2"
    ]  # fmt: skip


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["timeline.py", "gpu-decode-b32-128k/decode_plan"])
    assert TIMELINE["main"]() == 2
    assert "CUDA device" in capsys.readouterr().err


def test_it_asks_for_rows(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["timeline.py"])
    with pytest.raises(SystemExit):
        TIMELINE["main"]()
