# SPDX-License-Identifier: MIT
"""This folder adapts the library to others: each module needs its library installed and is imported by name."""
