# SPDX-License-Identifier: MIT
"""The tests stand in folders that mirror the package."""
