# SPDX-License-Identifier: MIT
"""Trains index branches for SmolLM2-135M, whose weights stay as they are, and measures what they are worth at 8K tokens.

    python -m benchmarks.smollm2.study --data FOLDER --out FOLDER [--minutes 7] [--commit ID]
    python -m benchmarks.smollm2.study --toy --out FOLDER        # seconds on a CPU: a random model of 2 layers, 512 tokens

FOLDER is what `python -m benchmarks.smollm2.files` made. First the index loss is held against float64 on this device; a wrong
gradient ends the run. Then all candidates (index dims, learning rates, seeds, and index branches that start from the layer's
own keys) learn together in one pass over the dense model, as nothing flows back into it; two of them go on in the sparse
stage, at a quarter of the blocks. Then come recall of blocks in the dense model, held-out loss and needles of every index,
budget and block size, and of stored index keys.
Records are appended to OUT/smollm2.jsonl as they come; the two branches go to OUT/branches-*.safetensors; a table ends the
output.
A coefficient of the loss is not swept: with a frozen backbone AdamW makes the same steps whatever multiplies the loss.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.smollm2 import files
from openmsa import E4M3, MXFP4, NVFP4, Int8, Sequences, index_loss
from openmsa.bench.record import append, environment
from openmsa.modules import IndexBranch, MSAConfig
from openmsa.training.branches import LayerLosses, dense, index_vectors
from openmsa.training.evaluate import RecallOfVariants, hidden_states, needle_scores, position_bins, token_losses
from openmsa.training.layers import Attend, LayerInputs, attention_layers
from openmsa.training.needle import Needle
from openmsa.training.recall import spaced_rows
from openmsa.training.settings import TrainSettings
from openmsa.training.variants import Index, Variant, VariantAttention, budgets, group_mean

PERCENTS = (6.25, 12.5, 25.0, 50.0)
FORMATS: dict[str, Callable[[Tensor], Any]] = {
    "e4m3": lambda k: E4M3.quantize(k, per="head"),
    "int8": Int8.quantize,
    "nvfp4": NVFP4.quantize,
    "mxfp4": MXFP4.quantize,
}


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Describes an index branch to train. own: it starts from the layer's own keys and its groups' mean queries, one index key
    head a KV head, without norms; otherwise from random weights, with one index key head."""

    name: str
    dim: int
    lr: float
    seed: int = 0
    own: bool = False


CANDIDATES = (
    Candidate("64", 64, 3e-3),
    Candidate("own keys", 64, 1e-3, own=True),
    Candidate("128", 128, 3e-3),
    Candidate("32", 32, 3e-3),
    Candidate("16", 16, 3e-3),
    Candidate("64, lr 1e-2", 64, 1e-2),
    Candidate("64, lr 1e-3", 64, 1e-3),
    Candidate("64, seed 1", 64, 3e-3, seed=1),
)
MORE = (Candidate("128, lr 1e-2", 128, 1e-2),)  # which only --candidates names
TOY = (
    Candidate("32", 32, 1e-2),
    Candidate("own keys", 32, 1e-3, own=True),
    Candidate("16", 16, 1e-2),
)


@dataclasses.dataclass
class Study:
    """Holds the model, its data, and what the run may cost."""

    model: Any
    device: torch.device
    length: int
    sizes: tuple[int, int]  # block sizes; the first is that of training
    train: Tensor  # [windows, length]
    held_out: Tensor
    needles: list[Needle]
    candidates: tuple[Candidate, ...]
    out: Path
    seconds: float
    facts: dict[str, Any]
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def used(self) -> float:
        """Returns the seconds that have gone by."""
        return time.monotonic() - self.began

    def tell(self, text: str) -> None:
        """Prints a line with the time."""
        print(f"[{self.used:6.1f} s] {text}", flush=True)

    def record(self, what: str, **values: Any) -> None:
        """Appends one record."""
        append([rounded({"what": what, **values, "at_s": round(self.used, 1)})], self.out / "smollm2.jsonl")

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Returns the context of forwards: bfloat16 products on a GPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext()

    def config(self, candidate: Candidate) -> MSAConfig:
        """Returns the index branch's configuration."""
        model = self.model.config
        return MSAConfig(
            index_n_heads=model.num_key_value_heads,
            index_n_key_heads=model.num_key_value_heads if candidate.own else 1,
            index_head_dim=candidate.dim,
            index_block_size=self.sizes[0],
            index_topk_blocks=budgets(self.length, self.sizes[0], (25.0,))[25.0],
            index_norm=not candidate.own,
        )

    def branches(self, candidate: Candidate) -> dict[int, IndexBranch]:
        """Makes a candidate's index branches, float32, by layer."""
        torch.manual_seed(candidate.seed)
        made = {}
        for number, layer in attention_layers(self.model).items():
            branch = IndexBranch(self.model.config.hidden_size, self.config(candidate))
            if candidate.own:
                heads, dim = self.model.config.num_key_value_heads, candidate.dim
                with torch.no_grad():
                    rows = layer.q_proj.weight.float().unflatten(0, (heads, -1, dim)).mean(1)  # type: ignore[union-attr, operator]
                    branch.q_proj.weight.copy_(rows.flatten(0, 1))
                    branch.k_proj.weight.copy_(layer.k_proj.weight)  # type: ignore[union-attr, arg-type]
            made[number] = branch.to(self.device)
        return made


