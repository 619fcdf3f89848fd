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
                 aligned), ``"i32"``, ``"i32:16"`` (known to be divisible by 16), ``"fp32"``, ``"tensordesc<bf16[64, 128]>"``.
    constexprs:  value of each constexpr argument; also run-time arguments that are None or the integer 1.
    wgmma:       whether it multiplies tiles of 64 or more rows, so that on sm_90 HGMMA, QGMMA or IGMMA must be found.
    dot:         whether any matrix instruction must be found (implied by wgmma).
    may_spill:   bytes of stack that are known and accepted.
    """

    name: str
    fn: Any
    arguments: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    wgmma: bool = False
    dot: bool = False
    may_spill: int = 0
    maxnreg: int | None = None

    def signature(self) -> dict[str, str]:
        """Triton's type of every argument of the kernel, in order."""
        known = {**self.arguments, **self.constexprs}
        missing = [name for name in self.fn.arg_names if name not in known]
        extra = [name for name in known if name not in self.fn.arg_names]
        if missing or extra:
            raise ValueError(f"{self.name}: arguments missing {missing}, unknown {extra}")
        return {
            name: "constexpr" if name in self.constexprs else self.arguments[name].split(":")[0] for name in self.fn.arg_names
        }

    def attributes(self) -> dict[tuple[int, ...], list[list[Any]]]:
        """Which arguments are known to be divisible by 16."""
        divisible: dict[tuple[int, ...], list[list[Any]]] = {}
        for i, name in enumerate(self.fn.arg_names):
            kind, _, by = self.arguments.get(name, "").partition(":")
            if by == "16" or (kind.startswith("*") and by != "1"):
                divisible[(i,)] = [["tt.divisibility", 16]]
        return divisible


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
