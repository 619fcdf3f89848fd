# SPDX-License-Identifier: MIT
"""Checks hand on what later code may rely on."""

from enum import IntEnum

import pytest

from openmsa.runtime import checks


class Size(IntEnum):
    BLOCK = 128


def test_integers_are_plain():
    """Launches of kernels tell types of arguments apart, so a plain int must come back."""
    assert type(checks.integer("block_size", Size.BLOCK, 16)) is int
    assert checks.integer("block_size", Size.BLOCK, 16) == 128
    with pytest.raises(ValueError, match="block_size must be at least 129, got 128"):
        checks.integer("block_size", Size.BLOCK, 129)
    with pytest.raises(TypeError, match="block_size must be an int, got bool"):
        checks.integer("block_size", True, 1)
