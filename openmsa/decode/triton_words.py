# SPDX-License-Identifier: MIT
"""Values handed from program to program inside one launch, each in a 64-bit word with the number of the launch beside it.

A word is written and read whole, so a reader that finds the launch's number has its value too: no fence, no counter, no flag.
Programs take their work in the order of tickets drawn when they start, and wait for words of earlier tickets only, whose
programs are then running: nothing can wait for ever, whatever else occupies the GPU. The interpreter runs programs one after
the other and never waits.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TICKETS = tl.constexpr(1 << 20)  # the counter is launches * _TICKETS + tickets drawn in this one


@triton.jit
def draw(counter, programs):
    """This program's ticket, 0 to programs - 1 in the order of drawing, and the launch's number. The last to draw opens the
    next launch, and knows that it is open before it goes on."""
    drawn = tl.atomic_add(counter, 1, sem="relaxed")
    ticket = (drawn % _TICKETS).to(tl.int32)
    if ticket == programs - 1:
        opened = tl.atomic_add(counter, _TICKETS - programs, sem="relaxed")
        ticket += (opened < 0).to(tl.int32)  # never: counters are positive
    return ticket, (drawn // _TICKETS).to(tl.int32)


@triton.jit
def _word(value, tag):
    return (tag.to(tl.int64) << 32) | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def put(p_word, value, tag, mask, WAIT: tl.constexpr):
    """Writes float32 values with the launch's number. WAIT: whether readers run at the same time."""
    word = _word(value, tag)
    if WAIT:
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.gpu.global.b64 [$1], $2; mov.b32 $0, 0;}",
            "=r,l,l,r",
            [p_word, word, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p_word, word, mask=mask)


@triton.jit
def put_pairs(p_word, first, second, tag, mask, WAIT: tl.constexpr):
    """`put` of two words that lie together, at addresses that are multiples of 16 bytes."""
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
def look(p_word, WAIT: tl.constexpr):
    """Words as they are now. WAIT: whether writers run at the same time."""
    if WAIT:
        word = tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b64 $0, [$1];", "=l,l", [p_word], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.load(p_word)
    return word


@triton.jit
def absent(word, tag, mask):
    """Not 0 where a word that must come has not come yet."""
    return tl.where(mask, (word >> 32).to(tl.int32) ^ tag, 0)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def any_of(bits):
    """Whether some element is not 0: one instruction an element, where counting flags takes several."""
    return tl.reduce(bits, None, _either) != 0


@triton.jit
def value_of(word, mask):
    """The float32 values of words; -inf outside the mask."""
    return tl.where(mask, word.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def arrived(x, WAIT: tl.constexpr):
    """16-bit values whose loads are not moved past this point, behind the waiting that follows."""
    if WAIT:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x
