# SPDX-License-Identifier: MIT
"""What scoring and selection share on the GPU: tiles of index keys, products of index queries and keys, block maxima."""
