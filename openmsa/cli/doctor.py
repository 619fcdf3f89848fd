# SPDX-License-Identifier: MIT
"""`openmsa doctor` shows versions, devices, settings, which implementation serves each stage and why the others do not."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from openmsa.runtime.explanation import Explanation

HEADS, KV_HEADS, DIM, BLOCK, TOKENS = 16, 1, 128, 128, 256
PAYS = {
    "cpu": "prefill from about 1,000 tokens on; decode from 6,000 in float32, from 500 in bfloat16 and float16 "
    "(one thread of an AMD EPYC, 9 query and 3 KV heads of 64; docs/hugging-face.md)",
    "cuda": "prefill from 16,384 tokens on, decode from 8,192 "
    "(one NVIDIA H200 in bfloat16, 64 query and 4 KV heads of 128; README.md)",
}
"""By the kind of device, this is from which context on 16 blocks of 128 were measured to be faster than PyTorch's attention."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show versions, devices, settings, and which implementation serves each stage and why."""
    findings = examine()
    if as_json:
        typer.echo(json.dumps(findings, indent=2))
    else:
        _print(findings)


def examine() -> dict[str, Any]:
    """Returns ``{versions, platform, devices, pays, settings, launches, stages}``, plain values only.

    pays: for each kind of device here, from which context on sparse attention was measured to be faster than dense.

    launches: whether compiled variants of kernels are remembered from launch to launch, or why Triton chooses anew at each.

    stages: for each device, dtype, kind of call and stage the implementation that ``impl="auto"`` chooses (None: none can
    run) and the reason for every row of the stage's table, from `openmsa.explain` on small tensors.
    """
    import torch

    from openmsa.bench.record import versions
    from openmsa.primitives.cpu_blocks import SOURCE
    from openmsa.runtime import c_library, environment

    devices = [_cpu(), *(_gpu(i) for i in range(torch.cuda.device_count()))]
    stages = []
    for device in devices:
        dtypes = (torch.float32, torch.bfloat16) if device["name"] == "cpu" else (torch.bfloat16, torch.float16)
        for dtype in dtypes:
            stages += _stages(torch.device(device["name"]), dtype)
    return {
        "versions": versions(),
        "platform": platform.platform(),
        "devices": devices,
        "pays": {kind: PAYS[kind] for kind in dict.fromkeys(device["name"].partition(":")[0] for device in devices)},
        "settings": {
            "CPU workspace of one call (bytes)": environment.cpu_workspace_bytes(),
            "CPU threads that wait (OMP_WAIT_POLICY)": environment.cpu_waiting(),
            "CPU kernels in C (OPENMSA_CC)": c_library.library(SOURCE).says,
        },
        "launches": _launches(),
        "stages": stages,
    }


def _cpu() -> dict[str, Any]:
    import torch

    from openmsa.bench.record import device_name

    return {"name": "cpu", "model": device_name(torch.device("cpu")), "threads": torch.get_num_threads()}


def _gpu(index: int) -> dict[str, Any]:
    import torch

    facts = torch.cuda.get_device_properties(index)
    capability = f"{facts.major}.{facts.minor}"
    memory = {"memory_bytes": facts.total_memory, "multiprocessors": facts.multi_processor_count}
    return {"name": f"cuda:{index}", "model": facts.name, "capability": capability} | memory


def _launches() -> str:
    import torch

    from openmsa.runtime.dispatch import has_triton

    if not (torch.cuda.is_available() and has_triton()):
        return "none: there is no CUDA device, or no triton"
    from openmsa.block_topk.triton_topk import topk_kernel
    from openmsa.runtime.launch import why_not_remembered

    return why_not_remembered(topk_kernel) or "variants are remembered"


