# SPDX-License-Identifier: MIT
"""The byte model consists of blocks of `MSAttention` and a gated feed-forward, with RMSNorm, partial RoPE and tied
embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from openmsa.modules import MSACache, MSAConfig, MSAttention, Rotary
from openmsa.types import Sequences

BYTES = 256
ROWS = 16384  # Where nothing is trained, logits, and what a feed-forward makes, exist of so many bytes at a time.


@dataclass(frozen=True)
class ByteConfig:
    """Holds the sizes of a `ByteModel`. feed_forward: elements between the gated feed-forward's products; rotary_dim,
    rotary_base: leading elements of a head that its position turns, and the base of their frequencies; msa: of every layer's
    index branch. `MSAttention` and `MSAConfig` say which sizes they take."""

    hidden_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    feed_forward: int = 1536
    rotary_dim: int = 32
    rotary_base: float = 10_000.0
    msa: MSAConfig = field(default_factory=lambda: MSAConfig(index_n_heads=2, index_head_dim=64))

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "msa": self.msa.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ByteConfig:
        return cls(**{**values, "msa": MSAConfig.from_dict(values["msa"])})


class Block(nn.Module):
    """Adds attention, then a gated feed-forward, to the hidden states, each after a norm."""

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(size, 1e-6), nn.RMSNorm(size, 1e-6)
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.attention = MSAttention(size, *heads, config.msa, rotary_dim=config.rotary_dim)
        self.up = nn.Linear(size, 2 * config.feed_forward, bias=False)
        self.down = nn.Linear(config.feed_forward, size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, seqs: Sequences | None, cache: Any) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), cos, sin, seqs, cache=cache)
        rows = hidden.shape[0] if torch.is_grad_enabled() else ROWS
        return torch.cat([part + self.feed_forward(self.feed_forward_norm(part)) for part in hidden.split(max(rows, 1))])

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Returns the gated feed-forward of normed hidden states."""
        gate, up = self.up(hidden).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


class ByteModel(nn.Module):
    """Predicts the next byte of packed byte strings.

    Its layers' stages are set by `openmsa.modules.set_stage`; a new model is in the stage "sparse".
    """

    def __init__(self, config: ByteConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.hidden_size)
        self.rotary = Rotary(config.rotary_dim, config.rotary_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, 1e-6)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
            if name.endswith(("o_proj.weight", "down.weight")):  # what each layer adds to the hidden states starts small
                nn.init.normal_(weight, std=0.02 / (2 * config.num_layers) ** 0.5)

    def forward(self, ids: Tensor, seqs: Sequences | None = None, *, cache: MSACache | None = None) -> Tensor:
        """Returns the last hidden states ``[total, hidden_size]``, from which `logits` predicts the byte after each.

        ids:    int64 ``[total]``, bytes of packed strings.
        seqs:   their lengths, as many keys as queries; None: one string, or the step of `cache`.
        cache:  holds what came before; ids are the new bytes of the step that its `extend` began.
        """
        hidden = self.embedding(ids)
        positions = cache.positions if cache is not None else positions_of(ids, seqs)
        cos, sin = self.rotary(positions)
        held = cache.layers if cache is not None else [None] * len(self.blocks)
        for block, of_layer in zip(self.blocks, held, strict=True):
            hidden = block(hidden, cos, sin, seqs, of_layer)
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits ``[..., 256]`` of the next byte."""
        return functional.linear(hidden, self.embedding.weight)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Returns the negative log-likelihood of int64 `targets` ``[total]``, in nats, float32 ``[total]``."""
        if torch.is_grad_enabled():
            return functional.cross_entropy(self.logits(hidden).float(), targets, reduction="none")
        parts = zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        return torch.cat([functional.cross_entropy(self.logits(h).float(), t, reduction="none") for h, t in parts])

    def cache(self, batch: int = 1, **options: Any) -> MSACache:
        """Returns an empty cache for generation. options: formats of `MSACache`."""
        c, weight = self.config, self.embedding.weight
        sizes = (c.num_layers, batch, c.num_kv_heads, c.head_dim, c.msa)
        return MSACache(*sizes, dtype=weight.dtype, device=weight.device, **options)

    @torch.no_grad()
    def generate(self, logits: Tensor, cache: MSACache, count: int) -> Iterator[tuple[int, Tensor]]:
        """Continues one string greedily. logits: ``[256]``, after what `cache` holds. Yields `count` bytes, each with the
        logits after it."""
        for _ in range(count):
            byte = logits.argmax()
            cache.extend([1])
            logits = self.logits(self(byte[None], cache=cache)[0])
            yield int(byte), logits


def positions_of(ids: Tensor, seqs: Sequences | None) -> Tensor:
    """Returns the position of each packed byte in its string, int64 ``[total]``."""
    token = torch.arange(ids.numel(), device=ids.device)
    if seqs is None or seqs.cu_seqlens_q is None:
        return token
    starts = seqs.cu_seqlens_q.long()
    return token - starts[torch.searchsorted(starts[1:], token, right=True)]
