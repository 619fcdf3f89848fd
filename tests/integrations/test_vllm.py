# SPDX-License-Identifier: MIT
"""The plug-ins for vLLM work with stand-ins that have the names and signatures of its sources; vLLM itself is not installed."""

import importlib
import sys
import types
from importlib.metadata import entry_points

import pytest

from openmsa.integrations import vllm as plugins

M3 = "vllm.models.minimax_m3"


class TritonImpl:
    pass


class Aiter:
    pass


@pytest.fixture
def vllm(monkeypatch):
    """What the plug-ins touch: the platform, the two selectors, the MSA modules, and a model that imported a selector."""
    platform = types.SimpleNamespace(is_cuda=lambda: True, is_device_capability_family=lambda family: False)
    made = {}

    def module(name, **names):
        made[name] = types.ModuleType(name)
        made[name].__path__ = []
        vars(made[name]).update(names)
        monkeypatch.setitem(sys.modules, name, made[name])
        parent, _, leaf = name.rpartition(".")
        if parent in made:
            setattr(made[parent], leaf, made[name])
        return made[name]

    def select_indexer_impl_cls(*, topk_blocks: int, indexer_kv_dtype: str = "bf16"):
        if indexer_kv_dtype != "bf16":
            raise NotImplementedError(indexer_kv_dtype)
        return TritonImpl

    def select_main_backend_and_impl_cls(*, topk_blocks: int, kv_cache_dtype: str, num_kv_heads: int):
        return ("backend", Aiter if num_kv_heads == 99 else TritonImpl)

    for name in ("vllm", "vllm.models", M3, f"{M3}.common", f"{M3}.nvidia", "vllm.third_party"):
        module(name)
    module("vllm.platforms", current_platform=platform)
    module(f"{M3}.common.indexer", select_indexer_impl_cls=select_indexer_impl_cls)
    main = module(
        f"{M3}.common.sparse_attention",
        select_main_backend_and_impl_cls=select_main_backend_and_impl_cls,
        TritonImpl=TritonImpl,
    )
    module(f"{M3}.nvidia.indexer_msa", MiniMaxM3IndexerMSAImpl="msa indexer")
    names = {"MiniMaxM3SparseMSABackend": "msa backend", "MiniMaxM3SparseMSAImpl": "msa impl"}
    module(f"{M3}.nvidia.sparse_attention_msa", **names)
    module(f"{M3}.nvidia.model", select_main_backend_and_impl_cls=main.select_main_backend_and_impl_cls)
    TritonImpl.__name__ = "MiniMaxM3SparseTritonImpl"
    yield types.SimpleNamespace(modules=made, platform=platform)
    for name in [n for n in sys.modules if n.startswith(plugins.VENDORED)]:
        del sys.modules[name]


def main(vllm, where="common.sparse_attention", **changes):
    keywords = {"topk_blocks": 16, "kv_cache_dtype": "auto", "num_kv_heads": 4} | changes
    return vllm.modules[f"{M3}.{where}"].select_main_backend_and_impl_cls(**keywords)


def test_attend_takes_the_msa_path(vllm):
    plugins.register_attend()
    plugins.register_attend()
    assert main(vllm) == main(vllm, "nvidia.model") == ("msa backend", "msa impl")
    assert main(vllm, kv_cache_dtype="fp8_e4m3", topk_blocks=4) == ("msa backend", "msa impl")


@pytest.mark.parametrize("changes", [{"topk_blocks": 12}, {"kv_cache_dtype": "fp8_e5m2"}, {"num_kv_heads": 99}])
def test_what_msa_never_takes_stays_with_vllm(vllm, changes):
    before = main(vllm, **changes)
    plugins.register_attend()
    assert main(vllm, **changes) == before


def test_other_platforms_stay_with_vllm(vllm):
    plugins.register_attend()
    plugins.register_indexer()
    vllm.platform.is_cuda = lambda: False
    assert main(vllm)[1] is TritonImpl
    assert vllm.modules[f"{M3}.common.indexer"].select_indexer_impl_cls(topk_blocks=16) is TritonImpl


def test_indexer_takes_the_msa_path(vllm):
    plugins.register_indexer()
    select = vllm.modules[f"{M3}.common.indexer"].select_indexer_impl_cls
    assert select(topk_blocks=16) == select(topk_blocks=16, indexer_kv_dtype="fp8") == "msa indexer"
    assert select(topk_blocks=8) is TritonImpl
    with pytest.raises(NotImplementedError):
        select(topk_blocks=16, indexer_kv_dtype="nvfp4")


def test_the_vendored_package_is_ours(vllm):
    plugins.register_attend()
    import fmha_sm100
    import fmha_sm100.sparse

    assert importlib.import_module("vllm.third_party.fmha_sm100") is fmha_sm100
    assert importlib.import_module("vllm.third_party.fmha_sm100.sparse") is fmha_sm100.sparse
    api = importlib.import_module("vllm.third_party.fmha_sm100.api")
    assert all(callable(getattr(api, name)) for name in ("_fmha_sm100_plan", "_fmha_sm100", "sparse_topk_select"))


@pytest.mark.parametrize(("asked", "changed"), [(None, False), ("other", False), ("other, openmsa_attend", True)])
def test_plugins_act_only_when_named(vllm, monkeypatch, asked, changed):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_PLUGINS", asked)
    plugins.attend_plugin()
    plugins.indexer_plugin()
    assert (main(vllm)[1] == "msa impl") == changed
    assert vllm.modules[f"{M3}.common.indexer"].select_indexer_impl_cls(topk_blocks=16) is TritonImpl


def test_entry_points_are_declared():
    found = {
        point.name: point.load() for point in entry_points(group="vllm.general_plugins") if point.name.startswith("openmsa")
    }
    if not found:
        pytest.skip("installed without the entry points (not installed, or before they were declared)")
    assert found == {"openmsa_attend": plugins.attend_plugin, "openmsa_indexer": plugins.indexer_plugin}
