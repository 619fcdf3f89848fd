# SPDX-License-Identifier: MIT
"""A user's script is type-checked against the package."""
