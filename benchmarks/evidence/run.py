# SPDX-License-Identifier: MIT
"""This module trains the three arms within a budget of time and measures what came of them, writing records as it goes."""

from __future__ import annotations

import dataclasses
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.evidence import corpus, gradients, measures, selections, train, ways
from benchmarks.evidence.records import Records, machine
from benchmarks.evidence.schedule import FORK, STAGES, Schedule
from openmsa.modules import index_branches
from openmsa.tiny import ByteConfig, ByteModel, load, store

MEASURING = 0.2  # of the time is kept for measuring
SPARE = 0.93  # Steps are planned for so much of the time, as measured times are those of an untrained index branch.
SAVED = 60.0  # seconds between checkpoints


@dataclass(frozen=True)
class Setting:
    """Holds what a run is asked for. schedule: its steps are found from the minutes, unless `steps` says them."""

    out: Path
    work: Path
    minutes: float
    device: torch.device
    config: ByteConfig
    schedule: Schedule
    steps: int | None
    text_bytes: int
    windows: int
    resume: bool


class Run:
    """Is one run of the comparison."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.records = setting, Records(setting.out)
        self.deadline = time.monotonic() + 60 * setting.minutes
        self.topk = setting.config.msa.index_topk_blocks
        self.last_saved = time.monotonic()

    def say(self, sentence: str) -> None:
        print(f"{time.monotonic() - self.records.start:7.1f} s  {sentence}", flush=True)

    def go(self) -> int:
        """Does everything and returns an exit status: 1 where a gradient is wrong, 3 where time did not suffice."""
        s = self.setting
        self.records.write("run", minutes=s.minutes, config=s.config.to_dict(), **machine(s.device))
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(corpus.gather, s.text_bytes)
            self.say("checking gradients against float64")
            found = gradients.wrong(s.config, s.device)
            self.records.write("gradients", wrong=found)
            if found:
                print("wrong gradients:", *found, sep="\n  ", flush=True)
                return 1
            self.warm_up()
            text = reading.result()
        self.records.write("corpus", train=text.train.size, held_out=text.held_out.size, sources=text.sources)
        self.say(f"{text.train.size:,} bytes to train on, {text.held_out.size:,} held out, {len(text.sources)} packages")
        given, held_out = (torch.from_numpy(x).to(s.device) for x in (text.train, text.held_out))
        schedule = self.plan(given)
        models = self.train(schedule, given)
        if models is None:
            self.say("the time is over before training ended; the same command with --resume goes on")
            return 3
        return Measuring(self, models, held_out).go()

    def warm_up(self) -> None:
        """Takes one step of each kind on noise, so that all kernels are compiled."""
        self.say("compiling the kernels of training")
        noise = torch.randint(32, 127, (4 * self.setting.schedule.long,), dtype=torch.uint8).to(self.setting.device)
        self.times(noise, 1)

    def times(self, text: Tensor, repeats: int) -> dict[tuple[int, str], float]:
        """Returns the seconds of a step with each window and stage, the least of some."""
        found = {}
        shape = dataclasses.replace(self.setting.schedule, steps=1_000_000)
        trainer = train.Trainer("msa", self.setting.config, shape, text)
        kinds = {key for arm in STAGES for key in dataclasses.replace(shape, steps=100).shares(arm)}
        for context, stage in sorted(kinds):
            trainer.schedule = Fixed(steps=1_000_000, tokens=shape.tokens, short=context, long=context, only=stage)
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                trainer.take_step()[0].item()
                seconds.append(time.perf_counter() - start)
            found[context, stage] = min(seconds)
        return found

    def plan(self, text: Tensor) -> Schedule:
        """Returns the schedule of a run that is resumed, or one whose steps fit into the time."""
        s, file = self.setting, self.setting.work / "plan.json"
        if s.resume:
            return Schedule(**json.loads(file.read_text()))
        seconds = self.times(text, 4)
        named = {f"{stage} {context}": round(1e3 * x, 2) for (context, stage), x in seconds.items()}
        self.say("milliseconds of a step: " + ", ".join(f"{name}: {x}" for name, x in named.items()))
        left = (self.deadline - time.monotonic() - 60 * s.minutes * MEASURING) * SPARE
        shape = dataclasses.replace(s.schedule, steps=1000)
        # dense_then_msa shares its first part with dense.
        starts = {arm: int(FORK * 1000) if arm == "dense_then_msa" else 0 for arm in STAGES}
        shares = [(n, seconds[key]) for arm, start in starts.items() for key, n in shape.shares(arm, start).items()]
        steps = s.steps or max(20, int(left / sum(n / 1000 * x for n, x in shares)))
        schedule = dataclasses.replace(s.schedule, steps=steps)
        self.records.write("plan", milliseconds=named, **dataclasses.asdict(schedule))
        self.say(f"{steps} steps of {schedule.tokens} bytes an arm")
        s.work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dataclasses.asdict(schedule)))
        return schedule

    def train(self, schedule: Schedule, text: Tensor) -> dict[str, ByteModel] | None:
        """Trains the arms one after the other. Returns None where time ends it."""
        models = {}
        fork = int(-(-FORK * schedule.steps // 1))
        for arm in ("msa", "dense", "dense_then_msa"):
            self.say(f"training {arm}")
            trainer = train.Trainer(arm, self.setting.config, schedule, text)
            file = self.setting.work / f"{arm}.pt"
            if self.setting.resume and file.exists():
                trainer.load_state(torch.load(file, map_location=text.device, weights_only=True))
            elif arm == "dense_then_msa":
                forked = torch.load(self.setting.work / "fork.pt", map_location=text.device, weights_only=True)
                trainer.load_state(forked)
            marks = [fork, schedule.steps] if arm == "dense" else [schedule.steps]
            for mark in marks:
                if not self.go_to(trainer, mark, file):
                    return None
                if arm == "dense" and mark == fork and trainer.step == fork:
                    train.save(trainer.state(), self.setting.work / "fork.pt")
            models[arm] = trainer.model.eval()
            about = {"arm": arm, "bytes": schedule.steps * schedule.tokens, "seed": schedule.seed}
            store(trainer.model, self.setting.out / f"{arm}.safetensors", about)
        return models

    def go_to(self, trainer: train.Trainer, mark: int, file: Path) -> bool:
        """Trains up to a step, with checkpoints; says whether it got there."""
        shown = [0.0]

        def log(record: dict[str, Any]) -> None:
            self.records.write("step", **record)
            now = time.monotonic()
            if now - shown[0] > 10 or record["step"] == mark:
                shown[0] = now
                self.say("{arm} step {step} {stage} {context}: loss {loss}, {milliseconds} ms".format(**record))

        while trainer.step < mark:
            until = min(mark, trainer.step + 50)
            done = trainer.run(until, self.deadline, log)
            if not done or trainer.step == mark or time.monotonic() - self.last_saved > SAVED:
                train.save(trainer.state(), file)
                self.last_saved = time.monotonic()
            if not done:
                return False
        return True


@dataclass(frozen=True)
class Fixed(Schedule):
    """Has one stage at all steps, and a learning rate that changes nothing."""

    only: str = "dense"

    def stage(self, arm: str, step: int) -> str:
        return self.only

    def learning_rate(self, step: int) -> float:
        return 0.0


class Measuring:
    """Measures trained models on held-out text, most important things first, as far as time allows."""

    def __init__(self, run: Run, models: dict[str, ByteModel], text: Tensor) -> None:
        self.run, self.models = run, models
        long = run.setting.schedule.long
        self.text = measures.windows(text, long, run.setting.windows)
        self.longer = measures.windows(text, min(4 * long, text.numel() - 1), max(1, run.setting.windows // 8))
        self.skipped = list[str]()

    def go(self) -> int:
        topk = self.run.topk
        own = {"dense": ways.dense, "msa": ways.sparse(topk), "dense_then_msa": ways.sparse(topk)}
        names = {"dense": "dense", "msa": f"msa {topk}", "dense_then_msa": f"msa {topk}"}
        for arm in own:
            self.measure("held_out", arm, names[arm], own[arm])
            self.measure("recall", arm, names[arm], own[arm])
        for arm in ("msa", "dense_then_msa"):
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
        self.run.records.write("end", skipped=self.skipped)
        return 3 if self.skipped else 0

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
        if self.late(f"{kind} {arm} {name}"):
            return
        text = self.longer if longer else self.text
        call = {"held_out": measures.held_out, "recall": measures.recall}[kind]
        start = time.perf_counter()
        found = call(model or self.models[arm], text, way)
        seconds = time.perf_counter() - start
        told = found["loss"] if kind == "held_out" else f"{100 * found['recalled']:.1f} % recalled"
        self.run.say(f"{kind} of {arm}, {name}, {found['length']} bytes: {told}")
        self.run.records.write(kind, arm=arm, way=name, seconds=seconds, **found, **{k: v() for k, v in more.items()})

    def selections(self, arm: str) -> None:
        """Writes the quality and the statistics of the selections of each layer, and keeps those of a window."""
        import numpy

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
        if self.late("the stored model"):
            return
        model, _ = load(self.run.setting.out / "msa.safetensors")
        model = model.to(self.run.setting.device)
        assert len(index_branches(model)) == len(index_branches(self.models["msa"]))
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
