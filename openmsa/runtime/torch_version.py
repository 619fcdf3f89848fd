# SPDX-License-Identifier: MIT
"""Importing this module makes sure that PyTorch is there and new enough; the package does so before anything that needs it."""

from __future__ import annotations

import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

OLDEST = (2, 8)
COMMANDS = ("openmsa", "openmsa.exe", "-m")  # The last is what Python names itself while it looks for the module of ``-m``.


def require_torch() -> None:
    """Raises ImportError where PyTorch is missing or older than `OLDEST`. The command `openmsa` prints the sentence instead and
    ends with status 2, since nobody reads a traceback there."""
    sentence = why_not(_installed())
    if sentence is None:
        return
    if Path(sys.argv[0] if sys.argv else "").name in COMMANDS:
        print(sentence, file=sys.stderr)
        raise SystemExit(2)
    raise ImportError(sentence)


def interrupts_silently() -> None:
    """Lets Ctrl-C end the command `openmsa` at once and without a traceback while it imports, which takes a second. Programs
    that import the package keep their handler."""
    name = Path(sys.argv[0] if sys.argv else "").name
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    command = name in COMMANDS and (name != "-m" or module == ["openmsa"])
    if command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def why_not(version: str | None) -> str | None:
    """Says why this version of PyTorch (None: it is not installed) cannot serve, and how to install one that can; returns None
    if it can."""
    needed = ".".join(map(str, OLDEST))
    if version is None:
        return (
            f"OpenMSA needs PyTorch {needed} or newer, and none is installed: pip install torch (for machines without a GPU "
            "add --index-url https://download.pytorch.org/whl/cpu)."
        )
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        return f"OpenMSA needs PyTorch {needed} or newer, got {version}: pip install --upgrade torch."
    return None


def _installed() -> str | None:
    if "torch" not in sys.modules and find_spec("torch") is None:
        return None
    import torch

    return str(torch.__version__)


interrupts_silently()
require_torch()
