# SPDX-License-Identifier: MIT
"""Fingerprints identify a run: from a checkpoint it goes on only with the model, text and settings that it began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openmsa.modules import IndexBranch

BESIDE = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
SAMPLED = 16  # So many numbers of each of a model's tensors are read.


def fingerprint(branches: Mapping[int, IndexBranch]) -> str:
    """Returns a fingerprint of all weights that a model's index branches begin with."""
    found = hashlib.sha256()
    for number, branch in branches.items():
        for name, parameter in branch.named_parameters():
            found.update(f"{number} {name} {tuple(parameter.shape)}".encode())
            found.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def backbone_fingerprint(model: nn.Module, without: Collection[nn.Parameter] = ()) -> str:
    """Returns a fingerprint of a model's weights: the name, shape and dtype of each parameter that is not in `without`, and the
    bytes of `SAMPLED` of its numbers, evenly spread, so that a large model takes little time. Training changes a tensor nearly
    everywhere, so a model that was trained on has another fingerprint."""
    found, left_out = hashlib.sha256(), {id(parameter) for parameter in without}
    samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in left_out:
            found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            numbers = parameter.detach().flatten()
            places = torch.arange(min(SAMPLED, len(numbers)), device=numbers.device)
            places = places * (len(numbers) - 1) // max(1, len(places) - 1)
            samples.setdefault((numbers.dtype, numbers.device), []).append(numbers[places])
    for some in samples.values():  # one copy for each dtype and device, in the order of the model
        found.update(torch.cat(some).view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def config_fingerprint(config: Any) -> str:
    """Returns a fingerprint of what a model's configuration says of its computation, such as norms and the encoding of
    positions; where it lies and what wrote it are left out."""
    said = {name: value for name, value in config.to_dict().items() if name not in BESIDE}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ValueError, which names what differs between the run of a checkpoint and the run that would go on."""
    for name in ("settings", "config"):
        for key in saved[name].keys() | now[name].keys():
            before, after = saved[name].get(key), now[name].get(key)
            if before != after:
                raise ValueError(f"{key} must be that of the checkpoint to go on ({before!r}), got {after!r}")
    if saved["dtype"] != now["dtype"]:
        raise ValueError(f"dtype must be that of the checkpoint to go on ({saved['dtype']}), got {now['dtype']}")
    if saved["model"] != now["model"]:
        raise ValueError(
            f"the model must be that of the checkpoint to go on (index branches {saved['model']}), got one with {now['model']}"
        )
    for name, what in (("held_out", "the held-out text"), ("computation", "the model's config.json")):
        if saved.get(name, now[name]) != now[name]:  # Checkpoints from before 24 November 2026 have neither.
            raise ValueError(f"{what} must be that of the checkpoint to go on ({saved[name]}), got {now[name]}")
    if saved.get("backbone", now["backbone"]) != now["backbone"]:  # Checkpoints from before 23 November 2026 have none.
        raise ValueError(
            f"the model must be that of the checkpoint to go on (weights {saved['backbone']}), got one with {now['backbone']}"
        )
    if saved["text"] != now["text"]:
        raise ValueError(
            f"the text, its windows' length and the seed must be those of the checkpoint to go on ({saved['text']}), "
            f"got {now['text']}"
        )