def rounded(value: Any) -> Any:
    """Returns a record whose numbers have five decimals."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: rounded(inside) for key, inside in value.items()}
    return [rounded(inside) for inside in value] if isinstance(value, (list, tuple)) else value


class Together:
    """Is dense attention in which several candidates learn at once from the same teacher."""

    def __init__(self, branches: list[dict[int, IndexBranch]]) -> None:
        self.branches = branches
        self.losses: list[list[Tensor]] = [[] for _ in branches]

    def __call__(self, inputs: LayerInputs) -> Tensor:
        out, lse = dense(inputs)
        for own, losses in zip(self.branches, self.losses, strict=True):
            with torch.enable_grad():
                vectors = index_vectors(own[inputs.number], inputs)
                loss = index_loss(
                    *(inputs.q, inputs.k, *vectors, None, inputs.seqs), softmax_scale=inputs.softmax_scale, lse=lse
                )
                loss.backward()
            losses.append(loss.detach())
        return out


def check_gradients(device: torch.device) -> None:
    """Ends the program where an index loss or a gradient of it is wrong: at most twice the error of PyTorch in bfloat16 against
    float64, over all keys and over selected blocks, and the same bits again."""
    from openmsa.testing.inputs import problem, random_blocks
    from tests import oracle
    from tests.index_loss import truth

    wrong = []
    for dim, group, heads in ((64, 3, 3), (128, 4, 2), (32, 3, 2), (16, 2, 1)):
        p = problem((300, 0, 3), (133, 7, 96), kv_heads=heads, group=group, head_dim=dim, dtype=torch.bfloat16)
        selection = random_blocks(p, 4, 64, heads)
        for blocks, reads in ((selection, oracle.reads_of_blocks(selection, 64)), (None, oracle.reads_everything(p))):
            results = []
            for _ in range(2):
                there = p.to(device)
                leaves = [x.detach().requires_grad_() for x in (there.index_q, there.index_k)]
                given = None if blocks is None else blocks.to(device)
                index_q, index_k = leaves
                loss = index_loss(there.q, there.k, index_q, index_k, given, there.seqs, block_size=64)
                results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
            what = f"dim {dim}, group {group}, {'all keys' if blocks is None else 'selected'}"
            try:
                truth.check(results[0], p, reads, dim**-0.5, dim**-0.5)
            except AssertionError as error:
                wrong.append(f"{what}: {error}")
            if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
                wrong.append(f"{what}: a second run has other bits")
    if wrong:
        sys.exit("the index loss is wrong on this device:\n" + "\n".join(wrong))


def train_together(study: Study, steps: int, until: float) -> tuple[list[dict[int, IndexBranch]], list[float]]:
    """Trains all candidates in the warm-up stage, one window a step; fewer steps where so many would last longer than `until`
    seconds of the run. Returns their branches, and their mean losses in the last tenth of the steps."""
    made = [study.branches(c) for c in study.candidates]
    groups = [[p for b in own.values() for p in b.parameters()] for own in made]
    optimizer = torch.optim.AdamW(
        [{"params": g} for g in groups], betas=(0.9, 0.95), weight_decay=0.0, fused=study.device.type == "cuda"
    )
    step, began, planned = 0, study.used, steps
    ends = torch.zeros(len(made), device=study.device)
    while step < steps:
        if step == 5 and study.used > began:
            began = study.used  # The first steps compile kernels.
        if step == 12:
            each = (study.used - began) / 7
            steps = max(step + 1, min(steps, step + int((until - study.used) / each)))
            study.tell(f"{each:.2f} s a warm-up step, {steps} of {planned} planned steps")
        attend = Together(made)
        with study.precision():
            hidden_states(study.model, study.train[step % len(study.train)][None].to(study.device), attend)
        for group, candidate in zip(optimizer.param_groups, study.candidates, strict=True):
            group["lr"] = TrainSettings(steps=steps, warmup_steps=0, lr=candidate.lr).learning_rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= steps - max(1, steps // 10):
            ends += torch.stack([torch.stack(x).mean() for x in attend.losses]) / max(1, steps // 10)
        if step % 10 == 0 or step == steps - 1:
            losses = {c.name: torch.stack(x).mean().item() for c, x in zip(study.candidates, attend.losses, strict=True)}
            study.record("warmup", step=step, losses=losses)
            if step % 50 == 0 or step == steps - 1:
                study.tell(f"warm-up step {step}: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()))
        step += 1
    reached = dict(zip((c.name for c in study.candidates), ends.tolist(), strict=True))
    study.record("warmup done", steps=steps, planned=planned, tokens=steps * study.length, reached=reached)
    study.tell("mean loss of the last tenth: " + ", ".join(f"{name} {loss:.4f}" for name, loss in reached.items()))
    return made, ends.tolist()


def train_sparse(study: Study, candidate: Candidate, branches: dict[int, IndexBranch], steps: int, until: float) -> None:
    """Trains one candidate in the sparse stage, on windows that the warm-up did not read where there are such."""
    optimizer = torch.optim.AdamW(
        [p for b in branches.values() for p in b.parameters()],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        fused=study.device.type == "cuda",
    )
    planned, step, began = steps, 0, study.used
    while step < steps:
        if step == 3:
            began = study.used
        if step == 8:
            each = (study.used - began) / 5
            steps = max(step + 1, min(steps, step + int((until - study.used) / each)))
            study.tell(f"{candidate.name}: {each:.2f} s a sparse step, {steps} of {planned} planned steps")
        attend = LayerLosses(branches, study.config(candidate), warmup=False)
        with study.precision():
            hidden_states(study.model, study.train[-1 - step % len(study.train)][None].to(study.device), attend)
        settings = TrainSettings(steps=steps, warmup_steps=0, lr=candidate.lr * 0.3)
        optimizer.param_groups[0]["lr"] = settings.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == steps - 1:
            loss = torch.stack(list(attend.losses.values())).mean().item()
            study.record("sparse", candidate=candidate.name, step=step, loss=loss)
        step += 1
    study.record("sparse done", candidate=candidate.name, steps=steps, planned=planned, lr=candidate.lr * 0.3)


def index_of(branches: dict[int, IndexBranch]) -> Index:
    """Returns the index that a candidate's branches are."""
    return lambda inputs: index_vectors(branches[inputs.number], inputs)


