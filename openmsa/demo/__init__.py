# SPDX-License-Identifier: MIT
"""The demonstration on a real language model: each kind of attention, the heat map, paged decoding.

`openmsa demo` runs it.
"""

import os

# transformers reads both when it is first imported: without them it asks the hub for newer files and draws bars of its own.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
