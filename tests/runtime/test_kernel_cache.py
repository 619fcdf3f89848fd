# SPDX-License-Identifier: MIT
"""Our folder of compiled kernels, and the command that fills it, never remove anything but our own folder."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from openmsa.runtime import kernel_cache

SCRIPT = Path(__file__).parents[2] / "scripts" / "warmup_fmha_sm100.py"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Gives each test a home of its own; what stands beside the cache must survive every test."""
    monkeypatch.setenv("OPENMSA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "precious").write_text("of others")
    yield tmp_path
    assert (tmp_path / "cache" / "precious").read_text() == "of others"


@pytest.fixture
def command(monkeypatch):
    spec = importlib.util.spec_from_file_location("warmup_fmha_sm100", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    return module


def fill():
    ours = kernel_cache.prepare()
    for name in ("one", "two"):
        (ours / name).mkdir()
        (ours / name / "kernel.cubin").write_bytes(b"12345")
    return ours


def test_what_it_holds_and_clearing():
    assert kernel_cache.info() == kernel_cache.Info(kernel_cache.folder(), 0, 0)
    assert kernel_cache.clear().kernels == 0
    ours = fill()
    assert kernel_cache.info() == kernel_cache.Info(ours, 2, 10)
    assert kernel_cache.clear().kernels == 2
    assert not ours.exists()


def test_a_folder_of_others_is_left_alone(home, command, capsys):
    theirs = kernel_cache.folder()
    theirs.mkdir()
    (theirs / "data").write_text("theirs")
    for act in (kernel_cache.clear, kernel_cache.prepare):
        with pytest.raises(FileExistsError, match="something else"):
            act()
    with pytest.raises(SystemExit):
        command.main(["--clear"])
    assert "error: --clear: " in capsys.readouterr().err
    assert (theirs / "data").read_text() == "theirs"


def test_a_link_is_left_alone(home):
    (home / "elsewhere").mkdir()
    (home / "elsewhere" / kernel_cache.MARK).touch()
    kernel_cache.folder().symlink_to(home / "elsewhere")
    with pytest.raises(FileExistsError, match="got a link"):
        kernel_cache.clear()
    assert (home / "elsewhere" / kernel_cache.MARK).exists()


def test_without_a_gpu_it_says_so(command, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert "no GPU" in capsys.readouterr().out
    assert not kernel_cache.folder().exists()


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        ([], 42),
        (["--preset", "aime"], 8),
        (["--preset", "m3-infer", "--include-sparse-aot"], 42 + 18),
        (["--preset", "all"], 84),
        (["--all"], 84 + 18),
    ],
)
def test_dry_run_lists_the_tasks_and_changes_nothing(command, capsys, flags, tasks):
    ours = fill()
    assert command.main([*flags, "--dry-run", "-j", "3"]) == 0
    printed = capsys.readouterr().out
    assert f"{tasks} tasks, 3 processes" in printed
    assert kernel_cache.info().kernels == 2
    if "--all" in flags:
        assert f"would clear {ours}" in printed


def test_information_and_clearing(command, capsys, monkeypatch, home):
    fill()
    assert command.main(["--info"]) == 0
    assert "2 kernels" in capsys.readouterr().out
    assert command.main(["--clear", "--info"]) == 0
    assert not kernel_cache.folder().exists()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "triton"))
    (home / "triton").mkdir()
    (home / "triton" / "theirs.cubin").touch()
    assert command.main(["--clear", "--info"]) == 0
    assert (home / "triton" / "theirs.cubin").exists()


@pytest.mark.parametrize("flags", [["--preset", "fast"], ["-j", "0"], ["--arch", "70"]])
def test_wrong_flags_are_refused(command, flags):
    with pytest.raises(SystemExit):
        command.main(flags)


def test_a_preset_for_an_architecture_needs_no_gpu(command, capsys):
    pytest.importorskip("triton")
    assert command.main(["--arch", "90", "--preset", "aime", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "sm_90 sparse decode 64/4 bf16 top-16" in printed
    assert "fp16" not in printed


def test_every_task_is_a_call_that_fmha_sm100_takes(command, monkeypatch):
    """Arguments are what counts, so the tensors are on a CPU, where nothing compiles."""
    monkeypatch.setattr(command, "DEVICE", "cpu")
    monkeypatch.setattr(command, "CONTEXT", 512)
    monkeypatch.setattr(command, "MANY", 40)
    tasks = {(t.kind, t.dtype, t.num_kv_heads): t for t in command.gpu_tasks("all", True) if t.num_kv_heads in (1, 4)}
    assert {kind for kind, _, _ in tasks} == set(command.KINDS)
    for task in tasks.values():
        command._call(task)


def test_kernels_compile_in_workers():
    pytest.importorskip("triton")
    flags = ["--arch", "90", "--preset", "all", "--match", "selection 8/8 bf16", "-j", "1"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # only tests use the interpreter; workers must not see it
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 tasks done, 0 failed" in done.stdout
    assert f"export TRITON_CACHE_DIR={kernel_cache.folder()}" in done.stdout
    assert kernel_cache.info().kernels == 2  # scores in both layouts
