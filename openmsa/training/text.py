# SPDX-License-Identifier: MIT
"""Text files become windows of tokens, always in the same order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openmsa.runtime import checks
from openmsa.runtime.files import check_ends

SUFFIXES = (".c", ".cpp", ".h", ".js", ".json", ".md", ".py", ".rs", ".rst", ".tex", ".toml", ".ts", ".txt")
"""Files with these suffixes are taken from a folder."""


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files that `paths` name, each once, also where it comes under several names: a file as it is, of a folder all
    files with one of `SUFFIXES`, in it and below it, ordered by path.

    Devices, pipes, sockets and links to nothing are no files of a folder. Raises ValueError for a path that is not there or
    may never end, and for a folder without files to take.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if os.path.isdir(path):  # Path.is_dir raises where a folder on the way cannot be searched.
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and os.path.isfile(p))
            if not inside:
                raise ValueError(f"--text must name folders with text files ({', '.join(SUFFIXES)}), got {str(path)!r}")
            for file in inside:
                found.setdefault(file.resolve(), file)
        elif os.path.exists(path):
            check_ends("--text", path)
            found.setdefault(path.resolve(), path)
        else:
            raise ValueError(f"--text must name files or folders that exist, got {str(path)!r}")
    return list(found.values())


def split_files(files: Sequence[Path], share: float) -> tuple[list[Path], list[Path]]:
    """Returns the files to train on and those held out, each in the order given.

    share of the files, at least one where there are two, is held out: those whose name and size have the lowest SHA-256, so
    that the choice follows from the files alone.
    """
    if not 0 <= share < 1:
        raise ValueError(f"--held-out must be from 0 to less than 1, got {share}")
    count = min(len(files) - 1, max(1, round(share * len(files)))) if share else 0
    ordered = sorted(files, key=lambda f: hashlib.sha256(f"{f.name} {f.stat().st_size}".encode()).digest())
    held = set(ordered[:count])
    return [f for f in files if f not in held], [f for f in files if f in held]


def read_files(files: Iterable[Path], named: Collection[Path] = ()) -> tuple[dict[Path, str], list[Path]]:
    """Returns the text of each file that holds some, by file, and the files that are left out, as they are not UTF-8 text.

    Raises ValueError for a file that cannot be read, and for one of `named` that is not UTF-8 text.
    """
    texts, left_out = dict[Path, str](), list[Path]()
    for file in files:
        try:
            text = read_file(file)
        except UnicodeError as error:
            if file in named:
                raise ValueError(f"--text must be UTF-8 text, got {str(file)!r}, which {error}") from error
            left_out.append(file)
            continue
        if text.strip():
            texts[file] = text
    return texts, left_out


def read_file(file: Path) -> str:
    """Returns what a file holds. Raises UnicodeError where it is not UTF-8 text, ValueError where it cannot be read."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"--text must name files that can be read, got {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnicodeError(f"is none at byte {error.start}") from error
    if "\0" in text:
        raise UnicodeError("holds zero bytes, as binary files do")
    return text


def tokens_of(tokenizer: Any, texts: Iterable[str]) -> Tensor:
    """Returns the tokens of all texts in a row, int64, each text ended by the tokenizer's end of text if it has one."""
    end = getattr(tokenizer, "eos_token_id", None)
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False).input_ids
        if end is not None:
            ids.append(end)
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Windows:
    """Holds a text's tokens and cuts them into windows of `length` tokens; what is left behind the last window is not read.

    Window numbers are drawn without repetition, all of them once an epoch, in an order that follows from `seed` and the epoch
    alone; so the position in the data is the number of windows drawn.
    """

    tokens: Tensor  # int64 [total]
    length: int
    seed: int = 0
    what: str = "text"  # its name in an error

    def __post_init__(self) -> None:
        checks.integer("length", self.length, 1)
        if len(self) == 0:
            raise ValueError(f"the {self.what} must hold at least {self.length} tokens (--length), got {self.tokens.numel()}")

    def __len__(self) -> int:
        return self.tokens.numel() // self.length

    def __getitem__(self, number: int) -> Tensor:
        """Returns the tokens of one window ``[length]``, by its place in the text."""
        if not 0 <= number < len(self):
            raise IndexError(f"window must be from 0 to {len(self) - 1}, got {number}")
        return self.tokens[number * self.length : (number + 1) * self.length]

    def drawn(self, start: int, count: int) -> Tensor:
        """Returns the windows drawn at places `start` to ``start + count - 1``, ``[count, length]``."""
        return torch.stack([self[self._order(place // len(self))[place % len(self)]] for place in range(start, start + count)])

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(len(self), generator=generator, device="cpu").tolist()
        return order

    def digest(self) -> str:
        """Returns a fingerprint of tokens, length and seed."""
        told = f"{self.length} {self.seed} ".encode()
        return hashlib.sha256(told + self.tokens.contiguous().numpy().tobytes()).hexdigest()[:16]
