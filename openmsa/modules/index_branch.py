# SPDX-License-Identifier: MIT
"""`IndexBranch` gives a layer its index queries and keys, and attends to the blocks that they select or, in training, teaches
them where the layer attends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from openmsa.attention import msa_attention
from openmsa.block_topk import select_blocks
from openmsa.dense_attention import dense_attention
from openmsa.index_loss import index_loss
from openmsa.kv_cache import PagedIndexKeys, PagedKV
from openmsa.modules.attached_loss import attach
from openmsa.modules.config import MSAConfig, made_with
from openmsa.modules.rotary import rotate
from openmsa.runtime import checks
from openmsa.runtime.checks import needs_grad
from openmsa.sparse_attention import sparse_attention
from openmsa.types import Sequences

STAGES = ("dense", "warmup", "sparse")


class IndexBranch(nn.Module):
    """Holds the index projections of a layer, with their norms and RoPE, and the layer's stage.

    hidden_size:      elements of the hidden states that it reads.
    stage:            "dense": attention to every visible key, no index branch. "warmup": the same attention; the index branch
                      learns from all visible keys. "sparse": attention to the selected blocks; it learns from these.
    loss_coefficient: multiplies the index loss, above 0; 0: the branch does not learn and no loss is computed.
    index_loss:       the last index loss, coefficient included, detached, float32 ``[]``; None where none was computed.

    The index loss is computed where autograd records the branch's outputs, and hangs on the output of attention (see `attach`),
    so that one ``backward`` of the model's own loss trains both.
    """

    index_loss: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        config: MSAConfig,
        *,
        stage: str = "sparse",
        loss_coefficient: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.integer("hidden_size", hidden_size, 1)
        if not isinstance(config, MSAConfig):
            raise TypeError(f"config must be an openmsa.modules.MSAConfig, got {type(config).__name__}")
        self.config, self.index_loss = config, None
        self.stage, self.loss_coefficient = check_stage(stage), check_coefficient(loss_coefficient)
        self._losses: list[Tensor] | None = None
        dim = config.index_head_dim
        made = made_with(device, dtype)
        self.q_proj = nn.Linear(hidden_size, config.index_n_heads * dim, bias=config.index_bias, **made)
        self.k_proj = nn.Linear(hidden_size, config.index_n_key_heads * dim, bias=config.index_bias, **made)
        self.q_norm: nn.Module = nn.RMSNorm(dim, config.index_norm_eps, **made) if config.index_norm else nn.Identity()
        self.k_norm: nn.Module = nn.RMSNorm(dim, config.index_norm_eps, **made) if config.index_norm else nn.Identity()

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Returns index queries ``[..., index_n_heads, index_head_dim]`` and keys ``[..., index_n_key_heads, index_head_dim]``
        of `hidden` ``[..., hidden_size]``. cos, sin: as in `rotate`. No gradient flows to `hidden`."""
        hidden, dim = hidden.detach(), self.config.index_head_dim
        queries, keys = (proj(hidden).unflatten(-1, (-1, dim)) for proj in (self.q_proj, self.k_proj))
        queries, keys = normed(queries, self.q_norm), normed(keys, self.k_norm)
        width = self.config.index_rotary_dim
        return rotate(queries, cos, sin, width, of="index_"), rotate(keys, cos, sin, width, of="index_")

    def attend(
        self,
        q: Tensor,
        k: Tensor | PagedKV,
        v: Tensor | None,
        index_q: Tensor | None,
        index_k: Tensor | PagedIndexKeys | None,
        seqs: Sequences | None = None,
        *,
        softmax_scale: float | None = None,
        impl: str = "auto",
    ) -> Tensor:
        """Attends as the stage says; arguments are those of `openmsa.msa_attention`. index_q and index_k are not read in the
        stage "dense". Returns out ``[total_q, num_q_heads, head_dim]``."""
        self.index_loss = None
        if self.stage == "dense" or index_q is None or index_k is None:
            return dense_attention(q, k, v, seqs, softmax_scale=softmax_scale, impl=impl)
        if isinstance(k, Tensor) and isinstance(index_k, Tensor) and self.loss_coefficient and needs_grad(index_q, index_k):
            if v is None:
                raise TypeError("v must be given beside a tensor k, got None")
            out, loss = self._attend_and_learn(q, k, v, index_q, index_k, seqs, softmax_scale, impl)
            self.index_loss = loss.detach()
            if self._losses is None:
                return attach(out, loss)
            self._losses.append(loss)
            return out
        if self.stage == "warmup":
            return dense_attention(q, k, v, seqs, softmax_scale=softmax_scale, impl=impl)
        return msa_attention(
            q,
            k,
            v,
            index_q.detach(),
            index_k.detach() if isinstance(index_k, Tensor) else index_k,
            self.config.index_topk_blocks,
            seqs,
            block_size=self.config.index_block_size,
            init_blocks=self.config.index_init_blocks,
            local_blocks=self.config.index_local_blocks,
            softmax_scale=softmax_scale,
            impl=impl,
        )

    def _attend_and_learn(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        seqs: Sequences | None,
        softmax_scale: float | None,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        """Returns the output and the index loss of the stages "warmup" and "sparse"."""
        size, blocks = self.config.index_block_size, None
        if self.stage == "warmup":
            out, lse = dense_attention(q, k, v, seqs, return_lse=True, softmax_scale=softmax_scale, impl=impl)
        else:
            blocks = select_blocks(
                index_q.detach(),
                index_k.detach(),
                self.config.index_topk_blocks,
                seqs,
                block_size=size,
                init_blocks=self.config.index_init_blocks,
                local_blocks=self.config.index_local_blocks,
                impl=impl,
            )
            out, lse = sparse_attention(
                q, k, v, blocks, seqs, block_size=size, softmax_scale=softmax_scale, return_lse=True, impl=impl
            )
        loss = index_loss(
            q.detach(),
            k.detach(),
            index_q,
            index_k,
            blocks,
            seqs,
            block_size=size,
            softmax_scale=softmax_scale,
            coefficient=self.loss_coefficient,
            lse=lse.detach(),
            impl=impl,
        )
        starts = (None, None) if seqs is None else (seqs.cu_seqlens_q, seqs.cu_seqlens_k)
        if starts[0] is not None and starts[1] is not None:  # Padding, queries of sequences without keys, does not count.
            real = (starts[0].diff() * (starts[1].diff() > 0)).sum().clamp(min=1)
            loss = loss * (q.shape[0] / real)
        return out, loss

    def extra_repr(self) -> str:
        return f"stage={self.stage!r}, loss_coefficient={self.loss_coefficient}, {self.config}"


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Returns a norm of `x`, in the dtype of x, computed in that of the norm's weights: under autocast they differ."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype) if isinstance(norm, nn.RMSNorm) else x


def check_stage(stage: str) -> str:
    """Checks the name of a stage."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(map(repr, STAGES))}, got {stage!r}")
    return stage


def check_coefficient(coefficient: float) -> float:
    """Checks the coefficient of an index loss."""
    if checks.scale("loss_coefficient", coefficient) < 0:
        raise ValueError(f"loss_coefficient must be at least 0, got {coefficient}")
    return float(coefficient)


def index_branches(model: nn.Module) -> list[IndexBranch]:
    """Returns the index branches of a model in the order of its layers. Raises ValueError where it has none."""
    found = [module for module in model.modules() if isinstance(module, IndexBranch)]
    if not found:
        raise ValueError(f"model must have layers with an IndexBranch, got {type(model).__name__} without any")
    return found


def set_stage(model: nn.Module, stage: str | None = None, *, loss_coefficient: float | None = None) -> None:
    """Sets the stage, the coefficient of the index loss, or both (None: as it is) of every index branch of a model."""
    branches = index_branches(model)
    if stage is not None:
        check_stage(stage)
    if loss_coefficient is not None:
        loss_coefficient = check_coefficient(loss_coefficient)
    for branch in branches:
        branch.stage = branch.stage if stage is None else stage
        branch.loss_coefficient = branch.loss_coefficient if loss_coefficient is None else loss_coefficient


@contextmanager
def collected_losses(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the index losses of forwards inside the context, in the order of the layers, instead of hanging them on outputs:

        with collected_losses(model) as losses:
            model(input_ids=ids)
        torch.stack(losses).sum().backward()

    Where only the index branches require gradients, that backward never enters the rest of the model.
    """
    branches, losses = index_branches(model), list[Tensor]()
    before = [branch._losses for branch in branches]
    try:
        for branch in branches:
            branch._losses = losses
        yield losses
    finally:
        for branch, kept in zip(branches, before, strict=True):
            branch._losses = kept
