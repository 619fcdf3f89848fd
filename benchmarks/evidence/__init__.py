# SPDX-License-Identifier: MIT
"""This folder is the evidence that training with MSA works: it trains the byte model of `openmsa.tiny` with dense attention,
with MSA from the start and with MSA after dense attention, and measures what came of it.

    python -m benchmarks.evidence --minutes 9 --out FOLDER                      # on one GPU
    python -m benchmarks.evidence --minutes 3 --smoke --steps 40 --out FOLDER   # there too, at small scale
    python -m benchmarks.evidence --minutes 3 --toy --steps 20 --out FOLDER     # a tiny model, on a CPU
    python -m benchmarks.evidence.report FOLDER docs/results                    # tables and plots from the records
    python -m benchmarks.evidence.report A.jsonl B.jsonl docs/results           # the same from runs with seeds of their own
"""
