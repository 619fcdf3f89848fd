# SPDX-License-Identifier: MIT
"""Recorded selections come back as they were kept, and what a file lacks is named."""

import numpy
import pytest
import torch

from benchmarks.evidence.selections import as_uint16
from openmsa.bench import recorded
from openmsa.bench.inputs import Inputs
from openmsa.bench.workloads import WORKLOADS, Workload


@pytest.fixture
def kept(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randint(-1, 16, (128, 2, 4), generator=generator, dtype=torch.int32) for _ in range(2)]
    file = tmp_path / "recorded.npz"
    numpy.savez_compressed(file, **{f"256_layer{i}": as_uint16(x) for i, x in enumerate(layers)}, block_size=16)
    monkeypatch.setattr(recorded.recorded, "__defaults__", (file,))
    return layers


@pytest.mark.parametrize("heads", [1, 4, 6])
def test_heads_are_those_of_the_layers(kept, heads):
    found = recorded.recorded(100, 256, heads, 4, 16)
    every = torch.cat(kept, 1)[-100:]
    assert found.dtype == torch.int32
    for head in range(heads):
        assert torch.equal(found[:, head], every[:, head % 4])


def test_a_workload_replays_them(kept):
    shape = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "index_dim": 16, "block_size": 16, "topk": 4, "batch": 2}
    x = Inputs(Workload("small", "cpu", 100, 256, (), **shape), torch.device("cpu"))
    found = x.selection("recorded")
    assert torch.equal(found, kept[0][-100:].repeat(2, 1, 1))
    assert x.selection("recorded") is found


@pytest.mark.parametrize(
    ("queries", "length", "topk", "words"),
    [(129, 256, 4, "must have 129 queries"), (8, 512, 4, "some of 512 keys"), (8, 256, 5, "5 blocks a query")],
)
def test_what_is_missing_is_named(kept, queries, length, topk, words):
    with pytest.raises(ValueError, match=words):
        recorded.recorded(queries, length, 2, topk, 16)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="which is missing"):
        recorded.recorded(8, 256, 2, 4, 16, tmp_path / "none.npz")


def test_the_shipped_file_serves_its_workload():
    w = next(w for w in WORKLOADS if "sparse_attention/recorded" in w.rows)
    found = recorded.recorded(w.q_len, w.context, w.num_kv_heads, w.topk, w.block_size)
    own = torch.arange(w.context - w.q_len, w.context) // w.block_size
    assert found.shape == (w.q_len, w.num_kv_heads, w.topk)
    assert (found == own[:, None, None]).any(-1).all()  # each query reads its own block,
    assert (found <= own[:, None, None]).all()  # none that it does not see,
    assert ((found.diff(dim=-1) > 0) | (found[..., 1:] < 0)).all()  # and none twice
