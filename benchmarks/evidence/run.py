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

from benchmarks.evidence import corpus, gradients, report, train
from benchmarks.evidence.measuring import Measuring
from benchmarks.evidence.records import Records, machine, read
from benchmarks.evidence.schedule import FORK, STAGES, Schedule
from openmsa.tiny import ByteConfig, ByteModel, store

MEASURING = 0.2  # of the time is kept for measuring
SPARE = 0.93  # Steps are planned for so much of the time, as measured times are those of an untrained index branch.
SAVED = 60.0  # seconds between checkpoints
WHOLE = 20 * train.LOGGED  # Steps that are planned are a multiple of it.


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
        self.trained = self.deadline - 60 * setting.minutes * MEASURING / 2  # Training ends here at the latest.
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
        models = self.arms(schedule, given)
        status = Measuring(self, models, held_out).go()
        print(report.summary(read(s.out)), flush=True)
        if len(models) < len(STAGES):
            self.say(f"time ended training after {len(models)} of {len(STAGES)} arms; the same command with --resume goes on")
            return 3
        return status

    def warm_up(self) -> None:
        """Takes one step of each kind on noise, so that all kernels are compiled."""
        self.say("compiling the kernels of training")
        noise = torch.randint(32, 127, (4 * self.setting.schedule.longest,), dtype=torch.uint8).to(self.setting.device)
        self.times(noise, 1)

    def times(self, text: Tensor, repeats: int) -> dict[tuple[int, str], float]:
        """Returns the seconds of a step with each window and stage, the least of some."""
        found = {}
        shape = dataclasses.replace(self.setting.schedule, steps=1_000_000)
        trainer = train.Trainer("msa", self.setting.config, shape, text)
        kinds = {key for arm in STAGES for key in dataclasses.replace(shape, steps=100).shares(arm)}
        for context, stage in sorted(kinds):
            trainer.schedule = Fixed(steps=1_000_000, tokens=shape.tokens, windows=((1.0, context),), only=stage)
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
            kept = json.loads(file.read_text())
            return Schedule(**{**kept, "windows": tuple(map(tuple, kept["windows"]))})
        seconds = self.times(text, 4)
        named = {f"{stage} {context}": round(1e3 * x, 2) for (context, stage), x in seconds.items()}
        self.say("milliseconds of a step: " + ", ".join(f"{name}: {x}" for name, x in named.items()))
        left = (self.deadline - time.monotonic() - 60 * s.minutes * MEASURING) * SPARE
        shape = dataclasses.replace(s.schedule, steps=1000)
        # dense_then_msa shares its first part with dense.
        starts = {arm: int(FORK * 1000) if arm == "dense_then_msa" else 0 for arm in STAGES}
        shares = [(n, seconds[key]) for arm, start in starts.items() for key, n in shape.shares(arm, start).items()]
        # Stages and windows change at multiples of a twentieth, which are then those of records, too.
        steps = s.steps or max(WHOLE, int(left / sum(n / 1000 * x for n, x in shares)) // WHOLE * WHOLE)
        schedule = dataclasses.replace(s.schedule, steps=steps)
        self.records.write("plan", topk=self.topk, milliseconds=named, **dataclasses.asdict(schedule))
        self.say(f"{steps} steps of {schedule.tokens} bytes an arm")
        s.work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dataclasses.asdict(schedule)))
        return schedule

    def arms(self, schedule: Schedule, text: Tensor) -> dict[str, ByteModel]:
        """Trains the arms one after the other, as many as time allows, and returns those that are complete."""
        models: dict[str, ByteModel] = {}
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
                    return models
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
            done = trainer.run(until, self.trained, log)
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
