# SPDX-License-Identifier: MIT
"""One index key head starts here from the keys of a layer that has several key heads.

Elements i and i + dim / 2 of a key are a complex number that the position embedding turns at frequency i. Turning does not tell
the heads of a layer apart, so at each frequency their numbers are a vector, of which one number is kept: its part along the
principal direction, each head weighted by how large its queries are there. It and the loadings of the heads, which go into the
index queries, give the product of queries and keys of every head with the least mean square error that one number a frequency
allows. An index key with more elements than a head also holds what lies along the other directions, the largest first, in
elements that no position embedding turns, for frequencies so low that they hardly turn within the model's positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from openmsa.modules import IndexBranch
from openmsa.training.branches import dense
from openmsa.training.layers import Attend, LayerInputs
from openmsa.training.variants import group_mean


class Moments(NamedTuple):
    """Describes a layer's keys and queries by frequency, as means over tokens.

    keys:    ``[dim / 2, kv_heads, kv_heads]``, complex128: products of the heads' keys with one another's conjugates.
    queries: ``[dim / 2, kv_heads]``, float64: squared magnitudes of the mean query of each head's group.
    """

    keys: Tensor
    queries: Tensor


def numbers(rows: Tensor, dim: int) -> Tensor:
    """Returns a tensor whose dimension `dim`, of even size, became half as many complex numbers, complex128."""
    first, second = rows.double().chunk(2, dim)
    return torch.complex(first, second)


def moments_of(inputs: LayerInputs) -> Moments:
    """Returns the moments of a layer, on the CPU."""
    queries, keys = (numbers(x.detach(), -1) for x in group_mean(inputs))
    products = torch.einsum("tgi,thi->igh", keys, keys.conj()) / len(keys)
    return Moments(products.cpu(), queries.abs().square().mean(0).T.cpu())


def collecting(found: dict[int, Moments]) -> Attend:
    """Returns dense attention that puts each layer's moments into `found`."""

    def attend(inputs: LayerInputs) -> Tensor:
        found[inputs.number] = moments_of(inputs)
        return dense(inputs)[0]

    return attend


def one_key(branch: IndexBranch, queries: Tensor, keys: Tensor, moments: Moments, base: float, length: int) -> None:
    """Sets a branch with one index key head to what holds most of a layer's keys.

    queries, keys: the layer's projections ``[kv_heads, head_dim, hidden_size]``, queries as the mean of each group.
    base, length:  of the position embedding, and the positions over which it turns.
    """
    heads, head_dim, _ = keys.shape
    dim, half = branch.config.index_head_dim, head_dim // 2
    if dim < head_dim or dim % 2:
        raise ValueError(f"the index dim must be even and at least the head dim ({head_dim}), got {dim}")
    weight = moments.queries.clamp(min=1e-30).sqrt()  # [half, heads]
    values, directions = torch.linalg.eigh(weight[:, :, None] * moments.keys * weight[:, None, :])
    values, directions = values.flip(1), directions.flip(2)  # [half, parts], [half, heads, parts], the largest first
    parts = torch.einsum("igp,ig,gih->pih", directions.conj(), weight.to(directions.dtype), numbers(keys, 1))
    loaded = torch.einsum("igp,ig,gih->gpih", directions.conj(), (1 / weight).to(directions.dtype), numbers(queries, 1))
    index_k, index_q, held = [elements(parts[0])], [elements(loaded[:, 0])], values[:, 0].sum()
    extra = (dim - head_dim) // 2
    if extra > half * (heads - 1):
        raise ValueError(f"the index dim must be at most {head_dim * heads}, what all keys have, got {dim}")
    if extra:
        turned = base ** -(torch.arange(half, dtype=torch.float64) / half) * length / 2  # half of how far each frequency turns
        kept = values[:, 1:] * (turned.sin() / turned).clamp(min=0)[:, None]  # what a mean over distances leaves of each part
        chosen = kept.flatten().topk(extra).indices
        frequency, part = chosen // (heads - 1), chosen % (heads - 1) + 1
        index_k.append(elements(parts[part, frequency]))
        index_q.append(elements(loaded[:, part, frequency]))
        held = held + values[frequency, part].sum()
    # The index loss divides logits by the root of the index dim, as attention does by that of the head dim.
    branch.k_proj.weight.copy_(torch.cat(index_k))
    branch.q_proj.weight.copy_((torch.cat(index_q, 1) * math.sqrt(dim / head_dim)).flatten(0, 1))
    # Norms get the mean size of what they norm: directions are unit vectors in units of the queries, and values mean squares.
    for norm, size in ((branch.q_norm, dim / (2 * heads * head_dim)), (branch.k_norm, float(held) / dim)):
        if isinstance(norm, nn.RMSNorm):
            norm.weight.fill_(math.sqrt(size))


def elements(rows: Tensor) -> Tensor:
    """Returns complex rows ``[..., count, hidden_size]`` as real ones, twice as many: the real parts, then the imaginary."""
    return torch.cat((rows.real, rows.imag), -2)
