# SPDX-License-Identifier: MIT
"""Loops of kernels carry all that they change. Triton 3.6 finds what that is by the values which names have when the body has
been visited once: of two names of one value, where the body gives one the value of the other, it misses one. It then keeps its
first value in all turns, and nobody is told."""

import ast
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "openmsa", Path(__file__).parents[2] / "fmha_sm100"


def is_kernel(node):
    """Says whether a function is compiled for a GPU."""
    return isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list)


def assigned(nodes):
    """Returns the names that statements give values to."""
    found = (node for root in nodes for node in ast.walk(root) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, ast.Store)}


def pairs(statement):
    """Yields what an assignment gives values to, and these values as far as they can be told apart."""
    for target in statement.targets:
        values = statement.value
        if isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple) and len(target.elts) == len(values.elts):
            yield from zip(target.elts, values.elts, strict=True)
        else:
            yield target, values


def confused(statements, values):
    """Yields pairs of names of one value that a loop changes, and its line. values: what each name stands for so far."""
    for node in statements:
        if isinstance(node, ast.Assign):
            new = [(target, value) for target, value in pairs(node)]
            known = {t.id: values.get(v.id, v.id) for t, v in new if isinstance(t, ast.Name) and isinstance(v, ast.Name)}
            values.update(dict.fromkeys(assigned([node]), None) | known)
        elif isinstance(node, (ast.For, ast.While)):
            changed = sorted(name for name in assigned([node]) if values.get(name, name) is not None)
            for i, x in enumerate(changed):
                yield from ((x, y, node.lineno) for y in changed[i + 1 :] if values.get(x, x) == values.get(y, y))
            values.update(dict.fromkeys(assigned([node]), None))
            yield from confused(node.body, dict(values))
        elif isinstance(node, ast.If):
            ways = [dict(values), dict(values)]
            for way, body in zip(ways, (node.body, node.orelse), strict=True):
                yield from confused(body, way)
            for name in assigned([node]):
                kept = {way.get(name, name) for way in ways} - {None}
                values[name] = kept.pop() if len(kept) == 1 else None
        else:
            values.update(dict.fromkeys(assigned([node]), None))


def test_no_loop_confuses_two_names_of_one_value():
    found = []
    for path in (path for package in PACKAGES for path in sorted(package.rglob("*.py"))):
        for kernel in filter(is_kernel, ast.walk(ast.parse(path.read_text()))):
            found += [f"{path.name}:{line}: {x} and {y}" for x, y, line in confused(kernel.body, {})]
    assert not found


@pytest.mark.parametrize(
    ("before", "body", "count"),
    [
        ("a = b", "a, b = b, b + 1", 1),
        ("a = b", "b = b + 1", 0),
        ("a = b + 0", "a, b = b, b + 1", 0),
        ("a, c = b, 0", "a, b = b, b + 1", 1),
        ("a = b; b = 3", "a, b = b, b + 1", 0),
        ("a = c; b = c", "a, b = b, b + 1", 1),
        ("a = b\n  if c: b = 1", "a, b = b, b + 1", 1),
    ],
)
@pytest.mark.parametrize("loop", ["for i in range(c)", "while c"])
def test_what_is_found(before, body, count, loop):
    source = f"@triton.jit\ndef kernel(b, c):\n  {before}\n  {loop}: {body}\n"
    assert len(list(confused(ast.parse(source).body[0].body, {}))) == count
