# SPDX-License-Identifier: MIT
"""This module makes honest products of queries and keys: what PyTorch gives in the precision of the operands.

For two E4M3 operands on a GPU that multiplies them as they are it is `torch._scaled_mm`: sums keep fewer bits than float32.
"""

from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Codes:
    """Holds an E4M3 operand: float8_e4m3fn codes [..., dim] on the device that multiplies them, and float32 scales [...] of
    rows."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, numbers, scale=1.0, device="cpu"):
        """Makes an operand of numbers that are E4M3's, under one scale or a scale of each head."""
        scale = torch.as_tensor(scale, dtype=torch.float32).expand(numbers.shape[:-1])
        return cls(numbers.to(FP8).to(device), scale.to(device))

    def __getitem__(self, index):
        """Returns some rows, by an index without the last dimension."""
        return Codes(self.codes.view(torch.uint8)[index].view(FP8), self.scale[index])

    def __len__(self):
        return len(self.codes)

    @property
    def shape(self):
        return self.codes.shape

    @property
    def dtype(self):
        """Returns the dtype of the results."""
        return torch.float32

    def to(self, device):
        return Codes(self.codes.to(device), self.scale.to(device))

    def double(self):
        """Returns the numbers, on the CPU."""
        return self.codes.cpu().double() * self.scale.cpu().double()[..., None]


def multiplies_e4m3(device):
    """Says whether the device has a matrix unit for E4M3 that PyTorch uses."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def e4m3_products(q, k):
    """Returns float32 products [m, n] of codes [m, dim] and [n, dim], or [heads, m, n] where k may have fewer heads, on their
    device."""
    if q.dim() == 3:
        return torch.stack([e4m3_products(x, k[h * len(k) // len(q)]) for h, x in enumerate(q)])
    if not multiplies_e4m3(q.device):
        return q.float() @ k.float().T
    one = torch.ones((), device=q.device)
    return torch._scaled_mm(padded(q), padded(k).T, one, one, out_dtype=torch.float32)[: len(q), : len(k)]


def padded(codes):
    """Puts zeros behind the codes [rows, dim]: up to whole tiles of 128 rows, so that the arithmetic is that of large products,
    and to a multiple of 16 elements."""
    rows, dim = codes.shape
    whole = torch.zeros(max(-(-rows // 128), 1) * 128, -(-dim // 16) * 16, dtype=torch.uint8, device=codes.device)
    whole[:rows, :dim] = codes.view(torch.uint8)
    return whole.view(FP8)


def products(q, k):
    """Returns products [m, n] of one head's queries [m, dim] and keys [n, dim], both plain on one device and summed in float32
    or float64, or both `Codes`, which are multiplied where they are; the result is on the CPU."""
    if isinstance(q, Codes):
        return (e4m3_products(q.codes, k.codes) * q.scale[:, None] * k.scale).cpu()
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.to(wide) @ k.to(wide).T
