# SPDX-License-Identifier: MIT
"""A file that a user names is looked at before it is opened: a device, a pipe or a socket may never end, or never begin."""

from __future__ import annotations

import os
import stat
from pathlib import Path

STDIN = Path("/dev/stdin")
OPENED = (Path("/dev/fd"), Path("/proc/self/fd"))
"""What the shell has opened for a program stands in these folders: bash passes ``<(command)`` as /dev/fd/63, a pipe."""
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe, which may never end",
    stat.S_IFSOCK: "a socket, which may never end",
}


def check_ends(name: str, file: Path) -> None:
    """Raises ValueError, which names the argument, unless `file` surely ends: a regular file, a pipe that the shell has opened,
    or a terminal as standard input. What is not there is left to the one who opens it."""
    if not os.path.exists(file):
        return
    mode = file.stat().st_mode
    opened = file == STDIN or file.parent in OPENED
    if stat.S_ISREG(mode) or (opened and stat.S_ISFIFO(mode)) or (file == STDIN and os.isatty(0)):
        return
    kind = KINDS.get(stat.S_IFMT(mode), "a device, which may never end")
    raise ValueError(f"{name} must be a file, got {str(file)!r}, {kind}")
