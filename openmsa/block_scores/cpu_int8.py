# SPDX-License-Identifier: MIT
"""Few rows are multiplied with int8 keys as they are stored: a query becomes a sum of int8 digits, whose products are exact."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from openmsa.kv_cache.int8 import Int8
from openmsa.kv_cache.sequence_rows import Rows

DIGITS = 4  # base 256, 30 bits behind the sign: smaller errors than those of float32 sums
TILE_KEYS = 4096
LEAST_ELEMENTS = 1 << 19  # Fewer elements of a head's keys are converted in the time that the digits take.
GREATEST_EXPONENT = 60  # Magnitudes of queries beyond 2 to this or its negative are left to float32, whose units they leave.


def serves(q: Tensor, keys: Rows, end: int) -> bool:
    """Says whether `block_maxima` is right for these rows q ``[heads, rows, dim]``, and the faster way."""
    if not isinstance(keys.rows, Int8) or q.dtype != torch.float32 or end * q.shape[2] < LEAST_ELEMENTS or not is_exact():
        return False
    greatest = q.abs().amax(2).flatten().tolist()
    return all(x == 0 or 2.0**-GREATEST_EXPONENT <= x <= 2.0**GREATEST_EXPONENT for x in greatest)  # False for NaN


@cache
def is_exact() -> bool:
    """Says whether this CPU multiplies int8 quickly, and PyTorch's int8 products come out exact: those of instructions before
    VNNI saturate."""
    fast = getattr(torch.cpu, "_is_vnni_supported", None)
    if fast is None or not fast():
        return False
    codes = torch.tensor([-128, 127, -127, 1, 126], dtype=torch.int8, device="cpu")
    a, b = codes.repeat(13)[:64].expand(32, 64).contiguous(), codes.repeat_interleave(13)[:64].expand(16, 64).contiguous()
    b = torch.cat((b, torch.full((4, 64), -128, dtype=torch.int8, device="cpu")))
    try:
        return torch.equal(torch._int_mm(a, b.t()).double(), a.double() @ b.double().t())
    except (AttributeError, RuntimeError):
        return False


def digits_of(q: Tensor) -> tuple[Tensor, Tensor]:
    """Writes rows q ``[heads, rows, dim]`` as digits, int8 ``[heads, DIGITS * rows, dim]``, and weights ``[heads, rows,
    DIGITS * rows]``. Their product is q, to 2**-30 of the greatest power of two within each row. Low digits come first."""
    greatest = q.abs().amax(2)  # [heads, rows]
    exponent = torch.where(greatest > 0, greatest, 1.0).log2().floor() - (8 * DIGITS - 3)
    left = (q.double() * torch.exp2(-exponent.double())[..., None]).round().long()  # below 2 ** (8 * DIGITS - 2)
    parts, weights = [], []
    for i in range(DIGITS):
        lowest = ((left + 128) & 255) - 128
        parts.append(lowest.to(torch.int8))
        weights.append(torch.diag_embed(torch.exp2(exponent + 8 * i)))
        left = (left - lowest) >> 8
    return torch.cat(parts, 1), torch.cat(weights, 2)


def block_maxima(q: Tensor, keys: Rows, end: int, block_size: int) -> Tensor:
    """Returns scores ``[heads, rows, blocks]`` of the first `end` keys, all of which the rows q ``[heads, rows, dim]`` see.
    Those of equal keys are equal."""
    heads, rows, _ = q.shape
    digits, weights = digits_of(q)
    tile = math.lcm(block_size, 32) * max(1, TILE_KEYS // math.lcm(block_size, 32))
    # Products in float32, all of which it holds exactly.
    held = torch.zeros(-(-min(tile, end) // 32) * 32, DIGITS * rows, device="cpu")
    scores = torch.empty(heads, rows, -(-end // block_size), device="cpu")
    for head in range(heads):
        columns = digits[head].t().contiguous()
        for first in range(0, end, tile):
            stop = min(first + tile, end)
            codes, scale = _stored(keys, head, first, stop)
            count = (
                -(-(stop - first) // 32) * 32
            )  # The weights meet as many keys, so that a result does not depend on its place.
            held[: stop - first].copy_(torch._int_mm(codes, columns))
            products = torch.mm(weights[head], held[:count].t())[:, : stop - first].mul_(scale)
            blocks = -(-(stop - first) // block_size)
            if short := blocks * block_size - (stop - first):
                products = torch.nn.functional.pad(products, (0, short), value=-torch.inf)
            torch.amax(products.view(rows, blocks, block_size), 2, out=scores[head, :, first // block_size :][:, :blocks])
    return scores


def _stored(keys: Rows, head: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
    """Returns codes ``[stop - first, dim]``, contiguous, and scales of keys [first, stop) of a head."""
    stored = keys.rows
    assert isinstance(stored, Int8)
    if keys.pages is None:
        rows = slice(keys.start + first, keys.start + stop)
        return stored.data[rows, head].contiguous(), stored.scale[rows, head]
    size = stored.shape[2]
    pages = keys.pages[first // size : -(-stop // size)]
    within = slice(first % size, first % size + stop - first)
    codes, scale = (x[:, head].index_select(0, pages).flatten(0, 1)[within] for x in (stored.data, stored.scale))
    return codes.contiguous(), scale
