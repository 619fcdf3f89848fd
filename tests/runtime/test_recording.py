# SPDX-License-Identifier: MIT
"""What `recording` records is what Triton's binder says, and a recorded machine behaves as one with a GPU."""

import pytest

triton = pytest.importorskip("triton")

from openmsa.runtime.recording import recording  # noqa: E402
from tests.runtime.uninterpreted import passes  # noqa: E402


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6")
def test_launches_are_recorded_without_a_gpu():
    """See `tests.runtime.recorded`, in a process whose kernels are not interpreted."""
    passes("tests.runtime.recorded")


def test_the_interpreter_has_no_launches_to_record(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is not set, got TRITON_INTERPRET=1"), recording(90):
        pass
