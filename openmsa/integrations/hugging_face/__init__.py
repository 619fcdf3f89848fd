# SPDX-License-Identifier: MIT
"""This module converts causal language models of Hugging Face transformers to MSA and runs them:

model = convert(AutoModelForCausalLM.from_pretrained("path/to/a/model"), index_topk_blocks=16)
model.save_pretrained("converted")
model = load("converted")              # or, after this import, AutoModelForCausalLM.from_pretrained("converted")
model.generate(**inputs, **cache_argument(model, PagedCache(model)))
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "openmsa.integrations.hugging_face needs transformers 5.10 or newer: pip install 'openmsa[models]'"
    ) from error

from openmsa.integrations.hugging_face.cache import PagedCache
from openmsa.integrations.hugging_face.convert import convert, is_converted, load
from openmsa.integrations.hugging_face.generate import prefill, stream
from openmsa.integrations.hugging_face.model import ATTENTION, MSAModel, cache_argument

__all__ = ["ATTENTION", "MSAModel", "PagedCache", "cache_argument", "convert", "is_converted", "load", "prefill", "stream"]
