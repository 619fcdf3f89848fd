# SPDX-License-Identifier: MIT
"""Help texts are written in lines of the source's width and shown in lines of the terminal's."""

from __future__ import annotations


def paragraphs(text: str) -> str:
    """Returns a text whose paragraphs, which blank lines part, are one line each, for a terminal to wrap."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
