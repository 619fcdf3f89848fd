# SPDX-License-Identifier: MIT
"""`openmsa generate` makes here of a file and a question what the model reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from openmsa.cli.checks import refuse
from openmsa.cli.models import error_text
from openmsa.runtime.files import check_ends

if TYPE_CHECKING:
    from torch import Tensor


def read_prompt(file: Path | None, prompt: str) -> str:
    """Returns the text of the file and the prompt behind it. Refuses what is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        refuse(f"--prompt must be UTF-8 text, got {prompt!r}, which is none at character {error.start}")
    text = "" if file is None else _read(file)
    if not text and not prompt:
        refuse("--file or --prompt must be given, as there is nothing to answer otherwise")
    return "\n\n".join(part for part in (text, prompt) if part)


def _read(file: Path) -> str:
    try:
        check_ends("--file", file)
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(f"--file must be UTF-8 text, got {str(file)!r}, which is none at byte {error.start}")
    except OSError as error:
        refuse(f"--file must be a file that can be read, got {str(file)!r}: {error.strerror}")
    except ValueError as error:
        refuse(str(error))
    if not text:
        refuse(f"--file must hold text, got {str(file)!r}, which is empty")
    if "\0" in text:
        refuse(f"--file must be UTF-8 text, got {str(file)!r}, which holds zero bytes, as binary files do")
    return text


def token_ids(tokenizer: Any, whole: str, raw: bool) -> Tensor:
    """Returns what the model reads, int64 ``[1, tokens]``: in its chat format where it has one, unless `raw`."""
    if raw or not tokenizer.chat_template:
        found: Tensor = tokenizer(whole, return_tensors="pt").input_ids
        return found
    messages = [{"role": "user", "content": whole}]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    try:
        chat: Tensor = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    except Exception as error:  # Whatever a template raises, and whatever is wrong with it.
        refuse(f"MODEL has a chat format that cannot be applied ({error_text(error)}): --raw continues the text as it is")
    return chat
