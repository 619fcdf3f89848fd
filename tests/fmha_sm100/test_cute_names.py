# SPDX-License-Identifier: MIT
"""The public modules below `fmha_sm100.cute` give the same objects as `fmha_sm100.sparse`."""

import importlib

import pytest

from fmha_sm100 import sparse


@pytest.mark.parametrize("name", ["interface", "quantize", "sparse_index_utils", "fp4_indexer_interface"])
def test_a_public_place_gives_the_same_objects(name):
    module = importlib.import_module(f"fmha_sm100.cute.{name}")
    assert module.__all__
    for found in module.__all__:
        assert getattr(module, found) is getattr(sparse, found)


def test_each_name_of_sparse_with_a_public_place_has_it():
    held = {"interface", "quantize", "sparse_index_utils", "fp4_indexer_interface"}
    names = set().union(*(importlib.import_module(f"fmha_sm100.cute.{m}").__all__ for m in held))
    public = {n for n in sparse.__all__ if n[0].islower()} | {"SparseDecodePagedAttentionWrapper", "Nvfp4QuantizedTensor"}
    assert public == names
