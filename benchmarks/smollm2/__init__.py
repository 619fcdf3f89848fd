# SPDX-License-Identifier: MIT
"""This folder is the evidence that index branches of a trained model can be trained: SmolLM2-135M, converted, at 8,192 tokens.

    python -m benchmarks.smollm2.files FOLDER                       # pack model, tokens and needles
    python -m benchmarks.smollm2.study --data FOLDER --out OUT      # train and measure, on one GPU
    python -m benchmarks.smollm2.page OUT/smollm2.jsonl             # docs/results/smollm2.md and its plots

`python -m benchmarks.smollm2.study --toy --out OUT` tries all of the second on a CPU.
"""
