# SPDX-License-Identifier: MIT
"""Checks that need a GPU and a process of their own."""