def stored(index: Index, form: str) -> Index:
    """Returns an index whose keys are stored in a format."""

    def quantised(inputs: LayerInputs) -> tuple[Tensor, Any]:
        index_q, index_k = index(inputs)
        return index_q, FORMATS[form](index_k)  # type: ignore[arg-type]

    return quantised


def attentions(study: Study, indexes: dict[str, Index]) -> dict[str, VariantAttention]:
    """Returns every variant that is measured, the most important first. indexes: by name; those of the main table come first,
    then those that are measured at two budgets alone, whose names begin with "~"."""
    main = {name: index for name, index in indexes.items() if not name.startswith("~")}
    found = {"dense": VariantAttention(Variant("dense"))}

    def add(kind: str, index: Index, size: int, percents: Iterable[float]) -> None:
        for percent, topk in budgets(study.length, size, tuple(percents)).items():
            variant = Variant(kind, percent, size, topk)
            found[variant.title] = VariantAttention(variant, index)

    for size in study.sizes:
        for name, index in main.items():
            add(name, index, size, PERCENTS)
        for name in ("window", "random"):
            add(name, group_mean, size, PERCENTS)
    for name, index in indexes.items():
        if name.startswith("~"):
            add(name[1:], index, study.sizes[0], (12.5, 25.0))
    for name in ("training-free", f"trained {study.candidates[0].dim} + sparse"):
        for form in FORMATS:
            add(f"{name}, {form} keys", stored(indexes[name], form), study.sizes[0], (12.5, 25.0))
    return found


