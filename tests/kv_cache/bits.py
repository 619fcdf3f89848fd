# SPDX-License-Identifier: MIT
"""This module knows low-precision codes bit by bit, in plain Python integers and fractions, apart from the package: what each
code stands for, and which code a number must become."""

from fractions import Fraction as F
from functools import cache

import torch

NAN = None  # in place of a number


def e4m3(code):
    """Returns the number of a byte: sign, 4 exponent bits, 3 mantissa bits."""
    sign, exponent, mantissa = -1 if code & 128 else 1, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    return sign * (F(mantissa, 8) * F(1, 64) if exponent == 0 else (1 + F(mantissa, 8)) * F(2) ** (exponent - 7))


def e2m1(code):
    """Returns the number of a nibble: sign, 2 exponent bits, 1 mantissa bit."""
    sign, exponent, mantissa = -1 if code & 8 else 1, (code >> 1) & 3, code & 1
    return sign * (F(mantissa, 2) if exponent == 0 else (1 + F(mantissa, 2)) * F(2) ** (exponent - 1))


def e8m0(code):
    """Returns the number of a byte: a biased exponent."""
    return NAN if code == 255 else F(2) ** (code - 127)


@cache
def _magnitudes(decode, codes):
    return [(decode(code), code) for code in range(codes)]


def nearest(x, decode, codes):
    """Returns the code of the nearest number, of two equally near ones the even code, and past the last code the last. x is not
    NaN, and only its sign and finite size count; the sign bit is the one above the magnitudes."""
    table = _magnitudes(decode, codes)
    size = abs(x)
    best = min(table, key=lambda entry: (abs(entry[0] - size), entry[1] & 1))
    return best[1]


def numbers(data, decode):
    """Returns float64 of every element of a tensor of codes."""
    values = [decode(int(code)) for code in data.flatten().tolist()]
    return torch.tensor([float("nan") if v is NAN else float(v) for v in values], dtype=torch.float64).view(data.shape)


def unpacked(data):
    """Returns nibbles [..., dim], low first, of uint8 [..., dim // 2]."""
    return torch.tensor([n for byte in data.flatten().tolist() for n in (byte & 15, byte >> 4)]).view(*data.shape[:-1], -1)


def at_128x4(scale, row, col, cols):
    """Returns the scale of a row's group by the definition: tiles of 128 rows and 4 groups take 512 bytes each, in rows of
    tiles; a tile has 32 lines of 16 bytes, in which the four rows 32 apart stand side by side."""
    tiles_a_line = (cols + 3) // 4
    tile, inside = (row // 128) * tiles_a_line + col // 4, row % 128
    line, column = inside % 32, (inside // 32) * 4 + col % 4
    return scale.flatten().tolist()[tile * 512 + line * 16 + column]
