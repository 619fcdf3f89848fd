# SPDX-License-Identifier: MIT
"""This is rotary position embedding (RoPE): elements i and i + width / 2 of a vector are a point of a plane, which the position
turns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from openmsa.modules.config import check_rotary_dim
from openmsa.runtime import checks


class Rotary(nn.Module):
    """Makes the cosines and sines of positions, once a step for all layers.

    dim:   leading elements of a head that are turned, even; fewer than the head has is partial RoPE.
    base:  frequency i is ``base ** (-2 i / dim)`` radians a token.
    """

    frequencies: Tensor  # float32 [dim / 2]

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_rotary_dim("dim", dim, dim)
        if checks.scale("base", base) <= 0:
            raise ValueError(f"base must be positive, got {base}")
        self.dim, self.base = dim, float(base)
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float32, device="cpu") / self.dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Moves the frequencies as ``to`` asks, but leaves them float32: 16-bit ones turn far positions by other angles."""
        super()._apply(fn, recurse)
        self.frequencies = self._frequencies().to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of `positions` ``[...]``, int32 or int64, as float32 ``[..., dim]``: both halves of the last
        dimension are the same."""
        if not isinstance(positions, Tensor) or positions.dtype not in (torch.int32, torch.int64):
            got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
            raise TypeError(f"positions must be a tensor of torch.int32 or torch.int64, got {got}")
        checks.alike("positions", positions, "the frequencies", self.frequencies, dtype=False)
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int | None = None, *, of: str = "") -> Tensor:
    """Turns the leading elements of each head by its position.

    x:           ``[..., tokens, heads, head_dim]``.
    cos, sin:    ``[..., tokens, width]``, as `Rotary` and most models of transformers make them: both halves of the last
                 dimension are the same. Dimensions in front of the tokens may be 1 or missing.
    rotary_dim:  leading elements to turn, an even divisor of width; None: width, at most head_dim. Where it is less than width,
                 every (width / rotary_dim)-th frequency serves: the RoPE of rotary_dim elements with the same base.
    of:          what stands in front of ``rotary_dim`` and ``head_dim`` in errors.

    Returns a tensor of the shape and dtype of x.
    """
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS or x.dim() < 2:
        got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a float tensor [..., tokens, heads, head_dim], got {got}")
    check_angles(cos, sin, "x", x.shape[:-2])
    width = cos.shape[-1]
    dim = min(width, x.shape[-1]) if rotary_dim is None else checks.integer(f"{of}rotary_dim", rotary_dim, 2)
    if dim > min(width, x.shape[-1]) or width % dim or dim % 2:
        none = f" (of {of}head_dim, as {of}rotary_dim is None)" if rotary_dim is None else ""
        most = f"be even and at most {of}head_dim ({x.shape[-1]})"
        raise ValueError(f"{of}rotary_dim must divide the last dimension of cos ({width}) and {most}, got {dim}{none}")
    if dim < width:
        chosen = slice(None, width // 2, width // dim)
        cos, sin = (torch.cat((part[..., chosen], part[..., chosen]), -1) for part in (cos, sin))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = x[..., :dim]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned.to(x.dtype), x[..., dim:]), -1) if dim < x.shape[-1] else turned.to(x.dtype)


def check_angles(cos: Tensor, sin: Tensor, name: str, lead: torch.Size) -> None:
    """Cosines and sines must be float tensors of one shape ``[..., width]`` with a row for each token of `name`, whose leading
    dimensions are `lead`; those in front of the tokens may be 1 or missing."""
    for part, value in (("cos", cos), ("sin", sin)):
        if not isinstance(value, Tensor) or value.dtype not in checks.FLOATS:
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{part} must be a float tensor [..., tokens, width], got {got}")
    own = cos.shape[:-1]
    spread = zip(reversed(own[:-1]), reversed(lead[:-1]), strict=False)
    if (
        not cos.dim()
        or len(own) > len(lead)
        or own[-1:] != lead[-1:]
        or any(mine not in (1, wanted) for mine, wanted in spread)
    ):
        raise ValueError(f"cos must spread over {name}'s tokens {tuple(lead)}, got shape {tuple(cos.shape)}")
    if cos.shape[-1] % 2 or not cos.shape[-1]:
        raise ValueError(f"cos.shape[{cos.dim() - 1}] must be even and at least 2, got {cos.shape[-1]}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin must have the shape of cos {tuple(cos.shape)}, got {tuple(sin.shape)}")
