# SPDX-License-Identifier: MIT
"""This module measures the trained models of a run on held-out text, most important things first, as far as time allows."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from benchmarks.evidence import measures, selections, ways
from openmsa.tiny import ByteModel, load

if TYPE_CHECKING:
    from benchmarks.evidence.run import Run


class Measuring:
    """Measures the models of a run, by the names of their arms, on held-out bytes."""

    def __init__(self, run: Run, models: dict[str, ByteModel], text: Tensor) -> None:
        self.run, self.models = run, models
        long = run.setting.schedule.longest
        self.text = measures.windows(text, long, run.setting.windows)
        self.longer = measures.windows(text, min(4 * long, text.numel() - 1), max(1, run.setting.windows // 8))
        self.skipped, self.failed = list[str](), list[str]()

    def go(self) -> int:
        topk = self.run.topk
        all_own = {"dense": ways.dense, "msa": ways.sparse(topk), "dense_then_msa": ways.sparse(topk)}
        own = {arm: way for arm, way in all_own.items() if arm in self.models}
        names = {"dense": "dense", "msa": f"msa {topk}", "dense_then_msa": f"msa {topk}"}
        for arm in own:
            self.measure("held_out", arm, names[arm], own[arm])
            self.measure("recall", arm, names[arm], own[arm])
        for arm in own:
            if arm != "dense":
                self.selections(arm)
        for arm in own:
            for kind in ("held_out", "recall"):
                self.measure(kind, arm, names[arm], own[arm], longer=True)
        for fewer in sorted({max(2, topk // 8), max(2, topk // 4), max(2, topk // 2), min(64, 2 * topk)} - {topk}):
            self.measure("held_out", "msa", f"msa {fewer}", ways.sparse(fewer))
            self.measure("recall", "msa", f"msa {fewer}", ways.sparse(fewer))
        for kind in ("held_out", "recall"):
            self.measure(kind, "msa", "dense", ways.dense)
            self.measure(kind, "dense", f"window {topk}", ways.window(topk))
            self.measure(kind, "msa", f"window {topk}", ways.window(topk))
        self.formats()
        self.as_stored()
        if self.skipped:
            self.run.say(f"no time was left for: {'; '.join(self.skipped)}")
        self.run.records.write("end", skipped=self.skipped, failed=self.failed)
        return 1 if self.failed else 3 if self.skipped else 0

    def late(self, what: str) -> bool:
        """Says whether the time is over, and remembers what is left out."""
        if time.monotonic() < self.run.deadline:
            return False
        self.skipped.append(what)
        return True

    def measure(
        self, kind: str, arm: str, name: str, way: ways.Way, longer: bool = False, model: ByteModel | None = None, **more: Any
    ) -> None:
        """Writes the record of one measurement, "held_out" or "recall"."""
        if self.late(f"{kind} {arm} {name}") or arm not in self.models:
            return
        text = self.longer if longer else self.text
        call = {"held_out": measures.held_out, "recall": measures.recall}[kind]
        start = time.perf_counter()
        try:
            found = call(model or self.models[arm], text, way)
        except (NotImplementedError, ValueError, TypeError) as error:  # a stage refuses; what else can be measured, is
            self.failed.append(f"{kind} of {arm}, {name}: {error}")
            self.run.say(self.failed[-1])
            return
        seconds = time.perf_counter() - start
        told = found["loss"] if kind == "held_out" else f"{100 * found['recalled']:.1f} % recalled"
        self.run.say(f"{kind} of {arm}, {name}, {found['length']} bytes: {told}")
        self.run.records.write(kind, arm=arm, way=name, seconds=seconds, **found, **{k: v() for k, v in more.items()})

    def selections(self, arm: str) -> None:
        """Writes the quality and the statistics of the selections of each layer, and keeps those of a window."""
        kept = {}
        size = self.run.setting.config.msa.index_block_size
        for name, text in (("long", self.text), ("longer", self.longer)):
            if self.late(f"selections of {arm} in {name} windows"):
                return
            recorder = selections.Recorder(self.run.topk)
            told: dict[int, list[dict[str, Any]]] = {}
            for row in text[:8]:
                measures.losses(self.models[arm], row[None], recorder)
                for layer, blocks in recorder.blocks.items():
                    told.setdefault(layer, []).append(selections.statistics(blocks, size))
            for layer, blocks in recorder.blocks.items():
                means = _mean(recorder.quality.get(layer, []))
                self.run.records.write(
                    "selections", arm=arm, layer=layer, length=text.shape[1] - 1, topk=self.run.topk, windows=len(told[layer]),
                    quality=means, statistics=_mean(told[layer]),
                )  # fmt: skip
                kept[f"{text.shape[1] - 1}_layer{layer}"] = selections.as_uint16(blocks[-16384:])
            recall = {layer: _mean(x).get("block_recall") for layer, x in recorder.quality.items()}
            self.run.say(f"block recall of {arm}, {text.shape[1] - 1} bytes, by layer: {recall}")
        numpy.savez_compressed(self.run.setting.out / f"selections-{arm}.npz", **kept, block_size=size)

    def formats(self) -> None:
        """Measures the model with index keys, keys and values in low precision."""
        index: list[str | None] = [*ways.INDEX_FORMATS]
        pairs = (
            [(name, None) for name in index]
            + [(None, name) for name in ways.KV_FORMATS]
            + [("e4m3", "e4m3"), ("nvfp4", "nvfp4")]
        )
        for i, kv in pairs:
            agreement: dict[int, list[Tensor]] = {}
            way = ways.sparse(self.run.topk, i, kv, agreement if i else None)

            def agreed(found: dict[int, list[Tensor]] = agreement) -> list[float]:
                return [torch.stack(found[layer]).mean().item() for layer in sorted(found)]

            self.measure("held_out", "msa", f"index {i or 'bf16'}, kv {kv or 'bf16'}", way, agreement=agreed)

    def as_stored(self) -> None:
        """Measures the model as its file gives it back, with rounded weights."""
        if self.late("the stored model") or "msa" not in self.models:
            return
        model, _ = load(self.run.setting.out / "msa.safetensors")
        model = model.to(self.run.setting.device)
        self.measure("held_out", "msa", f"stored, msa {self.run.topk}", ways.sparse(self.run.topk), model=model)


def _mean(of: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the mean of dictionaries of numbers, of lists of them (shorter ones end in zeros) and of such dictionaries."""
    of = [x for x in of if x]
    if not of:
        return {}
    found: dict[str, Any] = {}
    for name, value in of[0].items():
        values = [x[name] for x in of]
        if isinstance(value, dict):
            found[name] = _mean(values)
        elif isinstance(value, list):
            longest = max(map(len, values))
            found[name] = [sum(x[i] if i < len(x) else 0.0 for x in values) / len(values) for i in range(longest)]
        else:
            found[name] = sum(values) / len(values)
    return found
