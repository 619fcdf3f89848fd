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


def renamed(statement):
    """Yields the names that an assignment gives values of other names to, and those."""
    for target in statement.targets:
        values = statement.value
        several = isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple) and len(target.elts) == len(values.elts)
        for x, y in zip(target.elts, values.elts, strict=True) if several else [(target, values)]:
            if isinstance(x, ast.Name) and isinstance(y, ast.Name):
                yield x.id, y.id


def confused(statements, values):
    """Yields names that a loop gives the value of another, which it changes, too, where both had one value before, and the
    line. values: what each name may stand for so far."""

    def of(name):
        return values.get(name, {name})

    def anew(nodes):
        return {name: {object()} for name in assigned(nodes)}

    for node in statements:
        if isinstance(node, ast.Assign):
            values.update(anew([node]) | {x: of(y) for x, y in renamed(node)})
        elif isinstance(node, (ast.For, ast.While)):
            given = {pair for inner in ast.walk(node) if isinstance(inner, ast.Assign) for pair in renamed(inner)}
            changed = assigned([node])
            yield from ((x, y, node.lineno) for x, y in sorted(given) if x != y and y in changed and of(x) & of(y))
            values.update(anew([node]))
            yield from confused(node.body, dict(values))
        elif isinstance(node, ast.If):
            ways = [dict(values), dict(values)]
            for way, body in zip(ways, (node.body, node.orelse), strict=True):
                yield from confused(body, way)
            values.update({name: ways[0].get(name, {name}) | ways[1].get(name, {name}) for name in assigned([node])})
        else:
            values.update(anew([node]))


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
        ("d = c + 1; a = d", "a, d = d, d + 1", 1),
        ("d = c + 1; a = d; d = d + 1", "a, d = d, d + 1", 0),
        ("a = b", "a, b = a + 1, b + 1", 0),
        ("a = b\n  if c: b = 1", "a, b = b, b + 1", 1),
    ],
)
@pytest.mark.parametrize("loop", ["for i in range(c)", "while c"])
def test_what_is_found(before, body, count, loop):
    source = f"@triton.jit\ndef kernel(b, c):\n  {before}\n  {loop}: {body}\n"
    assert len(list(confused(ast.parse(source).body[0].body, {}))) == count
