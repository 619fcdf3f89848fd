# SPDX-License-Identifier: MIT
"""The byte model's file holds matrices as int8 with one float32 scale a row, and everything else as it is.

File layout: safetensors. A matrix NAME of the model is the int8 tensor NAME and the float32 tensor NAME:scale, ``[rows, 1]``;
its numbers are their product. The metadata holds the sizes, as JSON under "config", and what is known of the training under
"about".
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa.tiny.model import ByteConfig, ByteModel

SHIPPED = Path(__file__).with_name("byte-model.safetensors")
SCALE = ":scale"


def store(model: ByteModel, file: Path, about: dict[str, Any]) -> None:
    """Writes the model. about: of its training, anything that JSON can hold."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        if weight.ndim == 2:
            tensors[name], tensors[name + SCALE] = rounded(weight)
        else:
            tensors[name] = weight.float().cpu().contiguous()
    part = file.with_suffix(".part")
    save_file(tensors, part, {"config": json.dumps(model.config.to_dict()), "about": json.dumps(about)})
    os.replace(part, file)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the int8 codes of a matrix and the scale of each row, float32 ``[rows, 1]``, on the CPU."""
    weight = weight.float().cpu()
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
    return (weight / scale).round_().to(torch.int8), scale


def load(file: Path | None = None) -> tuple[ByteModel, dict[str, Any]]:
    """Returns the model that `store` wrote into a file (None: the one that this package ships), float32, on the CPU, for
    inference, and what is known of its training. Raises FileNotFoundError where the file is missing and ValueError where it is
    no such file."""
    from safetensors import SafetensorError, safe_open

    file = SHIPPED if file is None else file
    if not file.is_file():
        raise FileNotFoundError(
            f"file must be a file that exists, got {str(file)!r}"
            + (": this copy of openmsa ships no weights" if file == SHIPPED else "")
        )
    try:
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            meta = opened.metadata() or {}
        model = ByteModel(ByteConfig.from_dict(json.loads(meta["config"])))
        wide = {n: x * tensors[n + SCALE] if n + SCALE in tensors else x for n, x in tensors.items() if not n.endswith(SCALE)}
        model.load_state_dict(wide)
        return model.eval(), json.loads(meta["about"])
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"file must hold a byte model that openmsa stored, got {str(file)!r}: {error}") from error
