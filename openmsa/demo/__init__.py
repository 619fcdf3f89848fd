# SPDX-License-Identifier: MIT
"""This folder is the demonstration that `openmsa demo` runs on a real language model: kinds of attention, a heat map of the
blocks read, and paged decoding."""

import os

# Transformers reads this when it is first imported; without it transformers looks for newer files on the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
