# SPDX-License-Identifier: MIT
"""Tests of kernels written in Gluon run on a Hopper GPU where there is one, and in this interpreter where there is no GPU."""

import pytest
import torch

CUDA = torch.cuda.is_available()
HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
_skipped = pytest.mark.skipif(CUDA and not HOPPER, reason="needs a Hopper GPU, or none")


def on_hopper(test):
    """Marks a test that runs on a Hopper GPU or in the interpreter."""
    marked = pytest.mark.usefixtures("hopper")(_skipped(test))
    return pytest.mark.gpu(marked) if CUDA else marked


def on_a_hopper_gpu(test):
    """Marks a test that is too long for the interpreter, or about what only a GPU has, such as graphs."""
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


def in_turn(cases, values):
    """Pairs names of cases with values: each name with all of them on a GPU, and with one of them in turn in the
    interpreter."""
    pairs = [(name, value, i % len(values) == j) for i, name in enumerate(cases) for j, value in enumerate(values)]
    return [pytest.param(name, value, id=f"{name}-{value}") for name, value, is_turn in pairs if HOPPER or is_turn]
