# SPDX-License-Identifier: MIT
"""The demonstration on a real language model: each kind of attention, the heat map, paged decoding.

`openmsa demo` runs it.
"""
