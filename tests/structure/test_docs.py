# SPDX-License-Identifier: MIT
"""Documents are true: paths that they name exist, and README's Python blocks run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from openmsa.bench.record import rows

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(p for p in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "hub").glob("*.md")])
TOP = {p.name for p in ROOT.iterdir()}
PATH = re.compile(r"`((?:[\w.-]+/)*[\w.-]+/?(?:\.\w+)?)`")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_named_paths_exist(document):
    """Whatever stands in backticks and starts with a folder of the repository, or is linked, must exist."""
    text = document.read_text()
    named = {m for m in PATH.findall(text) if "/" in m and m.split("/")[0] in TOP}
    linked = {m for m in re.findall(r"\]\(([^)#:\s]+)\)", text)}
    missing = [m for m in named if not (ROOT / m).exists()]
    missing += [m for m in linked if not (document.parent / m).exists() and not (ROOT / m).exists()]
    assert not missing


def blocks(document: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", document.read_text(), re.S)


def test_readme_blocks_run():
    code = blocks(ROOT / "README.md")
    assert code, "README.md shows no code"
    for block in code:
        done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_training_blocks_run():
    """The blocks of Python run one after the other, but for those about a model that is not here."""
    code = [block for block in blocks(ROOT / "docs/training.md") if "path/to" not in block]
    assert any("MSACache" in block for block in code)
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_readme_shows_on_a_package_index():
    """Images and links have whole addresses, since on a package index only the text of README.md stands."""
    text = (ROOT / "README.md").read_text()
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)\s]+)\)", text))
    assert "https://arxiv.org/abs/2606.13392" in text


def times_faster(file: str, row: str, mode: str) -> dict[str, float]:
    """Reads from a record so many times faster than SDPA each workload is."""
    return {
        r["workload"]: r["times_faster_than"]["sdpa"]
        for r in rows(ROOT / "benchmarks/results" / file)
        if (r["row"], r["mode"]) == (row, mode) and not r["error"] and "sdpa" in r["times_faster_than"]
    }


@pytest.mark.parametrize(
    ("line", "workload", "found"),
    [
        ("H200, prefill", "gpu-prefill-{}", ("2026-11-24-h200.jsonl", "msa_attention", "eager")),
        ("H200, decode of 8", "gpu-decode-b8-{}", ("2026-11-24-h200.jsonl", "decode_plan", "graph")),
        ("2 CPU cores, prefill", "prefill-{}", ("2026-11-28-cpu-epyc.jsonl", "msa_attention", "eager")),
        ("2 CPU cores, decode of 1", "decode-{}", ("2026-11-28-cpu-epyc.jsonl", "msa_attention", "eager")),
    ],
)
def test_readme_says_from_where_on_it_pays(line, workload, found):
    """The first table has every figure of the record of its machine, and no other."""
    lines = [row.strip("| ").split("|") for row in (ROOT / "README.md").read_text().splitlines() if row.startswith("| ")]
    contexts = next(cells[1:] for cells in lines if cells[0].strip() == "context")
    shown = next(cells[1:] for cells in lines if cells[0].startswith(line))
    measured = times_faster(*found)
    for context, cell in zip(contexts, shown, strict=False):
        ratio = measured.get(workload.format(context.strip().lower()))
        expected = "" if ratio is None else f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}"
        assert cell.strip() == expected, context


def test_the_bars_of_the_readme_are_those_of_its_table():
    """They are text, so that they show wherever the README is read: half a unit a character."""
    text = (ROOT / "README.md").read_text()
    table = [[cell.strip() for cell in row.strip("| ").split("|")] for row in text.splitlines() if row.startswith("| ")]
    contexts, found = (next(row[1:] for row in table if row[0] == name) for name in ("context", "H200, prefill"))
    bars = re.findall(r"^ +(\d+[KM]) (█+) (\S+)$", text, re.MULTILINE)
    assert [(context, number) for context, _, number in bars] == list(zip(contexts, found, strict=True))
    assert all(len(bar) == round(2 * float(number)) for _, bar, number in bars)


@pytest.mark.parametrize("document", ["README.md", "docs/parallel.md", "docs/log/parallel.md"])
def test_two_gpus_are_as_fast_as_recorded(document):
    records = rows(ROOT / "benchmarks/results/2026-11-23-h200-parallel.jsonl")
    text = (ROOT / document).read_text()
    cited = {"prefill-128k", "prefill-1m"} | (set() if document == "README.md" else {"decode-8x1m", "decode-1x1m"})
    found = {record["case"]["name"]: f"{record['times_faster_than_one']:.2f}" for record in records}
    assert all(found[name] in text for name in cited)


def test_environment_variables_are_documented():
    """Every OPENMSA_ variable that the code reads has a line in docs/environment.md, and no other has."""
    pattern = re.compile(r"OPENMSA_[A-Z0-9_]+")
    used = {v for p in (ROOT / "openmsa").rglob("*.py") for v in pattern.findall(p.read_text())}
    assert used == set(pattern.findall((ROOT / "docs" / "environment.md").read_text()))
