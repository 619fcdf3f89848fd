# SPDX-License-Identifier: MIT
"""This module runs the shipped byte model on a file, with dense attention and with MSA, and lets it continue the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import openmsa
from openmsa.block_topk import select_blocks
from openmsa.demo.plot import heat_map
from openmsa.modules import IndexBranch, MSAConfig, index_branches, set_stage
from openmsa.runtime.files import check_ends
from openmsa.sparse_attention import sparse_attention
from openmsa.tiny import SHIPPED, ByteModel, load

HEAT_MAP = "blocks_read_bytes.png"
LEAST, MOST = 4096, 131072  # bytes that can be asked for
DENSE_MOST = 32768  # Dense attention reads at most so many of them: its time grows with the square.
NEW_BYTES = 120


@dataclass
class Reading:
    """Holds one line of the table. loss: nats a byte; seconds: of the whole forward; attention_seconds: inside the attention of
    all layers, selection included."""

    attention: str
    bytes: int
    loss: float
    seconds: float
    attention_seconds: float


@dataclass
class ByteResult:
    """Holds what the byte model did, under the names that its JSON has."""

    bytes: int
    about: dict[str, Any]
    readings: list[Reading]
    heat_map: str
    prompt_end: str
    continuation: str
    bytes_a_second: float
    cache_bytes: int
    seconds: float


def missing() -> str | None:
    """Says that this copy of the package ships no weights, where it does not."""
    if SHIPPED.exists():
        return None
    return f"This copy of openmsa ships no byte model ({SHIPPED.name}): docs/results/byte-model.md tells how it is trained"


def own_sources(most: int) -> bytes:
    """Returns up to `most` bytes of this package's own sources, file after file, which the byte model was not trained on."""
    files = sorted(Path(openmsa.__file__).parent.rglob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:most]


def read_bytes(file: Path, most: int) -> bytes:
    """Returns up to `most` bytes of a file of any kind. Raises ValueError where it cannot be read or is too short."""
    check_ends("FILE", file)
    try:
        with file.open("rb") as opened:
            data = opened.read(most)
    except OSError as error:
        raise ValueError(f"FILE must be a file that can be read, got {str(file)!r}: {error.strerror}") from error
    if len(data) < LEAST:
        raise ValueError(f"FILE must hold at least {LEAST} bytes, got {len(data)} in {str(file)!r}")
    return data


def run(data: bytes, output: Path, *, stage: Callable[[str], None] = lambda title: None) -> ByteResult:
    """Reads `data` both ways, draws the heat map into the folder `output` and continues the text. stage: is told what runs."""
    start = time.perf_counter()
    stage("loading the byte model")
    model, about = load()
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    part, topk = ids[:DENSE_MOST], model.config.msa.index_topk_blocks
    readings = []
    with torch.inference_mode():
        model(ids[:512])  # What a first call costs belongs to no line of the table.
        stage(f"dense attention over {len(part):,} bytes")
        set_stage(model, "dense")
        readings.append(read(model, part, "dense")[0])
        set_stage(model, "sparse")
        if len(part) < len(ids):
            stage(f"MSA over {len(part):,} bytes")
            readings.append(read(model, part, f"MSA, {topk} blocks")[0])
        stage(f"MSA over {len(ids):,} bytes")
        kept = Kept(model, len(ids))
        reading, hidden = read(model, ids, f"MSA, {topk} blocks", kept)
        readings.append(reading)
        size = model.config.msa.index_block_size
        num_blocks = -(-len(ids) // size)
        title = f"Byte model: blocks read ({topk} of {num_blocks} a query and KV head)"
        heat_map(kept.blocks, num_blocks, size, title, output / HEAT_MAP, layers=tuple(kept.blocks))
        stage(f"writing {NEW_BYTES} bytes")
        before = time.perf_counter()
        written = bytes(byte for byte, _ in model.generate(model.logits(hidden[-1]), kept.cache, NEW_BYTES))
        rate = NEW_BYTES / (time.perf_counter() - before)
    return ByteResult(
        bytes=len(ids),
        about=about,
        readings=readings,
        heat_map=str(output / HEAT_MAP),
        prompt_end=data[-160:].decode("utf-8", "replace"),
        continuation=written.decode("utf-8", "replace"),
        bytes_a_second=rate,
        cache_bytes=kept.cache.memory(),
        seconds=time.perf_counter() - start,
    )


class Kept:
    """Keeps what a forward with MSA selects, and its keys and values in a cache."""

    def __init__(self, model: ByteModel, tokens: int) -> None:
        self.blocks, self.cache = dict[int, Tensor](), model.cache()
        self.cache.reserve(tokens + NEW_BYTES)
        self.cache.extend([tokens])

    def attend(self, layer: int, c: MSAConfig, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> Tensor:
        """Attends as the layer does, and keeps its selection."""
        self.blocks[layer] = select_blocks(
            index_q,
            index_k,
            c.index_topk_blocks,
            block_size=c.index_block_size,
            init_blocks=c.index_init_blocks,
            local_blocks=c.index_local_blocks,
        )
        return sparse_attention(q, k, v, self.blocks[layer], block_size=c.index_block_size)


def read(model: ByteModel, ids: Tensor, name: str, keep: Kept | None = None) -> tuple[Reading, Tensor]:
    """Runs one forward over bytes ``[total]``. Returns its line of the table and the last hidden states. keep: attends in
    the place of the layers, and keeps keys and values outside of the times."""
    start = time.perf_counter()
    with watched(model, keep) as clock:
        hidden = model(ids)
    seconds = time.perf_counter() - start - clock.apart
    loss = model.loss(hidden[:-1], ids[1:]).mean().item()
    return Reading(name, len(ids), loss, seconds, clock.inside), hidden


@dataclass
class Clock:
    """Counts the seconds inside attention, and those that were spent on keeping what it saw."""

    inside: float = 0.0
    apart: float = 0.0


@contextmanager
def watched(model: ByteModel, keep: Kept | None) -> Iterator[Clock]:
    """Times the attention of every layer of the model inside the context, and shows `keep` what it attends to."""
    clock, branches = Clock(), index_branches(model)

    def hook(layer: int, branch: IndexBranch) -> Callable[..., Tensor]:
        attend = branch.attend

        def timed(q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, *rest: Any, **options: Any) -> Tensor:
            start = time.perf_counter()
            if keep is None:
                out = attend(q, k, v, index_q, index_k, *rest, **options)
            else:
                out = keep.attend(layer, branch.config, q, k, v, index_q, index_k)
            end = time.perf_counter()
            clock.inside += end - start
            if keep is not None:
                keep.cache.layers[layer].append(k, v, index_k)
                clock.apart += time.perf_counter() - end
            return out

        return timed

    try:
        for layer, branch in enumerate(branches):
            branch.attend = hook(layer, branch)  # type: ignore[method-assign]
        yield clock
    finally:
        for branch in branches:
            del branch.attend
