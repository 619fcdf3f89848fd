# SPDX-License-Identifier: MIT
"""`MSAttention` is an attention layer with an index branch, for models that are trained from scratch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmsa.modules.cache import LayerCache
from openmsa.modules.config import MSAConfig, check_rotary_dim, made_with
from openmsa.modules.index_branch import IndexBranch, check_coefficient, check_stage, normed
from openmsa.modules.rotary import check_angles, rotate
from openmsa.runtime import checks
from openmsa.types import Sequences


class MSAttention(nn.Module):
    """Projects hidden states to queries, keys and values, turns them by their positions, attends as its stage says, and
    projects the result back.

    hidden_size, num_heads, num_kv_heads, head_dim:  sizes; num_kv_heads divides num_heads, head_dim is a multiple of 16 up to
                       256.
    config:            of the index branch; its index_n_heads is num_kv_heads, or 1.
    rotary_dim:        leading elements of a head that the position turns; None: as many as `cos` has. See `rotate`.
    qk_norm:           whether queries and keys pass an RMSNorm a head, as in MiniMax-M3.
    norm_eps:          the epsilon of these norms.
    bias:              whether the four projections have biases.
    stage, loss_coefficient:  as in `IndexBranch`; both can be set at any time, for a whole model by `set_stage`.
    impl:              as in `openmsa.msa_attention`.

    Raises ValueError or TypeError, naming the argument, the rule and the value.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        config: MSAConfig,
        *,
        rotary_dim: int | None = None,
        qk_norm: bool = True,
        norm_eps: float = 1e-6,
        bias: bool = False,
        stage: str = "sparse",
        loss_coefficient: float = 1.0,
        impl: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer("num_heads", num_heads, 1)
        checks.integer("num_kv_heads", num_kv_heads, 1)
        checks.divides("num_kv_heads", num_kv_heads, "num_heads", num_heads)
        checks.integer("head_dim", head_dim, 1)
        checks.head_dim("head_dim", head_dim)
        if rotary_dim is not None:
            check_rotary_dim("rotary_dim", rotary_dim, head_dim)
        if checks.scale("norm_eps", norm_eps) < 0:
            raise ValueError(f"norm_eps must be at least 0, got {norm_eps}")
        made = made_with(device, dtype)
        self.index_branch = IndexBranch(hidden_size, config, stage=stage, loss_coefficient=loss_coefficient, **made)
        if config.index_n_heads not in (1, num_kv_heads):
            raise ValueError(f"index_n_heads must be num_kv_heads ({num_kv_heads}) or 1, got {config.index_n_heads}")
        self.head_dim, self.rotary_dim, self.impl = head_dim, rotary_dim, impl
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=bias, **made)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **made)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=bias, **made)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias, **made)
        norms = (nn.RMSNorm(head_dim, norm_eps, **made) if qk_norm else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        seqs: Sequences | None = None,
        *,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Returns the layer's output, of the shape and dtype of `hidden`.

        hidden:    ``[batch, length, hidden_size]``, sequences of one length each, or packed ``[total, hidden_size]``.
        cos, sin:  of each token's position, as `Rotary` makes them: ``[..., width]``, which spreads over hidden's tokens.
        seqs:      lengths of packed sequences; None: one sequence, or those of the batch or of the cache's step.
        cache:     the layer's cache, to which the tokens are appended and which is then attended to. It records no gradients.
        """
        lead, total = hidden.shape[:-1], hidden.shape[:-1].numel()
        seqs = self._lengths(hidden, seqs, cache)
        check_angles(cos, sin, "hidden", lead)
        cos, sin = (x.expand(*lead, x.shape[-1]).reshape(total, x.shape[-1]) for x in (cos, sin))
        tokens = hidden.reshape(total, hidden.shape[-1])
        q, k, v = (proj(tokens).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(normed(q, self.q_norm), cos, sin, self.rotary_dim)
        k = rotate(normed(k, self.k_norm), cos, sin, self.rotary_dim)
        index_q, index_k = None, None
        if self.stage != "dense" if cache is None else cache.index is not None:
            index_q, index_k = self.index_branch(tokens, cos, sin)
        if cache is None:
            out = self.index_branch.attend(q, k, v, index_q, index_k, seqs, impl=self.impl)
        else:
            cache.append(k, v, index_k)
            out = self.index_branch.attend(q, cache.kv, None, index_q, cache.index, seqs, impl=self.impl)
        return self.o_proj(out.flatten(1)).reshape(hidden.shape)

    def _lengths(self, hidden: Tensor, seqs: Sequences | None, cache: LayerCache | None) -> Sequences | None:
        if hidden.dim() not in (2, 3):
            raise ValueError(f"hidden must have shape [total, hidden] or [batch, length, hidden], got {tuple(hidden.shape)}")
        if hidden.dim() == 2 and cache is None:
            return seqs
        if seqs is not None:
            given = "[batch, length, hidden]" if cache is None else "a cache"
            raise ValueError(f"seqs must be None with {given}, which says the lengths, got {type(seqs).__name__}")
        if cache is not None:
            if checks.needs_grad(hidden, *self.parameters()):
                raise ValueError("cache must be None where gradients are recorded, as none pass it: use torch.no_grad()")
            return cache.seqs
        batch, length = hidden.shape[:2]
        starts = torch.arange(batch + 1, dtype=torch.int32, device=hidden.device) * length
        return Sequences(starts, starts, length, length)

    @property
    def stage(self) -> str:
        return self.index_branch.stage

    @stage.setter
    def stage(self, stage: str) -> None:
        self.index_branch.stage = check_stage(stage)

    @property
    def loss_coefficient(self) -> float:
        return self.index_branch.loss_coefficient

    @loss_coefficient.setter
    def loss_coefficient(self, coefficient: float) -> None:
        self.index_branch.loss_coefficient = check_coefficient(coefficient)

    @property
    def index_loss(self) -> Tensor | None:
        """Returns the index loss of the last forward, as `IndexBranch` does."""
        return self.index_branch.index_loss