def _stages(device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Explains every stage on flat keys with as many queries as keys (prefill) and on paged keys with one query (decode)."""
    where: dict[str, Any] = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    found = []
    for call, explanations in _calls(device, dtype).items():
        for explanation in explanations:
            missing = _missing(explanation)
            reasons: dict[str, str] = dict(explanation.reasons)
            if missing is not None and explanation.chosen is not None:
                reasons[explanation.chosen] = missing
            chosen = None if missing else explanation.chosen
            found.append(where | {"call": call, "stage": explanation.stage, "chosen": chosen, "reasons": reasons})
    return found


def _calls(device: torch.device, dtype: torch.dtype) -> dict[str, list[Explanation]]:
    import torch

    import openmsa

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    table = torch.arange(TOKENS // BLOCK, dtype=torch.int32, device=device)[None]
    pages = openmsa.PagedKV.allocate(table, TOKENS // BLOCK, KV_HEADS, BLOCK, DIM, dtype)
    index_pages = openmsa.PagedIndexKeys.allocate(table, TOKENS // BLOCK, 1, BLOCK, DIM, dtype)
    for cache in (pages, index_pages):
        cache.seq_lens.fill_(TOKENS)
    k, v, index_k = zeros(TOKENS, KV_HEADS, DIM), zeros(TOKENS, KV_HEADS, DIM), zeros(TOKENS, 1, DIM)
    found = {}
    for call, count, keys, index in (
        ("prefill, flat", TOKENS, (k, v), index_k),
        ("decode, paged", 1, (pages, None), index_pages),
    ):
        q, index_q = zeros(count, HEADS, DIM), zeros(count, KV_HEADS, DIM)
        blocks = torch.arange(TOKENS // BLOCK, dtype=torch.int32, device=device).expand(count, KV_HEADS, -1)
        scores = torch.zeros(KV_HEADS, count, TOKENS // BLOCK, device=device)
        found[call] = [
            _explained(openmsa.block_scores, index_q, index),
            _explained(openmsa.select_blocks, index_q, index),
            _explained(openmsa.select_blocks_from_scores, scores),
            _explained(openmsa.sparse_attention, q, *keys, blocks),
            _explained(openmsa.dense_attention, q, *keys),
        ]
        if keys[1] is not None:  # Training is on packed keys.
            found[call].append(_explained(openmsa.index_loss, q, k, index_q, index_k, blocks))
    return found


def _explained(function: Callable[..., Any], *arguments: Any) -> Explanation:
    from openmsa import explain

    return explain(function, *arguments).by_stage[0]  # Each of these functions is one stage.


def _missing(explanation: Explanation) -> str | None:
    """Says in a sentence why the chosen implementation cannot be imported; returns None if it can."""
    from openmsa.explain import STAGES

    tables = {stage.name: stage.table for stage in STAGES.values()}
    for row in tables[explanation.stage]:
        if row.name == explanation.chosen:
            try:
                row.load()
            except (ImportError, AttributeError) as error:
                return f"chosen, but it cannot be imported: {error}"
    return None


def _print(findings: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in findings["versions"].items() if value))
    console.print(findings["platform"])
    for device in findings["devices"]:
        facts = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in device.items() if key not in ("name", "model"))
        console.print(f"[bold]{device['name']}[/]: {device['model']}, {facts}")
    for kind, contexts in findings["pays"].items():
        console.print(f"faster than dense attention on {kind}: {contexts}", markup=False)
    for name, value in findings["settings"].items():
        console.print(f"{name}: {value if isinstance(value, str) else f'{value:,}'}", markup=False)
    console.print(f"kernel launches: {findings['launches']}", markup=False)
    table = Table(title="which implementation serves each stage", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("stage", "call", "device", "dtype", "chosen"):
        table.add_column(column, overflow="fold")
    for (stage, call, device, chosen), entries in _grouped(findings["stages"], "stage", "call", "device", "chosen").items():
        table.add_row(stage, call, device, ", ".join(e["dtype"] for e in entries), chosen or "[red]none[/]")
    console.print(table)
    console.print("why not the others:")
    reasons = [
        entry | {"name": name, "reason": reason}
        for entry in findings["stages"]
        for name, reason in entry["reasons"].items()
        if name != entry["chosen"]
    ]
    for (device, name, reason), entries in _grouped(reasons, "device", "name", "reason").items():
        stages = dict.fromkeys(e["stage"] for e in entries)
        console.print(f"  {device}, {name}: {reason} ({', '.join(stages)})", markup=False)


def _grouped(entries: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(tuple(entry[key] for key in keys), []).append(entry)
    return groups
