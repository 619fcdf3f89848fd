# SPDX-License-Identifier: MIT
"""Caches in host memory."""
