# SPDX-License-Identifier: MIT
"""A candidate is an index branch to train, and says what it starts from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.smollm2.one_key import Moments, one_key
from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training.layers import attention_layers
from openmsa.training.variants import budgets


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Describes an index branch to train.

    start: "random": random weights, one index key head, norms. "own keys": the layer's own keys and its groups' mean queries,
           an index key head a KV head, no norms. "one key": the one index key head that holds most of the layer's keys
           (`benchmarks/smollm2/one_key.py`), no norms. "one key, norms": the same with norms, as in MiniMax-M3.
    coefficient: multiplies the index loss (lambda in the paper). clip: the largest norm of all the candidate's gradients
           together, longer ones are shortened to it; None: they stay as they are.
    """

    name: str
    dim: int
    lr: float
    seed: int = 0
    start: str = "random"
    coefficient: float = 1.0
    clip: float | None = None

    @property
    def own(self) -> bool:
        """Says whether the branch has an index key head a KV head."""
        return self.start == "own keys"

    @property
    def kind(self) -> str:
        """Returns the name without learning rate and seed."""
        return self.name.partition(", lr")[0].partition(", seed")[0]

    def shorten(self, parameters: list[Tensor]) -> None:
        """Clips the gradients of the candidate's parameters."""
        if self.clip is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip)


CANDIDATES = (
    Candidate("64", 64, 3e-3),
    Candidate("own keys", 64, 1e-3, start="own keys"),
    Candidate("128", 128, 3e-3),
    Candidate("32", 32, 3e-3),
    Candidate("16", 16, 3e-3),
    Candidate("64, lr 1e-2", 64, 1e-2),
    Candidate("64, lr 1e-3", 64, 1e-3),
    Candidate("64, seed 1", 64, 3e-3, seed=1),
)
MORE = (  # candidates that run only where --candidates names them
    Candidate("64, lambda 1e-3", 64, 3e-3, coefficient=1e-3),
    Candidate("64, lambda 0.1", 64, 3e-3, coefficient=0.1),
    Candidate("64, lambda 10", 64, 3e-3, coefficient=10.0),
    Candidate("64, lambda 1e3", 64, 3e-3, coefficient=1e3),
    Candidate("64, clipped", 64, 3e-3, clip=1.0),
    Candidate("64, lambda 1e3, clipped", 64, 3e-3, coefficient=1e3, clip=1.0),
    Candidate("own keys, clipped", 64, 1e-3, start="own keys", clip=1.0),
    Candidate("128, lr 1e-2", 128, 1e-2),
    Candidate("one key", 64, 1e-3, start="one key"),
    Candidate("one key, lr 3e-3", 64, 3e-3, start="one key"),
    Candidate("one key 128", 128, 1e-3, start="one key"),
    Candidate("one key and norms", 64, 1e-3, start="one key, norms"),
    Candidate("one key 128 and norms", 128, 1e-3, start="one key, norms"),
)
TOY = (
    Candidate("32", 32, 1e-2),
    Candidate("own keys", 32, 1e-3, start="own keys"),
    Candidate("16", 16, 1e-2),
    Candidate("one key", 32, 1e-3, start="one key"),
    Candidate("one key 64 and norms", 64, 1e-3, start="one key, norms"),
    Candidate("32, lambda 10, clipped", 32, 1e-2, coefficient=10.0, clip=1.0),
)


def named(names: Sequence[str] | None) -> tuple[Candidate, ...]:
    """Returns the candidates of these names, or `CANDIDATES`. Raises ValueError for an unknown name, and unless the first has
    one index key head and one of them starts from "own keys"."""
    known = {c.name: c for c in CANDIDATES + MORE}
    if absent := [name for name in names or () if name not in known]:
        raise ValueError(f"--candidates must be among {', '.join(map(repr, known))}, got {absent[0]!r}")
    chosen = tuple(known[name] for name in names) if names else CANDIDATES
    if chosen[0].own or not any(c.own for c in chosen):
        rule = "--candidates must begin with one of one index key head and hold 'own keys'"
        raise ValueError(f"{rule}, got {', '.join(repr(c.name) for c in chosen)}")
    return chosen


def configuration(candidate: Candidate, model: Any, length: int, block_size: int) -> MSAConfig:
    """Returns the configuration of a candidate's branches, which read a quarter of the blocks."""
    heads = model.config.num_key_value_heads
    return MSAConfig(
        index_n_heads=heads,
        index_n_key_heads=heads if candidate.own else 1,
        index_head_dim=candidate.dim,
        index_block_size=block_size,
        index_topk_blocks=budgets(length, block_size, (25.0,))[25.0],
        index_norm=candidate.start in ("random", "one key, norms"),
    )


def initial_branches(
    candidate: Candidate, model: Any, config: MSAConfig, moments: Mapping[int, Moments]
) -> dict[int, IndexBranch]:
    """Makes a candidate's index branches, float32, by layer. moments: those of each layer, which "one key" reads."""
    torch.manual_seed(candidate.seed)
    made = {}
    for number, layer in attention_layers(model).items():
        branch = IndexBranch(model.config.hidden_size, config)
        if candidate.start != "random":
            queries, keys = own_weights(layer, config.index_n_heads, model.config.head_dim)
            with torch.no_grad():
                if not candidate.own:
                    base = float(model.config.rope_parameters["rope_theta"])
                    one_key(branch, queries, keys, moments[number], base, model.config.max_position_embeddings)
                else:
                    branch.q_proj.weight.copy_(queries.flatten(0, 1))
                    branch.k_proj.weight.copy_(keys.flatten(0, 1))
        made[number] = branch.to(model.device)
    return made


def own_weights(layer: nn.Module, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns a layer's projections, float32 on the CPU ``[kv_heads, head_dim, hidden_size]``: the mean of each group's query
    heads, and the key heads."""
    rows: Any = [getattr(layer, name).weight.detach().float().cpu() for name in ("q_proj", "k_proj")]
    return rows[0].unflatten(0, (kv_heads, -1, head_dim)).mean(1), rows[1].unflatten(0, (kv_heads, head_dim))
