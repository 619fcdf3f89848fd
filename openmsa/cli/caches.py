# SPDX-License-Identifier: MIT
"""Commands make the caches of converted models here, in formats that options name."""

from __future__ import annotations

from typing import Any

from openmsa.cli.checks import refuse
from openmsa.cli.models import hugging_face


def check_formats(kv_format: str, index_format: str) -> None:
    """Refuses formats that no cache has."""
    from openmsa.kv_cache.rows import INDEX_FORMATS, KEY_FORMATS

    pairs = (("--kv-format", kv_format, KEY_FORMATS), ("--index-format", index_format, INDEX_FORMATS))
    for option, given, known in pairs:
        if given not in ("plain", *known):
            refuse(f"{option} must be plain or one of {', '.join(known)}, got {given!r}")


def make_cache(model: Any, tokens: int, kv_format: str, index_format: str) -> Any:
    """Makes a paged cache for a converted model. Refuses where its vectors do not fit a format."""
    try:
        return hugging_face().PagedCache(model, tokens=tokens, kv_format=kv_format, index_format=index_format)
    except ValueError as error:
        refuse(f"--kv-format {kv_format} and --index-format {index_format} must fit the vectors of MODEL: {error}")
