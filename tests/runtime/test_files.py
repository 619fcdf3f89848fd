# SPDX-License-Identifier: MIT
"""Commands refuse files that may never end before they open them, and take what a shell hands them through a pipe."""

import os
import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openmsa.cli import app
from openmsa.runtime.files import check_ends

KINDS = {"device": "a device", "pipe": "a pipe", "socket": "a socket", "link": "a device"}


def make(kind, folder):
    """Returns a file of this kind, which no reader sees the end of."""
    file = folder / f"{kind}.txt"
    if kind == "device":
        return Path("/dev/zero")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(file))
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_never_end_is_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=f"--text must be a file, got '.*', {KINDS[kind]}, which may never end"):
        check_ends("--text", make(kind, tmp_path))


def test_files_and_what_a_shell_has_opened_are_read(tmp_path):
    (tmp_path / "file").write_text("text")
    check_ends("--text", tmp_path / "file")
    check_ends("--text", tmp_path / "absent")
    reads, writes = os.pipe()
    try:
        check_ends("--text", Path(f"/dev/fd/{reads}"))
    finally:
        os.close(reads)
        os.close(writes)
    with pytest.raises(ValueError, match=r"--text must be a file, got '.*', a folder$"):
        check_ends("--text", tmp_path)


@pytest.fixture
def seconds():
    """Ends a test that waits at a file."""

    def late(number, frame):
        raise TimeoutError("the file was opened")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize(
    "command",
    [
        ("demo", "--text", "FILE", "--output", "OUT"),
        ("demo-bytes", "FILE", "--output", "OUT"),
        ("plan", "--model", "FILE"),
        ("bench", "show", "FILE"),
        ("bench", "plot", "FILE", "--output", "OUT.png"),
        ("bench", "--match", "decode-128k", "--device", "cpu", "--output", "FILE"),
    ],
    ids=" ".join,
)
def test_no_command_opens_it(kind, command, tmp_path, seconds):
    pytest.importorskip("matplotlib")
    places = {"FILE": make(kind, tmp_path), "OUT": tmp_path / "out", "OUT.png": tmp_path / "out.png"}
    done = CliRunner().invoke(app, [str(places.get(x, x)) for x in command])
    assert done.exit_code == 2, done.output
    assert KINDS[kind] in done.stderr or "no regular file" in done.stderr
    assert not places["OUT"].exists()
