# SPDX-License-Identifier: MIT
"""The code is laid out as CONTRIBUTING.md describes: where files stand, how long they are, what they import."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("block_scores", "block_topk", "sparse_attention", "dense_attention", "index_loss")
ROOMS = (
    "runtime",
    "types",
    "kv_cache",
    "gradients inputs known_calls primitives step_lengths",
    "block_scores",
    "block_topk dense_attention",
    "sparse_attention",
    "index_loss",
    "decode",
    "attention",
    "plan",
    "parallel host_kv",
    "explain operators",
    "openmsa",  # the package itself: its public names
    "testing",
    "modules",
    "tiny",
    "bench capacity integrations fmha_sm100",
    "demo training",
    "cli",
    "__main__",
)
"""The folders and files of the packages from the ground up: a room imports from the rooms before its own."""
SOURCES = sorted(p for folder in ("openmsa", "fmha_sm100") for p in (ROOT / folder).rglob("*.py"))
MODULES = {str(p.relative_to(ROOT)).removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in SOURCES}
EVERY_PYTHON_FILE = sorted(
    p
    for folder in ("openmsa", "fmha_sm100", "tests", "benchmarks", "scripts", "examples")
    for p in (ROOT / folder).rglob("*.py")
)
KERNEL_HEADER = "# mypy: allow-untyped-defs"
MOST_PARAMETERS = 24
"""Of a function that a kernel language compiles."""
MOST_POSITIONAL = 14
"""Positional arguments of a call of the host; a starred one counts once."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.AST, at_once: bool = False) -> set[str]:
    """Returns every module that import statements of the tree name; with at_once only those that run when the module is
    imported."""
    found = set()
    nodes = list(ast.walk(tree))
    if at_once:
        inside = {id(x) for node in nodes if isinstance(node, ast.FunctionDef | ast.Lambda) for x in ast.walk(node)}
        checking = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        inside |= {id(x) for node in checking for x in ast.walk(node)}
        nodes = [node for node in nodes if id(node) not in inside]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else str(node.module) for part in parts}
    return found


def is_jit(node: ast.AST) -> bool:
    """Says whether a kernel language compiles the function."""
    return isinstance(node, ast.FunctionDef) and any(
        re.match(r"(triton|gluon)\.(jit|constexpr_function)", ast.unparse(x)) for x in node.decorator_list
    )


def is_kernel(path: Path) -> bool:
    """A kernel file is one that holds a function of a kernel language."""
    return any(is_jit(node) for node in parsed(path).body)


