# SPDX-License-Identifier: MIT
"""Differential fuzz: random calls of every public function, on every implementation that serves them, against float64.

`cases` draws a call, `truth` says what is right and what honest low-precision PyTorch makes of it, `checks` compares. By hand,
for as long as wanted: ``python -m tests.fuzz --rounds 2000 --seed 7``; it needs neither pytest nor hypothesis.
"""
