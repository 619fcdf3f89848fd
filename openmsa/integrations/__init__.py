# SPDX-License-Identifier: MIT
"""Adapters to other libraries: each module needs its library installed and is imported by name."""
