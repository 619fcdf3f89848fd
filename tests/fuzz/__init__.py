# SPDX-License-Identifier: MIT
"""The differential fuzz makes random calls of every public function, on every implementation, and compares with float64.

`cases` draws a call, `truth` says what is right and what honest low-precision PyTorch makes of it, `checks` compares. It also
runs by hand, without pytest and hypothesis, for as long as asked: ``python -m tests.fuzz --rounds 2000 --seed 7``.
"""
