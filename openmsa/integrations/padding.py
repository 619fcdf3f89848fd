# SPDX-License-Identifier: MIT
"""Padded rows become packed sequences whose sizes follow from shapes, so that nothing is read on the host; rows that hold
several documents are refused."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openmsa.runtime.lengths import starts_of
from openmsa.types import Sequences


def refuse_packed(name: str, layer: int, position_ids: Tensor | None, q_len: int, held: int, mask: Tensor | None) -> None:
    """Raises NotImplementedError, which names attention `name`, where positions say that a row holds several documents, whose
    tokens would see those in front: where the position of a real token is not above those of the ones before it, or is less
    than the number of real tokens in the cache. transformers notices such rows only without a cache and a mask.

    position_ids: ``[batch or 1, q_len]``, of the queries; None, or of more dimensions: nothing is checked.
    held:         how many keys the cache holds in front of the queries. mask: None, or bool ``[batch, columns]``, False at
                  padding, whose last q_len columns are the queries' and the others the cache's.

    A single token is not checked, nor is anything in a traced graph or while a CUDA graph is captured. On a GPU only
    layer 0 is checked, as the answer is read on the host and layers share their positions.
    """
    if position_ids is None or position_ids.dim() != 2 or q_len < 2 or torch.compiler.is_compiling():
        return
    if position_ids.is_cuda and (layer > 0 or torch.cuda.is_current_stream_capturing()):
        return
    follows = position_ids[:, 1:] > position_ids[:, :-1]
    first, in_front = position_ids[:, 0], torch.as_tensor(held, device=position_ids.device)
    if mask is not None:
        real = mask[:, -q_len:].to(position_ids.device)
        so_far = position_ids.masked_fill(~real, -1).cummax(1).values  # of real tokens, which padding may part
        follows = (position_ids[:, 1:] > so_far[:, :-1]) | ~real[:, 1:]
        in_front = mask[:, :-q_len].sum(1).to(position_ids.device)
        first = position_ids.masked_fill(~real, torch.iinfo(position_ids.dtype).max).amin(1)  # a row of padding passes
    if bool(follows.all() & (first >= in_front).all()):
        return
    raise NotImplementedError(
        f"attention {name!r} cannot serve packed position_ids (several documents in one row) with a cache or a mask, got "
        "positions that begin again in a row; give each document a row of its own"
    )


def static_mask(batch: int, q_len: int, k_len: int, q_offset: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Returns which keys of a static cache and which queries are real, bool ``[batch, k_len + q_len]``."""
    slot = torch.arange(k_len, device=q_offset.device)
    real = (slot < q_offset + q_len).expand(batch, k_len)
    if attention_mask is not None:
        given = attention_mask[:, :k_len].bool()
        real = real & nn.functional.pad(given, (0, k_len - given.shape[1]))
    own = slot[:q_len] + q_offset  # [q_len], the columns of the queries
    return torch.cat((real, real.index_select(1, own)), 1)


def real_tokens(mask: Tensor, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    """Returns which queries and which keys are real, bool ``[batch, q_len]`` and ``[batch, keys]``, of what a `padding_mask`
    gave. Keys behind the last column of a mask hold nothing."""
    if mask.shape[1] > k_len:
        return mask[:, k_len:], mask[:, :k_len]
    return mask[:, mask.shape[1] - q_len :], mask


def real_first(real: Tensor) -> tuple[Tensor, Tensor]:
    """Returns an index of ``[batch, length]`` that puts each row's real tokens first, in their order."""
    return torch.arange(real.shape[0], device=real.device)[:, None], real.logical_not().byte().argsort(dim=1, stable=True)


def real_lengths(q_real: Tensor, k_real: Tensor) -> Sequences:
    """Returns the lengths of rows with their real tokens first. Each row is three sequences: its real tokens, its padding
    queries without a key, and its padding keys without a query."""
    q_held, k_held, q_len, k_len = q_real.sum(1), k_real.sum(1), q_real.shape[1], k_real.shape[1]
    nothing = torch.zeros_like(q_held)
    q_lens = torch.stack((q_held, q_len - q_held, nothing), 1)
    k_lens = torch.stack((k_held, nothing, k_len - k_held), 1)
    return Sequences(starts_of(q_lens.flatten()), starts_of(k_lens.flatten()), q_len, k_len)
