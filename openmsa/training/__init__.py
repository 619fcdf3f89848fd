# SPDX-License-Identifier: MIT
"""This folder trains and evaluates the index branches of a converted model, whose backbone stays as it is.

`text` makes windows of tokens from files, `layers` hands each attention layer of a model to a function, `loop` trains the index
branches by `openmsa.index_loss`, and `evaluate` compares dense attention, MSA and baselines.
"""