def room(module: str) -> str:
    package, _, rest = module.partition(".")
    return package if package == "fmha_sm100" or not rest else rest.split(".")[0]


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=name)
def test_every_file_names_its_licence(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#!")]
    assert lines[0] == "# SPDX-License-Identifier: MIT"


@pytest.mark.parametrize("path", EVERY_PYTHON_FILE, ids=name)
def test_no_file_is_a_drawer(path):
    assert path.stem not in ("utils", "util", "common", "misc", "helpers", "helper")


C_FILES = sorted(p for ending in ("*.c", "*.h") for p in (ROOT / "openmsa").rglob(ending))


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_c_files_name_their_licence_and_stay_readable(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "/* SPDX-License-Identifier: MIT */"
    assert len(lines) <= 600
    assert max(map(len, lines)) <= 128
    if path.suffix == ".c":
        assert path.with_suffix(".py").exists(), "the Python file of its name calls a C file"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_stay_readable(path):
    limit = 600 if is_kernel(path) else 120 if path.name == "reference.py" else 250
    assert len(path.read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_kernel_files_say_so(path):
    """Device functions have no annotations, which only the header of a kernel file allows; host functions in it have them."""
    assert any(line.startswith(KERNEL_HEADER) for line in path.read_text().splitlines()[:4]) == is_kernel(path)
    for node in ast.walk(parsed(path)) if is_kernel(path) else ():
        if isinstance(node, ast.FunctionDef) and not is_jit(node):
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [x.arg for x in given if x.annotation is None and x.arg not in ("self", "cls")]
            assert not bare, f"{node.name}: {bare}"
            assert node.returns is not None, node.name


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_signatures_stay_readable(path):
    for node in ast.walk(parsed(path)):
        if is_jit(node):
            assert len(node.args.args) <= MOST_PARAMETERS, f"{node.name} takes {len(node.args.args)} parameters"
    device = {id(x) for node in parsed(path).body if is_jit(node) for x in ast.walk(node)}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and id(node) not in device:
            assert len(node.args) <= MOST_POSITIONAL, f"line {node.lineno} passes {len(node.args)} arguments by position"


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
        reached |= {stem for stem in files if re.search(rf"openmsa\.{stage}(\.| import (?:\w+, )*){stem}\b", text)}
    assert reached == set(files)


def test_dispatch_rows_exist():
    """Every row of every table names a function that its module defines and that takes the fields of the stage's call in order
    (checked without importing kernels)."""
    from openmsa.block_topk import CERTIFIED_STAGE
    from openmsa.explain import STAGES as TABLES

    for stage in (*TABLES.values(), CERTIFIED_STAGE):
        fields = get_type_hints(stage.check_call)["return"]._fields
        for row in stage.table:
            module, _, function = row.path.partition(":")
            tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
            found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert function in found, row.path
            parameters = [argument.arg for argument in found[function].args.args]
            assert parameters[: len(fields)] == list(fields), row.path


@pytest.mark.parametrize("module", MODULES)
def test_rooms_import_downwards(module):
    floors = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms.split()}
    here = room(module)
    for other in {m for m in imports(parsed(MODULES[module])) if m.split(".")[0] in ("openmsa", "fmha_sm100")}:
        there = room(other)
        assert there == here or floors[there] < floors[here], f"{module} imports {other}"


def test_no_import_runs_in_a_circle():
    """No circle is among the imports that run when a module is imported."""
    ahead = {module: imports(parsed(path), at_once=True) & set(MODULES) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in ahead[module]:
                # A module runs the packages above it first; a package that only names its modules is not asked for.
                walk(other, (*way, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name in STAGES], ids=name)
def test_stages_reach_each_other_through_contracts_and_routes(path):
    stage = path.parent.name
    for module in imports(parsed(path)):
        for other in set(STAGES) - {stage}:
            hidden = re.match(rf"openmsa\.{other}\.(\w+)", module)
            assert hidden is None or hidden[1] in ("triton_route", "call"), f"{name(path)} imports {module}"
        if path.name not in ("__init__.py", "reference.py"):
            assert module != f"openmsa.{stage}.reference", f"{name(path)} leans on the reference"


@pytest.mark.parametrize("package", ["openmsa", "fmha_sm100"])
def test_packages_carry_their_types(package):
    assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize(("module", "extra"), [("transformers", "demo"), ("minimax_m3", "demo"), ("hugging_face", "models")])
def test_an_integration_says_what_it_needs(module, extra):
    """An integration whose library is missing says what it needs."""
    code = f"import sys; sys.modules['transformers'] = None; import openmsa.integrations.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"pip install 'openmsa[{extra}]'" in done.stderr


def test_import_is_light():
    """`import openmsa` loads no kernel language, no command line, no plots, and initialises no GPU."""
    heavy = ("triton", "typer", "rich", "matplotlib", "transformers", "hypothesis")
    code = f"import sys, torch, openmsa; print([m for m in {heavy!r} if m in sys.modules], torch.cuda.is_initialized())"
    # torch itself may load some of them; only what openmsa adds counts.
    base = subprocess.run([sys.executable, "-c", code.replace(", openmsa", "")], capture_output=True, text=True, check=True)
    ours = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ours.stdout == base.stdout
