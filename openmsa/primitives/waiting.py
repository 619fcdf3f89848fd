# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""Programs of one launch hand each other values, and wait for them.

A value that one program hands to another program of the same launch travels in a word of 64 bits, beside the number of the
launch. A word is written and read whole, so a reader that finds the launch's number has the value too, and needs no fence, no
counter and no flag. Programs take their work in the order of tickets that they draw when they start, and wait only for words of
earlier tickets, whose programs are then running: no program can wait for ever, whatever else occupies the GPU. Triton's
interpreter runs one program after the other and never waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TICKETS = tl.constexpr(1 << 20)  # The counter holds launches * _TICKETS + the tickets drawn in the present launch.
_HERE = tl.constexpr("gpu")  # The readers and writers of a launch run on one GPU.


@triton.jit
def draw(counter, programs):
    """Draws this program's ticket, 0 to programs - 1 in the order of drawing, and returns it with the launch's number. The last
    program to draw opens the next launch, and knows that it is open before it goes on."""
    drawn = tl.atomic_add(counter, 1, sem="relaxed")
    ticket = (drawn % _TICKETS).to(tl.int32)
    if ticket == programs - 1:
        opened = tl.atomic_add(counter, _TICKETS - programs, sem="relaxed")
        ticket += (opened < 0).to(tl.int32)  # This adds 0, because counters are positive, but it waits for the counter.
    return ticket, (drawn // _TICKETS).to(tl.int32)


@triton.jit
def _word(value, tag):
    """Packs a value of 32 bits, in the low half, and the launch's number into a word."""
    return (tag.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def put_word(p_word, word, mask, WAIT: tl.constexpr, SCOPE: tl.constexpr):
    """Writes words of 64 bits. WAIT says whether readers run at the same time, SCOPE where they run: on this "gpu", or on
    another of the host ("sys")."""
    if WAIT:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed." + SCOPE + ".global.b64 [$1], $2; mov.b32 $0, 0;}",
            "=r,l,l,r",
            [p_word, word, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p_word, word, mask=mask)


@triton.jit
def put(p_word, value, tag, mask, WAIT: tl.constexpr, SCOPE: tl.constexpr = _HERE):
    """Writes words of values, float32 or int32, and the launch's number; WAIT and SCOPE as in `put_word`."""
    put_word(p_word, _word(value, tag), mask, WAIT, SCOPE)


@triton.jit
def put_pairs(p_word, first, second, tag, mask, WAIT: tl.constexpr):
    """Writes two words that lie together, at addresses that are multiples of 16 bytes, as `put` writes one."""
    a, b = _word(first, tag), _word(second, tag)
    if WAIT:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $4, 0; @p st.relaxed.gpu.global.v2.b64 [$1], {$2, $3}; mov.b32 $0, 0;}",
            "=r,l,l,l,r",
            [p_word, a, b, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p_word, a, mask=mask)
        tl.store(p_word + 1, b, mask=mask)


@triton.jit
def look(p_word, WAIT: tl.constexpr, SCOPE: tl.constexpr = _HERE):
    """Reads words as they are now. WAIT says whether writers run at the same time, SCOPE where they run, as in `put_word`."""
    if WAIT:
        word = tl.inline_asm_elementwise(
            "ld.relaxed." + SCOPE + ".global.b64 $0, [$1];", "=l,l", [p_word], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.load(p_word)
    return word


@triton.jit
def absent(word, tag, mask):
    """Returns int32 that are not 0 where the mask asks for a word and the word has not come yet."""
    return tl.where(mask, (word >> 32).to(tl.int32) ^ tag, 0)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def any_of(bits):
    """Says whether some element is not 0, in one instruction an element, where counting flags takes several."""
    return tl.reduce(bits, None, _either) != 0


@triton.jit
def arrived(x, WAIT: tl.constexpr):
    """Returns x, 16-bit values, and keeps their loads in front of this point, so that they do not move behind a wait that
    follows."""
    if WAIT:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
