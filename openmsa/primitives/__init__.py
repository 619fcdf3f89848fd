# SPDX-License-Identifier: MIT
"""This room holds device code that several launch families share. It stands above the caches and below the stages."""
