# SPDX-License-Identifier: MIT
"""This folder holds checks that need a GPU and a process of their own."""
