# SPDX-License-Identifier: MIT
"""A checkpoint is one safetensors file with everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise ImportError("openmsa.training needs safetensors: pip install 'openmsa[models]'") from error

from openmsa.training.parallel import cut_again, like, whole

FILE = "checkpoint.safetensors"


def write_atomically(file: Path, write: Any) -> None:
    """Calls ``write(path)`` with a path beside `file`, and gives what it wrote the name `file` once it is on the disk, so that
    `file` is always whole: as before, or as written."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write(beside)
        with beside.open("rb") as opened:
            os.fsync(opened.fileno())
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def remove_parts(file: Path) -> None:
    """Removes what `write_atomically` had written of `file` when a process was killed."""
    for part in file.parent.glob(f".{file.name}.*"):
        if part.suffix[1:].isdecimal():
            part.unlink(missing_ok=True)


def training_state(branches: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns whole tensors on the CPU: weights and AdamW's state by parameter name. Every process must call it.

    No random generator is among them: a step draws nothing, and the order of windows follows from the step's number.
    """
    cut_again(branches)
    tensors = {}
    for name, parameter in branches.named_parameters():
        tensors[f"weights.{name}"] = whole(parameter)
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = whole(value)
    return tensors


def save(file: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes tensors and `facts`, plain values, as one file."""
    held = {name: x.contiguous().clone() for name, x in tensors.items()}
    write_atomically(file, lambda path: save_file(held, path, metadata={"openmsa": json.dumps(facts)}))


def read_facts(file: Path) -> dict[str, Any]:
    """Returns the `facts` of a checkpoint. Raises ValueError for a file that is none."""
    try:
        with safe_open(file, "pt") as opened:
            facts: dict[str, Any] = json.loads((opened.metadata() or {})["openmsa"])
    except Exception as error:
        rule = f"{file} must be a checkpoint of `openmsa train-index`"
        raise ValueError(f"{rule}, got {type(error).__name__}: {error}") from error
    return facts


def restore(file: Path, branches: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives weights and AdamW the state that a checkpoint holds."""
    with safe_open(file, "pt") as opened:
        for name, parameter in branches.named_parameters():
            with torch.no_grad():
                parameter.copy_(like(opened.get_tensor(f"weights.{name}"), parameter))
            state = {key: opened.get_tensor(f"optimizer.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {k: x if k == "step" else like(x, parameter) for k, x in state.items()}
