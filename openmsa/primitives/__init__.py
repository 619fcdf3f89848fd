# SPDX-License-Identifier: MIT
"""Device code that two launch families or more share, a subject a file. It stands above the caches and below the stages."""
