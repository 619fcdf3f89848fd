# SPDX-License-Identifier: MIT
"""The compiler's key is computed once for a state of its files."""

import pytest

pytest.importorskip("triton")

import triton.runtime.cache

from openmsa.runtime import compiler_key
from openmsa.runtime.compiler_key import RECORD, remembered


@pytest.fixture
def compiler(tmp_path):
    root = tmp_path / "triton"
    for folder in ("compiler", "_C"):
        (root / folder).mkdir(parents=True)
        (root / folder / "part.py").write_text("one")
    return root


def test_the_second_process_does_not_compute(compiler, tmp_path):
    calls = []
    for _ in range(2):
        assert remembered(lambda: calls.append(0) or "key", compiler, tmp_path / "cache" / RECORD) == "key"
    assert len(calls) == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"files": 1}', '{"files": [], "key": 3}'])
def test_a_damaged_record_is_a_miss(compiler, tmp_path, damage):
    (tmp_path / RECORD).write_text(damage)
    assert remembered(lambda: "key", compiler, tmp_path / RECORD) == "key"


def test_a_changed_file_is_a_miss(compiler, tmp_path):
    assert remembered(lambda: "old", compiler, tmp_path / RECORD) == "old"
    (compiler / "_C" / "part.py").write_text("other")
    assert remembered(lambda: "new", compiler, tmp_path / RECORD) == "new"


def test_a_record_that_cannot_be_written_costs_nothing_else(compiler, tmp_path):
    (tmp_path / "file").write_text("")
    assert remembered(lambda: "key", compiler, tmp_path / "file" / RECORD) == "key"


def test_triton_takes_the_same_key(monkeypatch, tmp_path):
    """What is remembered is what Triton computes, so that its cache is shared with processes that compute it."""
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "computed")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compiler_key.remember.__wrapped__()
    assert triton.runtime.cache.triton_key() == "computed"
    assert (tmp_path / RECORD).exists()
