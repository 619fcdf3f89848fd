# SPDX-License-Identifier: MIT
"""This package has the modules of the public package's `cute` folder, under the names by which callers import them. Each passes
on names of `fmha_sm100.sparse`; nothing is defined here."""
