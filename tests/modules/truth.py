# SPDX-License-Identifier: MIT
"""This module computes an attention layer with an index branch in plain PyTorch with whole matrices, one sequence at a time,
apart from the package: its output, its index loss and, through autograd, the gradients of both."""

import torch


def turned(x, positions, rotary_dim, base):
    """Returns RoPE of x [length, heads, dim] by complex numbers."""
    half = rotary_dim // 2
    angles = positions[:, None].double() * base ** (-torch.arange(half, dtype=torch.float64) / half)
    points = torch.complex(x[..., :half], x[..., half:rotary_dim]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((points.real, points.imag, x[..., rotary_dim:]), -1)


def normed(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def layer(weights, config, hidden, *, heads, kv_heads, dim, rotary_dim, index_rotary_dim, base, stage, eps=1e-6):
    """Returns out [length, hidden] and the sum over queries and index heads of the divergences (None in the stage "dense").
    weights: state dict of an MSAttention with norms, without biases, in float64."""
    length, positions = hidden.shape[0], torch.arange(hidden.shape[0])

    def heads_of(name, x, count, eps=eps):
        rows = (x @ weights[f"{name}_proj.weight"].T).unflatten(-1, (count, -1))
        norm = f"{name}_norm.weight"
        return normed(rows, weights[norm], eps) if norm in weights else rows

    q = turned(heads_of("q", hidden, heads), positions, rotary_dim, base)
    k = turned(heads_of("k", hidden, kv_heads), positions, rotary_dim, base)
    v = heads_of("v", hidden, kv_heads)
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(heads // kv_heads, 1)) * dim**-0.5
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    reads, divergence = sees.expand(kv_heads, -1, -1), None
    if stage != "dense":
        iq = heads_of("index_branch.q", hidden.detach(), config.index_n_heads, config.index_norm_eps)
        ik = heads_of("index_branch.k", hidden.detach(), config.index_n_key_heads, config.index_norm_eps)
        iq, ik = (turned(x, positions, index_rotary_dim, base) for x in (iq, ik))
        scores = torch.einsum("qhd,khd->hqk", iq, ik.repeat_interleave(iq.shape[1] // ik.shape[1], 1))
        scores = scores * config.index_head_dim**-0.5
        if stage == "sparse":
            reads = selected(scores.detach(), sees, config)  # [index heads, length, length]
        group = heads // scores.shape[0]
        teacher = logits.detach().unflatten(0, (-1, group)).masked_fill(~reads[: scores.shape[0], None], -torch.inf)
        teacher = teacher.softmax(-1).mean(1)
        student = scores.masked_fill(~reads[: scores.shape[0]], -torch.inf).log_softmax(-1)
        divergence = torch.where(teacher > 0, teacher * (teacher.log() - student), 0.0).nansum()
        reads = reads.expand(kv_heads, -1, -1) if reads.shape[0] == 1 else reads
    weights_of_keys = logits.masked_fill(~reads.repeat_interleave(heads // reads.shape[0], 0), -torch.inf).softmax(-1)
    out = torch.einsum("hqk,khd->qhd", weights_of_keys, v.repeat_interleave(heads // kv_heads, 1))
    return out.flatten(1) @ weights["o_proj.weight"].T, divergence


def selected(scores, sees, config):
    """Returns the keys of the blocks that each query selects, bool [index heads, length, length]."""
    size, length = config.index_block_size, scores.shape[-1]
    count = -(-length // size)
    block = torch.arange(length) // size
    best = torch.full((*scores.shape[:2], count), -torch.inf, dtype=scores.dtype)
    best.scatter_reduce_(2, block.expand_as(scores), scores.masked_fill(~sees, -torch.inf), "amax")
    number, own = torch.arange(count), block[:, None]
    best[:, (number <= own) & ((number > own - config.index_local_blocks) | (number < config.index_init_blocks))] = torch.inf
    chosen = torch.zeros_like(best, dtype=torch.bool)
    chosen.scatter_(2, best.topk(min(config.index_topk_blocks, count), -1).indices, True)
    return chosen.repeat_interleave(size, 2)[..., :length] & sees
