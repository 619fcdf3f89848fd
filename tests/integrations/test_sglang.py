# SPDX-License-Identifier: MIT
"""The plug-in for SGLang works with a stand-in of its hook registry; SGLang itself is not installed."""

import enum
import sys
import types
from importlib.metadata import entry_points

import pytest
import torch

from openmsa.integrations import sglang


class HookType(enum.Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


@pytest.fixture
def gate(monkeypatch):
    """A module with the gate, and a registry that applies AROUND hooks as SGLang documents: hook(original, *args)."""
    modules = {}
    for name in (
        *("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.plugins.hook_registry"),
        *("sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.layers.attention.minimax_sparse_ops"),
        "sglang.srt.layers.attention.minimax_sparse_ops.msa",
    ):
        modules[name] = types.ModuleType(name)
        modules[name].__path__ = []
        monkeypatch.setitem(sys.modules, name, modules[name])
    module = modules["sglang.srt.layers.attention.minimax_sparse_ops.msa"]
    module.msa_available = lambda: False

    hooks = []

    class HookRegistry:
        @classmethod
        def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
            hooks.append((target, hook, hook_type))

        @classmethod
        def apply_hooks(cls):
            for target, hook, hook_type in hooks:
                assert hook_type is HookType.AROUND
                owner, _, name = target.rpartition(".")
                original = getattr(sys.modules[owner], name)
                setattr(sys.modules[owner], name, lambda original=original, hook=hook: hook(original))

    modules["sglang.srt.plugins.hook_registry"].HookRegistry = HookRegistry
    modules["sglang.srt.plugins.hook_registry"].HookType = HookType
    return types.SimpleNamespace(module=module, registry=HookRegistry, hooks=hooks)


@pytest.mark.parametrize(
    ("capability", "opens"), [(None, False), ((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)]
)
def test_the_gate_opens_on_the_gpus_that_are_served(gate, monkeypatch, capability, opens):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sglang.register()
    gate.registry.apply_hooks()
    assert gate.module.msa_available() is opens


def test_where_sglang_says_yes_it_stays_yes(gate):
    gate.module.msa_available = lambda: True
    sglang.register()
    gate.registry.apply_hooks()
    assert gate.module.msa_available() is True


@pytest.mark.parametrize(("asked", "hooks"), [(None, 0), ("other", 0), ("other, openmsa", 1)])
def test_the_plugin_acts_only_when_named(gate, monkeypatch, asked, hooks):
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", asked)
    sglang.plugin()
    assert len(gate.hooks) == hooks


def test_the_package_that_it_imports_by_name_is_ours():
    from fmha_sm100 import fmha_sm100, fmha_sm100_plan

    assert callable(fmha_sm100)
    assert callable(fmha_sm100_plan)


def test_the_entry_point_is_declared():
    found = {point.name: point.load() for point in entry_points(group="sglang.srt.plugins") if point.name == "openmsa"}
    if not found:
        pytest.skip("installed without the entry points (not installed, or before they were declared)")
    assert found == {"openmsa": sglang.plugin}
