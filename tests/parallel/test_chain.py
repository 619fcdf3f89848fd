# SPDX-License-Identifier: MIT
"""Steps run as a chain of launches where that has been measured, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from openmsa.inputs import check_scoring
from openmsa.kv_cache import CertifiedKeys, PagedIndexKeys, PagedKV
from openmsa.parallel import chain
from openmsa.types import Layout


def served(monkeypatch, batch=8, pages=4096, new=1, ranks=2, arch=90, dtype=torch.bfloat16, certified=False):
    """Tells whether steps of these sizes are selected, and attended to, in a chain of launches."""
    monkeypatch.setattr(chain.devices, "facts", lambda device: SimpleNamespace(arch=arch))
    monkeypatch.setattr(chain.SCORING, "choice", lambda *_: SimpleNamespace(name="triton"))
    lens, table = torch.full((batch,), 300, dtype=torch.int32), torch.zeros(batch, pages, dtype=torch.int32)
    starts, pool = torch.arange(batch + 1, dtype=torch.int32) * new, torch.zeros(3, 1, 128, 128, dtype=dtype)
    seqs = Layout(starts, starts * 300, new, pages * 128, None if new == 1 else lens, new)
    keys = PagedIndexKeys(CertifiedKeys.quantize(pool) if certified else pool, table, lens)
    call = check_scoring(torch.zeros(batch * new, 4, 128, dtype=dtype), keys, seqs, 128, False)
    layers = chain.Chain(SimpleNamespace(ranks=ranks), lens, 128)
    selects = layers.selects(keys, call)
    return selects, layers.attends(torch.zeros(batch * new, 8, 128, dtype=dtype), PagedKV(pool, pool, table, lens))


@pytest.mark.parametrize("sizes", [{"batch": 1}, {"batch": 8}, {"pages": 2049}, {"batch": 32, "pages": 512}])
def test_measured_steps_are_chains(monkeypatch, sizes):
    assert served(monkeypatch, **sizes) == (True, True)


@pytest.mark.parametrize(
    "other",
    [{"batch": 9}, {"batch": 33, "pages": 512}, {"pages": 256}, {"pages": 2048}, {"pages": 4097}, {"new": 2}, {"ranks": 3},
     {"arch": 100}, {"dtype": torch.float16}, {"certified": True}],
)  # fmt: skip
def test_other_steps_are_not(monkeypatch, other):
    assert served(monkeypatch, **other) == (False, False)
    monkeypatch.setattr(chain, "CHAINED", True)
    assert served(monkeypatch, **other) == (True, True)
    monkeypatch.setattr(chain, "CHAINED", False)
    assert served(monkeypatch) == (False, False)
