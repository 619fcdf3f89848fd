# SPDX-License-Identifier: MIT
"""The PTX of the kernel that takes the blocks of a decode step best first does what the kernel says, without races."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from openmsa.decode import gluon_sm90_best  # noqa: E402
from tests.decode import test_gluon_sm90_best as best  # noqa: E402
from tests.ptx.compiled import VARIANTS, flat  # noqa: E402
from tests.ptx.machine import Machine  # noqa: E402
from tests.ptx.memory import Global  # noqa: E402
from tests.ptx.program import parse  # noqa: E402
from tests.runtime.uninterpreted import passes  # noqa: E402

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel itself runs"),
    pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="launches are recorded with triton 3.6"),
]
SHARED = "three programs a row"


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """Returns what `compiled` does for all variants, which a process compiles whose kernels are not interpreted."""
    file = tmp_path_factory.mktemp("ptx") / "variants.json"
    passes("tests.ptx.compiled", str(file))
    return json.loads(file.read_text())


def bits(value):
    """Returns an argument as a program is given it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else value


def runs(types, size, text):
    """Returns a function that launches programs of this PTX one after the other, in random order, and fails at races."""
    program, chance = parse(text), random.Random(0)

    def launch(kernel, grid, *arguments, **constants):
        fields = [x for x, kind in zip(flat(arguments), types, strict=False) if kind != "constexpr"]
        memory = Global([x for x in fields if isinstance(x, torch.Tensor)])
        parameters = [*map(bits, fields), 0, 0]  # There is no scratch memory.
        places = list(itertools.product(*map(range, grid)))
        for place in chance.sample(places, len(places)):
            races = Machine(program, parameters, memory, size, place, grid).run()
            assert not races, races

    return launch


def verify(name, compiled, monkeypatch):
    """Runs a variant as the test of the kernel does, which compares all that it leaves."""
    variant = VARIANTS[name]
    monkeypatch.setitem(best.CASES, name, variant.case)
    monkeypatch.setattr(gluon_sm90_best, "launch_kernel", runs(*compiled))
    best.test_on_the_device(name, variant.pairs, variant.splits, variant.handed)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_compiled(name, every, monkeypatch):
    verify(name, every[name], monkeypatch)


def test_scores_that_nobody_writes(every, monkeypatch):
    """Programs look for them, and go on in the end."""
    monkeypatch.setattr(gluon_sm90_best, "launch_kernel", runs(*every["ragged"]))
    best.test_scores_that_nobody_writes_do_not_hang_it(VARIANTS["ragged"].splits)


def places(lines, anchor, step, what):
    """Yields from each line with the anchor the first line that has some text, downwards or upwards by the step."""
    for i, line in enumerate(lines):
        if anchor in line:
            while what not in lines[i]:
                i += step
            yield i


WAIT = "cp.async.wait_group \t3;"
MUTATIONS = {
    "no fence": ("fence.proxy.async", 1, "fence.proxy.async", ""),
    "no barrier behind a fence": ("fence.proxy.async", 1, "bar.sync", ""),
    "no barrier behind a product": ("wgmma.wait_group", 1, "bar.sync", ""),
    "no barrier before programs are counted": ("atom.global", -1, "bar.sync", ""),
    "one copy less is waited for": (WAIT, 1, WAIT, "cp.async.wait_group 4;"),
    "a product is not waited for": ("wgmma.wait_group", 1, "wgmma.wait_group", ""),
}
"""An anchor, a step and a text, as `places` takes them, and what stands there instead."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_told(mutation, every, monkeypatch):
    """Each place where something lacks that is needed shows, as a race or as a wrong result."""
    types, size, text = every[SHARED]
    *where, new = MUTATIONS[mutation]
    lines = text.splitlines()
    found = list(places(lines, *where))
    assert found
    for i in found:
        with pytest.raises(AssertionError):
            verify(SHARED, (types, size, "\n".join([*lines[:i], new, *lines[i + 1 :]])), monkeypatch)
