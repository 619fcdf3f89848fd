# SPDX-License-Identifier: MIT
"""What `scripts/compile_check.py` says of machine code is true."""

import pytest

from tests.runtime.uninterpreted import passes

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_the_check_finds_faults_and_its_calls_reach_every_kernel():
    """See `tests.runtime.compile_checked`, in a process whose kernels are not interpreted."""
    passes("tests.runtime.compile_checked")