def measure(study: Study, variants: dict[str, VariantAttention]) -> dict[str, dict[str, Any]]:
    """Measures recall, held-out loss and needles of all variants, as far as the time goes. Returns a row for each."""
    rows: dict[str, dict[str, Any]] = {name: dataclasses.asdict(a.variant) for name, a in variants.items()}
    sparse = {name: a for name, a in variants.items() if a.variant.kind != "dense"}
    watch = RecallOfVariants(sparse, spaced_rows(study.length, 128))
    for window in study.held_out[:4]:
        with study.precision():
            hidden_states(study.model, window[None].to(study.device), watch)
    for name in sparse:
        mean = watch.mean(name)
        rows[name] |= {"block_recall": mean.blocks, "score_recall": mean.scores, "mass": mean.mass}
        more = {}
        if rows[name]["percent"] == 25.0:
            more["by_layer"] = {str(layer): [round(x, 4) for x in found[:2]] for layer, found in watch.by_layer(name).items()}
        study.record("recall", variant=name, **rows[name], **more)
    study.tell(f"recall of {len(sparse)} variants on {min(4, len(study.held_out))} windows")

    bins, dense_losses = position_bins(study.length), None
    needles_at = study.seconds - 0.12 * study.seconds
    for name, attention in variants.items():
        if study.used > needles_at:
            study.tell(f"no time for the loss of {name} and what follows")
            break
        found = []
        for window in study.held_out:
            ids = window.to(study.device)
            with study.precision():
                found.append(token_losses(study.model, hidden_states(study.model, ids[None], attention)[0], ids))
        attention.kept.clear()
        losses = torch.stack(found)  # [windows, length - 1]
        dense_losses = losses if dense_losses is None else dense_losses
        change = (losses - dense_losses).mean(1)
        error = (change.std() / len(change) ** 0.5).item() if len(change) > 1 else None
        rows[name] |= {"loss": losses.mean().item(), "change": change.mean().item(), "change_error": error}
        by_position = [losses[:, max(0, first - 1) : last - 1].mean().item() for first, last in bins]
        study.record("loss", variant=name, **rows[name], bins=bins, by_position=by_position, by_window=losses.mean(1).tolist())
    study.tell("held-out losses")
    chosen = [n for n, a in variants.items() if a.variant.kind == "dense" or a.variant.block_size == study.sizes[0]]
    chosen = [n for n in chosen if rows[n]["percent"] in (100.0, 12.5, 25.0) and "loss" in rows[n] and "keys," not in n]
    for name in sorted(chosen, key=lambda n: -rows[n]["percent"]) if study.needles else ():
        if study.used > study.seconds:
            study.tell(f"no time for the needles of {name} and what follows")
            break
        with study.precision():
            scores = needle_scores(study.model, study.needles, variants[name])
        variants[name].kept.clear()
        rows[name]["needles"] = sum(s.found * s.trials for s in scores) / sum(s.trials for s in scores)
        study.record("needles", variant=name, **rows[name], scores=[dataclasses.asdict(s) for s in scores])
    study.tell("needles")
    return rows


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Prints the table."""
    print(f"\n{'attention':<42}{'blocks':>7}{'loss':>8}{'change':>9}{'%':>7}{'block':>7}{'score':>7}{'found':>7}")
    base = rows["dense"].get("loss", float("nan"))
    for name, row in rows.items():
        words = {key: f"{row[key]:.3f}" for key in ("block_recall", "score_recall", "needles") if key in row}
        change = f"{row['change']:+.4f}" if "change" in row else ""
        share = f"{100 * row['change'] / base:+.2f}" if "change" in row else ""
        loss = f"{row['loss']:.4f}" if "loss" in row else ""
        recalls = "".join(f"{words.get(key, ''):>7}" for key in ("block_recall", "score_recall", "needles"))
        print(f"{name:<42}{row['topk'] or '':>7}{loss:>8}{change:>9}{share:>7}{recalls}")


def everything(study: Study, steps: tuple[int, int]) -> None:
    """Runs the study."""
    study.record("environment", **study.facts)
    check_gradients(study.device)
    study.tell("index loss and gradients hold against float64")
    made, ends = train_together(study, steps[0], 0.45 * study.seconds)
    indexes: dict[str, Index] = {"training-free": group_mean}
    going_on = [goes_on(study, made, ends), next(x for x in zip(study.candidates, made, strict=True) if x[0].own)]
    for place, (candidate, branches) in enumerate(going_on):
        before = copy.deepcopy(branches)
        train_sparse(study, candidate, branches, steps[1], study.seconds * (0.45 + 0.075 * (place + 1)))
        indexes[f"trained {'own keys' if candidate.own else study.candidates[0].dim} + sparse"] = index_of(branches)
        indexes[f"~trained {candidate.name}"] = index_of(before)
    save_branches(study, *going_on[0], "branches-one-key")
    save_branches(study, *going_on[1], "branches-own-keys")
    for candidate, branches in zip(study.candidates, made, strict=True):
        indexes.setdefault(f"~trained {candidate.name}", index_of(branches))
    variants = attentions(study, indexes)
    for name, error in failures(study, {n: a for n, a in variants.items() if a.variant.kind != "dense"}).items():
        study.record("refused", variant=name, error=error)
        del variants[name]
    rows = measure(study, variants)
    show(rows)
    study.tell("done")


def goes_on(study: Study, made: list[dict[int, IndexBranch]], ends: list[float]) -> tuple[Candidate, dict[int, IndexBranch]]:
    """Returns the candidate with one index key head and the first one's dim and seed that learnt best, and its branches."""
    first = study.candidates[0]
    rivals = [
        (end, place)
        for place, (candidate, end) in enumerate(zip(study.candidates, ends, strict=True))
        if (candidate.dim, candidate.seed, candidate.own) == (first.dim, first.seed, False)
    ]
    place = min(rivals)[1]
    study.record("goes on", candidate=study.candidates[place].name)
    return study.candidates[place], made[place]


