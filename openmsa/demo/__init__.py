# SPDX-License-Identifier: MIT
"""The demonstration on a real language model: each kind of attention, the heat map, paged decoding.

`openmsa demo` runs it.
"""

import os

# Read when transformers is first imported: without it the hub would be asked for newer files.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
