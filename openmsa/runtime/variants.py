# SPDX-License-Identifier: MIT
"""How a kernel module declares what it launches, so that every variant can be compiled and inspected without a GPU."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHS = (80, 90, 100, 120)


@dataclass(frozen=True)
class Variant:
    """One kernel as it would be launched on one architecture.

    A kernel module (``openmsa.<stage>.triton_*`` or ``*_sm90_*``) lists its own with a function
    ``compile_variants(arch: int) -> Iterator[Variant]``, arch being 80, 90, 100 or 120, built from the same configuration
    functions that its host code calls; it yields nothing for an architecture that it does not serve.

    name:        unique within the module, such as ``"attend bf16 d128"``.
    fn:          the ``triton.jit`` or ``gluon.jit`` function.
    arguments:   type of each run-time argument: ``"*bf16"`` (a pointer, taken as 16-byte aligned; ``"*bf16:1"``: not
                 aligned), ``"i32"``, ``"i32:16"`` (known to be divisible by 16), ``"fp32"``, ``"tensordesc<bf16[64, 128]>"``;
                 or a NamedTuple of types, and of the values of fields that are None or the integer 1.
    constexprs:  value of each constexpr argument; also run-time arguments that are None or the integer 1.
    wgmma:       whether it multiplies tiles of 64 or more rows, so that on sm_90 HGMMA, QGMMA or IGMMA must be found.
    dot:         whether any matrix instruction must be found (implied by wgmma).
    may_spill:   bytes of stack that are known and accepted.
    """

    name: str
    fn: Any
    arguments: Mapping[str, Any]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    wgmma: bool = False
    dot: bool = False
    may_spill: int = 0
    maxnreg: int | None = None

    def signature(self) -> dict[str, Any]:
        """Triton's type of every argument of the kernel, in order; a NamedTuple of types for a NamedTuple."""
        known = {**self.arguments, **self.constexprs}
        missing = [name for name in self.fn.arg_names if name not in known]
        extra = [name for name in known if name not in self.fn.arg_names]
        if missing or extra:
            raise ValueError(f"{self.name}: arguments missing {missing}, unknown {extra}")
        return {name: "constexpr" if name in self.constexprs else _kind(self.arguments[name]) for name in self.fn.arg_names}

    def constants(self) -> dict[tuple[int, ...], Any]:
        """What is compiled in, by path: the place of an argument, and of a field within."""
        fields = {path: value for path, value in self._paths() if not isinstance(value, str)}
        return fields | {(self.fn.arg_names.index(name),): value for name, value in self.constexprs.items()}

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Which arguments are known to be divisible by 16."""
        divisible: dict[tuple[int, ...], list[list[Any]]] = {}
        for path, value in self._paths():
            kind, _, by = value.partition(":") if isinstance(value, str) else ("", "", "")
            if by == "16" or (kind.startswith("*") and by != "1"):
                divisible[path] = [["tt.divisibility", 16]]
        return divisible

    def _paths(self) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Every run-time argument that is no NamedTuple, and every field of one, with its path."""
        for i, name in enumerate(self.fn.arg_names):
            value = self.arguments.get(name, "")
            for j, field_value in enumerate(value if isinstance(value, tuple) else ()):
                yield (i, j), field_value
            if isinstance(value, str):
                yield (i,), value


def _kind(value: Any) -> Any:
    """Triton's type of an argument, or of each field of a NamedTuple, where all but strings are constants."""
    if isinstance(value, tuple):
        return type(value)(*(_kind(x) for x in value))
    return value.split(":")[0] if isinstance(value, str) else "constexpr"


def declared(arch: int) -> Iterator[tuple[str, Variant]]:
    """Every variant that the installed kernel modules declare for `arch`, with its module's name. Needs triton."""
    import fmha_sm100
    import openmsa

    packages = ((openmsa, "openmsa."), (fmha_sm100, "fmha_sm100."))
    for module in (m for package, prefix in packages for m in pkgutil.walk_packages(package.__path__, prefix)):
        leaf = module.name.rsplit(".", 1)[1]
        if leaf.startswith("triton_") or "_sm90" in leaf:
            for variant in getattr(importlib.import_module(module.name), "compile_variants", lambda arch: ())(arch):
                yield module.name, variant
