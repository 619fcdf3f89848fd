# SPDX-License-Identifier: MIT
"""C files are compiled once for a machine, and where they cannot be, a sentence says why."""

import ctypes
import logging
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from openmsa.runtime import c_library
from openmsa.runtime.environment import c_compiler

SOURCE = """
#include "../primitives/lanes.h"
#include <unistd.h>
typedef struct { int64_t bytes, sleep, *sum; } Call;
int64_t memory_bytes(const Call *c) { return c->bytes; }
void fill(const void *call, int64_t piece, char *memory) {
    const Call *c = call;
    usleep(c->sleep);
    memset(memory, 1, c->bytes);
    for (int64_t i = 0; i < c->bytes; i++) c->sum[piece] += memory[i];
}
"""
needs_compiler = pytest.mark.skipif(c_compiler() is None, reason="the machine has no C compiler")


class Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("bytes", "sleep", "sum")]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Returns a C file of a package that has a header, too; the cache folder is empty."""
    monkeypatch.setenv("OPENMSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENMSA_CC", raising=False)
    (tmp_path / "primitives").mkdir()
    header = Path(c_library.__file__).parents[1] / "primitives" / "lanes.h"
    (tmp_path / "primitives" / "lanes.h").write_text(header.read_text())
    (tmp_path / "stage").mkdir()
    file = tmp_path / "stage" / "fill.c"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def commands(monkeypatch):
    """Returns the commands of compilers that were run and made a library."""
    made, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda c, **o: (made.append(c) if "-o" in c else None, run(c, **o))[1])
    return made


def load(source, **options):
    """Loads as a process does that has not loaded it before."""
    c_library.library.cache_clear()
    return c_library.library(source, **options)


def libraries(tmp_path):
    return sorted((tmp_path / "cache" / "c").iterdir())


@needs_compiler
def test_a_library_is_compiled_once(source, commands, tmp_path):
    for _ in range(2):
        found = load(source)
        assert found.says == f"compiled by {c_compiler()}"
        assert found.functions.memory_bytes(ctypes.byref(Call(bytes=7))) == 7
    assert len(commands) == 1
    assert [path.suffix for path in libraries(tmp_path)] == [".so"]


@needs_compiler
def test_other_files_and_flags_are_other_libraries(source, commands, tmp_path):
    load(source)
    source.write_text(SOURCE + "\n")
    load(source)
    with (tmp_path / "primitives" / "lanes.h").open("a") as header:
        header.write("/* changed */")
    load(source)
    load(source, flags=(*c_library.FLAGS, "-DX"))
    assert len(commands) == len(libraries(tmp_path)) == 4


@needs_compiler
def test_a_damaged_library_is_made_again(source, commands, tmp_path):
    path = c_library._compiled(c_compiler(), source, c_library.FLAGS)
    assert libraries(tmp_path) == [path]
    path.write_bytes(b"no library")
    assert load(source).functions is not None
    assert len(commands) == 2


@needs_compiler
def test_a_cache_folder_that_cannot_be_made(source, commands, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPENMSA_CACHE_DIR", str(tmp_path / "file"))
    assert load(source).functions.memory_bytes(ctypes.byref(Call(bytes=7))) == 7


def test_no_compiler(source, monkeypatch):
    monkeypatch.setenv("OPENMSA_CC", "none")
    found = load(source)
    assert found.functions is None
    assert "no C compiler was found" in found.says
    monkeypatch.delenv("OPENMSA_CC")
    monkeypatch.setenv("PATH", "")
    assert load(source).functions is None


def test_a_compiler_that_is_not_there(source, monkeypatch):
    monkeypatch.setenv("OPENMSA_CC", "no-such-compiler")
    with pytest.raises(ValueError, match="OPENMSA_CC must name a C compiler or be none, got 'no-such-compiler'"):
        load(source)


@needs_compiler
def test_a_file_that_cannot_be_compiled(source, caplog, tmp_path):
    source.write_text("no C")
    with caplog.at_level(logging.WARNING):
        found = load(source)
    assert found.functions is None
    assert "could not compile fill.c" in found.says
    assert found.says in caplog.text
    assert not libraries(tmp_path)


def test_a_compiler_that_fails(source, monkeypatch):
    monkeypatch.setenv("OPENMSA_CC", "false")
    assert "could not compile fill.c" in load(source).says


@pytest.fixture(params=["PyTorch's threads", "threads of Python"])
def kind(request, monkeypatch):
    """The threads that make calls."""
    if request.param == "threads of Python":
        monkeypatch.setattr(c_library, "_openmp", lambda: None)
    elif c_library._openmp() is None:
        pytest.skip("PyTorch has loaded no OpenMP library that is known")


@needs_compiler
@pytest.mark.parametrize(("threads", "count"), [(1, 5), (2, 5), (4, 3), (3, 1), (2, 0)])
def test_each_call_is_made_once(source, threads, count, kind):
    """Each has as much memory as it asks for."""
    sums = (ctypes.c_int64 * max(1, count))()
    calls = [Call(bytes=10 * i + 1, sum=ctypes.addressof(sums) + 8 * i) for i in range(count)]
    c_library.run(c_library.Task(load(source).functions, "fill", calls, 1, threads))
    assert list(sums)[:count] == [10 * i + 1 for i in range(count)]


@needs_compiler
def test_each_piece_of_each_call_is_made_once_one_task_after_the_other(source, kind):
    """The second task reads what the first wrote: it counts bytes that are 1."""
    sums = (ctypes.c_int64 * 6)()
    calls = [Call(bytes=n, sum=ctypes.addressof(sums) + 24 * i) for i, n in enumerate((5, 9))]
    functions = load(source).functions
    tasks = [c_library.Task(functions, "fill", calls, pieces, 2) for pieces in (3, 0, 1)]
    c_library.run(tasks[0], c_library.Task(functions, "fill", [], 3, 2), *tasks[1:])
    assert list(sums) == [10, 5, 5, 18, 9, 9]


@needs_compiler
def test_a_thread_that_is_held_up_makes_fewer_calls(source, kind):
    """One call that takes long does not keep the others waiting behind it."""
    sums = (ctypes.c_int64 * 9)()
    calls = [Call(bytes=1, sleep=300_000 if i == 0 else 0, sum=ctypes.addressof(sums) + 8 * i) for i in range(9)]
    functions, done = load(source).functions, threading.Event()
    thread = threading.Thread(target=lambda: (c_library.run(c_library.Task(functions, "fill", calls, 1, 2)), done.set()))
    thread.start()
    while not done.is_set() and sum(sums[1:]) < 8:
        pass
    assert sum(sums[1:]) == 8
    assert sums[0] == 0
    thread.join()
    assert sums[0] == 1


def test_few_products_are_made_by_one_thread():
    assert c_library.threads_for(c_library.LEAST_PRODUCTS - 1) == 1
    assert c_library.threads_for(c_library.LEAST_PRODUCTS) == torch.get_num_threads()