def save_branches(study: Study, candidate: Candidate, branches: dict[int, IndexBranch], name: str) -> None:
    """Writes a candidate's branches, bfloat16."""
    from safetensors.torch import save_file

    tensors = {
        f"{number}.{name}": p.detach().to("cpu", torch.bfloat16).contiguous()
        for number, branch in branches.items()
        for name, p in branch.named_parameters()
    }
    metadata = {"config": json.dumps(study.config(candidate).to_dict()), "candidate": candidate.name}
    save_file(tensors, study.out / f"{name}.safetensors", metadata=metadata)


def random_inputs(study: Study) -> LayerInputs:
    """Returns what a layer might hand over, with the strides that it does."""
    config, device, n = study.model.config, study.device, study.length
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    torch.manual_seed(0)

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16 if device.type == "cuda" else torch.float32)

    starts = torch.tensor([0, n], dtype=torch.int32, device=device)
    angles = torch.zeros(n, dim, device=device)
    # The position embedding leaves queries and keys with heads first.
    turned = (rows(heads, n, dim).transpose(0, 1), rows(kv_heads, n, dim).transpose(0, 1))
    hidden, seqs = rows(n, config.hidden_size), Sequences(starts, starts, n, n)
    return LayerInputs(0, hidden, angles.cos(), angles.sin(), *turned, rows(n, kv_heads, dim), seqs, dim**-0.5)


def jobs_of(study: Study) -> dict[str, Attend]:
    """Returns every attention that the study runs, with branches that have learnt nothing."""
    jobs: dict[str, Attend] = {}
    indexes: dict[str, Index] = {"training-free": group_mean}
    for candidate in study.candidates:
        branches = study.branches(candidate)
        jobs[f"warm-up of {candidate.name}"] = Together([branches])
        if candidate.own or candidate is study.candidates[0]:
            jobs[f"sparse stage of {candidate.name}"] = LayerLosses(branches, study.config(candidate), warmup=False)
            indexes[f"trained {'own keys' if candidate.own else candidate.dim} + sparse"] = index_of(branches)
        indexes[f"~trained {candidate.name}"] = index_of(branches)
    return {**jobs, **attentions(study, indexes)}


def failures(study: Study, jobs: dict[str, Attend]) -> dict[str, str]:
    """Runs each job on random tensors, which compiles its kernels, and returns the errors of those that fail."""
    inputs, found = random_inputs(study), {}
    for name, job in jobs.items():
        try:
            with torch.no_grad(), study.precision():
                job(inputs)
            if study.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: PERF203 - a job that fails must not end the others
            found[name] = f"{type(error).__name__}: {error}"
            print(f"{name} fails: {found[name]}", flush=True)
    return found


