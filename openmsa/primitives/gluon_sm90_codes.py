# SPDX-License-Identifier: MIT
# mypy: allow-untyped-defs
"""These Gluon functions read E4M3 codes of a block's keys or values on Hopper, and write them as 16-bit numbers to a tile in
shared memory, from which the matrix unit multiplies them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmsa.primitives.gluon_sm90_attention import BLOCK
from openmsa.primitives.operands import KeyRows

DIM = gl.constexpr(128)
"""A head has so many elements."""
LONGEST_ROW = 1 << 24
"""A key is at most so many elements from the next, because offsets within a block have 32 bits."""
TO_FP16 = gl.constexpr(
    """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }"""
)
"""Converts four codes to two words of two float16 numbers."""
TO_BF16 = gl.constexpr(
    """{
        .reg .b16 low, high, a, b;
        .reg .b32 pair;
        .reg .f32 x, y;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 x, a;
        cvt.f32.f16 y, b;
        cvt.rn.bf16x2.f32 $0, y, x;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 x, a;
        cvt.f32.f16 y, b;
        cvt.rn.bf16x2.f32 $1, y, x;
        }"""
)
"""Converts four codes to two words of two bfloat16 numbers. Both types hold every E4M3 number."""


@gluon.constexpr_function
def code_layout(keys, num_warps):
    """Returns the layout of the codes of so many keys in words of four, [keys, 32]: a thread has 16 neighbouring codes of a
    key. Eight lanes that write together take the even chunks of one row and the odd ones of the next, which the swizzle puts
    in other banks."""
    lanes = [[0, 4], [0, 8], [1, 0], [0, 16], [2, 0]]
    warps = [[4 << i, 0] for i in range(num_warps.bit_length() - 1)]
    held = [[4 * num_warps << i, 0] for i in range((keys // (4 * num_warps)).bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *held], lanes, warps, [], [keys, 32])


@gluon.jit
def load_codes(x, place, limit, s_row, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads the codes of some keys, as many as the layout has, from key FIRST on, of the block that lies `place` elements
    behind x. They are 0 behind the block's key `limit`, which may lie behind the block; with limit -1 nothing is read."""
    o_n = gl.arange(0, LAYOUT.shape[0], gl.SliceLayout(1, LAYOUT))
    o_d = gl.arange(0, DIM // 4, gl.SliceLayout(0, LAYOUT))
    x = (x + place + FIRST * s_row).to(gl.pointer_type(gl.int32), bitcast=True)
    p_x = x + o_n[:, None] * (s_row // 4) + o_d[None, :]
    return gl.load(p_x, mask=(o_n <= limit - FIRST)[:, None], other=0, cache_modifier=".cg")


@gluon.jit
def write_numbers(words, tile, FIRST: gl.constexpr, CONVERT: gl.constexpr):
    """Writes codes as 16-bit numbers to a tile [BLOCK, DIM], from row FIRST on. CONVERT: TO_FP16 or TO_BF16."""
    low, high = gl.inline_asm_elementwise(CONVERT, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)
    columns: gl.constexpr = words.shape[1] * 2
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, columns], gl.int32)
    pairs = tile._reinterpret(gl.int32, [BLOCK, columns], TILE)
    pairs.slice(FIRST, words.shape[0]).store(gl.join(low, high).reshape([words.shape[0], columns]))


def code_rows(rows: KeyRows) -> KeyRows | None:
    """Returns rows of codes that can be read 16 at a time; None where they cannot. Where there is only one page, head or row,
    the stride becomes 16, as it is never used."""
    pages, heads, keys, _ = rows.data.shape
    s_page, s_head = 16 if pages == 1 else rows.s_page, 16 if heads == 1 else rows.s_head
    s_row = 16 if keys == 1 else rows.s_row
    if (rows.data.data_ptr() | s_page | s_head | s_row) % 16 or rows.s_dim != 1 or s_row >= LONGEST_ROW:
        return None
    return rows._replace(s_page=s_page, s_head=s_head, s_row=s_row)
