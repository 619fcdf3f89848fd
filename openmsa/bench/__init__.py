# SPDX-License-Identifier: MIT
"""The benchmark runner measures named workloads, costs each in one file, and writes records as JSONL.

workloads.py  which shapes              cost.py      useful FLOPs and bytes, limits
rows.py       what is measured on them  ceilings.py  what the device reaches in the same run
inputs.py     their tensors             runner.py    rounds, records
dense_peer.py, vllm_peer.py: the peers; report.py, narrow.py, plot.py: tables and plots from records.
"""