def random_study(options: argparse.Namespace) -> Study:
    """Returns a study of a random model: a small one with random tokens, or one as SmolLM2 is, for compilation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    out: Path = options.out
    if not options.toy:
        config = LlamaConfig(**files.CONFIG | {"num_hidden_layers": 1})
        device = torch.device(options.device)
        model: Any = LlamaForCausalLM(config)
        model = model.to(device).eval().requires_grad_(False)
        nothing = torch.empty(0, files.LENGTH)
        return Study(model, device, files.LENGTH, (128, 64), nothing, nothing, [], named(options), out, 0.0, {})
    else:
        torch.manual_seed(0)
        small = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.2}
        config = LlamaConfig(**files.CONFIG | small | heads)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        tokens = torch.randint(0, 96, (14, 512))
        needles = [Needle(tokens[i], 5, 100 * (1 + i % 2)) for i in range(4)]
        data = (tokens[:8], tokens[8:10], needles)
        return Study(model, torch.device("cpu"), 512, (32, 16), *data, TOY, out, 60 * options.minutes, {"toy": True})


def named(options: argparse.Namespace) -> tuple[Candidate, ...]:
    """Returns the candidates that --candidates names, or `CANDIDATES`; one with an index dim of its own and "own keys" must be
    among them, the former first."""
    known = {c.name: c for c in CANDIDATES + MORE}
    return tuple(known[name] for name in options.candidates) if options.candidates else CANDIDATES


def load(options: argparse.Namespace) -> Study:
    """Returns the study that the options describe."""
    from safetensors import safe_open

    device = torch.device(options.device)
    model = files.load_model(options.data, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with safe_open(options.data / "tokens.safetensors", "pt") as opened:
        train, held_out, needle_ids = (opened.get_tensor(k).long() for k in ("train", "held_out", "needles"))
        told = opened.metadata()
    needles = [Needle(ids, *pair) for ids, pair in zip(needle_ids, json.loads(told["needles"]), strict=True)]
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    facts = environment(device, options.commit) | {"text": {k: json.loads(v) for k, v in told.items() if k.startswith("files")}}
    facts |= {"windows": [len(train), len(held_out)], "candidates": [dataclasses.asdict(c) for c in named(options)]}
    if options.length < files.LENGTH:
        train, held_out, needles = train[:, : options.length], held_out[:, : options.length], []
    sizes = (128, 64) if options.length == files.LENGTH else (options.length // 32, options.length // 64)
    data = (train[order], held_out[: options.windows], needles)
    return Study(model, device, options.length, sizes, *data, named(options), options.out, 60 * options.minutes, facts)


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="what `python -m benchmarks.smollm2.files` made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--warmup-steps", type=int, default=400)
    parser.add_argument("--sparse-steps", type=int, default=150)
    parser.add_argument("--candidates", nargs="+", help="train these alone, by name")
    parser.add_argument("--length", type=int, default=files.LENGTH, help="shorter windows, for a trial: no needles then")
    parser.add_argument("--windows", type=int, default=20, help="held-out windows")
    parser.add_argument("--compilers", type=int, default=14, help="processes that compile kernels beforehand; 0: none")
    parser.add_argument("--commit", help="what is recorded as the commit")
    parser.add_argument("--toy", action="store_true", help="a random model of 2 layers on the CPU")
    parser.add_argument("--compile-only", action="store_true", help="compile kernels and stop")
    parser.add_argument("--compile-share", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.toy or options.compile_only or options.compile_share or options.data):
        parser.error("--data must name what `python -m benchmarks.smollm2.files` made, or --toy be given")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compile_share:
        share, of = options.compile_share
        study = random_study(options)
        sys.exit(len(failures(study, dict(list(jobs_of(study).items())[share::of]))))
    began = time.monotonic()
    if options.compilers and not options.toy:
        own = [sys.executable, "-m", "benchmarks.smollm2.study", "--out", str(options.out), "--device", options.device]
        own += ["--candidates", *options.candidates] if options.candidates else []
        shares = [["--compile-share", str(i), str(options.compilers)] for i in range(options.compilers)]
        running = [subprocess.Popen(own + share) for share in shares]
        failed = sum(process.wait() != 0 for process in running)
        print(f"kernels are compiled after {time.monotonic() - began:.0f} s; jobs failed in {failed} processes", flush=True)
    if options.compile_only:
        check_gradients(torch.device(options.device))
        print(f"index loss and gradients hold against float64; {time.monotonic() - began:.0f} s", flush=True)
    else:
        study = random_study(options) if options.toy else load(options)
        study.began = began
        everything(study, (20, 10) if options.toy else (options.warmup_steps, options.sparse_steps))


if __name__ == "__main__":
    main()
