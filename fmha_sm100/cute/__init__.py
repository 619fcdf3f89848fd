# SPDX-License-Identifier: MIT
"""This package holds the modules of the public package's `cute` folder by the names under which callers import them. Each gives
names of `fmha_sm100.sparse`; nothing is defined here."""
