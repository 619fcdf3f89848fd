# SPDX-License-Identifier: MIT
"""The house as CONTRIBUTING.md describes it: where files stand, how long they are, what they import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("block_scores", "block_topk", "sparse_attention", "dense_attention")
SOURCES = sorted(p for folder in ("openmsa", "fmha_sm100") for p in (ROOT / folder).rglob("*.py"))
EVERY_PYTHON_FILE = sorted(
    p
    for folder in ("openmsa", "fmha_sm100", "tests", "benchmarks", "scripts", "examples")
    for p in (ROOT / folder).rglob("*.py")
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Every module named by an import statement of the file, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_kernel(path: Path) -> bool:
    return path.parent.name in STAGES and path.name not in ("__init__.py", "reference.py")


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=name)
def test_every_file_names_its_licence(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    assert lines[0] == "# SPDX-License-Identifier: MIT"


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=name)
def test_no_file_is_a_drawer(path):
    assert path.stem not in ("utils", "util", "common", "misc", "helpers", "helper")


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_stay_readable(path):
    limit = 600 if is_kernel(path) else 120 if path.name == "reference.py" else 250
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_contract_reference_and_tests(stage):
    folder = ROOT / "openmsa" / stage
    assert (folder / "reference.py").exists()
    assert '"""' in (folder / "__init__.py").read_text()
    assert list((ROOT / "tests" / stage).glob("test_*.py")), f"tests/{stage} must mirror openmsa/{stage}"


@pytest.mark.parametrize("stage", STAGES)
def test_every_kernel_file_stands_in_a_table(stage):
    """A kernel file that no table names, and that no file named in a table imports, is dead."""
    # Decode plans choose their kernels themselves.
    entries = [
        ROOT / "openmsa" / stage / "__init__.py",
        *(ROOT / "openmsa").glob("decode*.py"),
        *(ROOT / "openmsa").glob("decode/*.py"),
    ]
    files = {p.stem: p for p in (ROOT / "openmsa" / stage).glob("*.py") if p.name != "__init__.py"}
    reached: set[str] = set()
    for _ in files:
        text = "".join(p.read_text() for p in (*entries, *(files[r] for r in reached)))
        reached |= {stem for stem in files if re.search(rf"openmsa\.{stage}(\.| import ){stem}\b", text)}
    assert reached == set(files)


def test_dispatch_rows_exist():
    """Every row of every table names a function that its module defines and that takes the fields of the stage's call in order
    (checked without importing kernels)."""
    from openmsa.block_topk import CERTIFIED_STAGE
    from openmsa.explain import STAGES as TABLES

    for stage in (*TABLES.values(), CERTIFIED_STAGE):
        for row in stage.table:
            module, _, function = row.path.partition(":")
            tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
            found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in found, row.path
            parameters = [argument.arg for argument in found[function].args.args]
            assert parameters[: len(stage.fields)] == list(stage.fields), row.path


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "runtime"], ids=name)
def test_runtime_knows_no_attention(path):
    assert not [m for m in imports(path) if m.startswith("openmsa.") and not m.startswith("openmsa.runtime")]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name in STAGES], ids=name)
def test_stages_reach_each_other_through_public_names(path):
    stage = path.parent.name
    for module in imports(path):
        assert not module.startswith(("openmsa.integrations", "openmsa.cli", "openmsa.attention"))
        for other in set(STAGES) - {stage}:
            hidden = re.match(rf"openmsa\.{other}\.(\w+)", module)
            public = (
                hidden is None
                or hidden[1] in ("STAGE", "SCORES_STAGE", "CERTIFIED_STAGE", "Call")
                or not (ROOT / "openmsa" / other / f"{hidden[1]}.py").exists()
            )
            assert public, f"{name(path)} imports {module}"
        if is_kernel(path):
            assert module != f"openmsa.{stage}.reference", f"{name(path)} leans on the reference"


@pytest.mark.parametrize("package", ["openmsa", "fmha_sm100"])
def test_packages_carry_their_types(package):
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("module", ["transformers", "minimax_m3"])
def test_an_integration_says_what_it_needs(module):
    """Where its library is missing."""
    code = f"import sys; sys.modules['transformers'] = None; import openmsa.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'openmsa[demo]'" in done.stderr


def test_import_is_light():
    """`import openmsa` loads no kernel language, no command line, no plots, and initialises no GPU."""
    heavy = ("triton", "typer", "rich", "matplotlib", "transformers", "hypothesis")
    code = f"import sys, torch, openmsa; print([m for m in {heavy!r} if m in sys.modules], torch.cuda.is_initialized())"
    # torch itself may load some of them; only what openmsa adds counts.
    base = subprocess.run([sys.executable, "-c", code.replace(", openmsa", "")], capture_output=True, text=True, check=True)
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ours.stdout == base.stdout
