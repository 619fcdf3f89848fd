# SPDX-License-Identifier: MIT
"""The shipped byte model is small, reads code well, with its blocks as well as with everything, and recalls lines."""

import pytest
import torch

from benchmarks.evidence import measures, recall, ways
from openmsa.demo.byte_model import own_sources
from openmsa.tiny import SHIPPED, load


@pytest.fixture(scope="module")
def model():
    return load()[0]


def test_it_is_small_enough():
    assert SHIPPED.stat().st_size <= 15_000_000


def test_it_reads_code_that_it_was_not_trained_on(model):
    text = measures.windows(torch.frombuffer(bytearray(own_sources(9000)), dtype=torch.uint8), 3072, 1)
    dense, sparse, few = (measures.held_out(model, text, way)["loss"] for way in (ways.dense, ways.sparse(16), ways.sparse(1)))
    assert dense < 1.2
    assert sparse == pytest.approx(dense, rel=0.01)
    assert few > 1.02 * dense


def test_it_recalls_lines(model):
    text = measures.windows(torch.frombuffer(bytearray(own_sources(9000)), dtype=torch.uint8), 3072, 1)
    assert recall.BYTES_A_PAIR == 128  # as it was trained
    assert measures.recall(model, text, ways.sparse(4))["recalled"] > 0.9
    assert measures.recall(model, text, ways.window(2))["recalled"] < 0.5
