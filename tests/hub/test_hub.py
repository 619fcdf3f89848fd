# SPDX-License-Identifier: MIT
"""The hub repository is self-contained, loads from any folder by the kernels library, and has what transformers looks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIANTS = ("torch-cpu", "torch-cuda", "torch-universal")

LOAD = {
    "kernels": """
import kernels
msa = kernels.get_local_kernel(pathlib.Path(folder))
""",
    "importlib": """
import importlib.util
path = pathlib.Path(folder, "build", "torch-cuda", "__init__.py")
spec = importlib.util.spec_from_file_location("any_name", path)
msa = importlib.util.module_from_spec(spec)
sys.modules["any_name"] = msa
spec.loader.exec_module(msa)
""",
}
USE = """
import torch
torch.manual_seed(0)
total, heads, group, dim, block, topk = 300, 2, 4, 128, 128, 4
q, k, v = (torch.randn(total, n, dim) for n in (heads * group, heads, heads))
ids = torch.tensor([1, 0, -1, -1], dtype=torch.int32).expand(heads, total, topk).contiguous()
cu = torch.tensor([0, total], dtype=torch.int32)
csr = msa.build_k2q_csr(ids, cu, cu, block, total_k=total, max_seqlen_k=total, max_seqlen_q=total, qhead_per_kv=group)
assert len(csr) == 2
out = msa.sparse_atten_func(q, k, v, *csr, topk, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=total, max_seqlen_k=total,
                            blk_kv=block, causal=True, softmax_scale=dim**-0.5)
mask = torch.ones(total, total).tril().bool() & (torch.arange(total) < 2 * block)
x, y, z = (t.transpose(0, 1)[None].double() for t in (q, k, v))
truth = torch.nn.functional.scaled_dot_product_attention(x, y, z, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
print(json.dumps({"error": float((out - truth).abs().max()), "name": msa.__name__, "version": msa.__version__,
                  "leaked": [m for m in sys.modules if m.split(".")[0] in ("openmsa", "fmha_sm100")]}))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "msa"
    subprocess.run([sys.executable, ROOT / "scripts" / "build_hub.py", folder], check=True, capture_output=True)
    return folder


def run(code, repository):
    """Runs in a process that cannot see the checkout or an editable install of it."""
    clean = "import sys, json, pathlib\n"
    clean += f"sys.path, folder = [p for p in sys.path if p not in ('', {str(ROOT)!r})], {str(repository)!r}\n"
    environment = os.environ | {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", clean + code], capture_output=True, text=True, cwd=repository.parent, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("loader", LOAD)
def test_it_loads_from_anywhere_and_attends(repository, loader):
    pytest.importorskip(loader)
    found = run(LOAD[loader] + USE, repository)
    assert found["error"] < 1e-5
    assert found["leaked"] == []


def test_kernels_accepts_the_project(repository):
    rust = pytest.importorskip("kernels._rust")
    general = rust.Build.open(repository).general
    assert [str(backend) for backend in general.backends] == ["cpu", "cuda"]
    for variant in VARIANTS:
        metadata = rust.Metadata.read_from_file(repository / "build" / variant / "metadata.json")
        assert metadata.python_depends == []


def test_it_stands_in_for_a_repository_of_the_hub(repository):
    """transformers asks ``kernels.get_kernel`` for MiniMaxAI/msa; LOCAL_KERNELS says where that is."""
    pytest.importorskip("kernels")
    load = f"import os; os.environ['LOCAL_KERNELS'] = 'MiniMaxAI/msa={repository}'\nimport kernels\n"
    found = run(load + "msa = kernels.get_kernel('MiniMaxAI/msa', version=0)\n" + USE, repository)
    assert found["error"] < 1e-5


def test_variants_are_pure_python_and_hold_the_licence(repository):
    assert sorted(p.name for p in (repository / "build").iterdir()) == sorted(VARIANTS)
    for variant in VARIANTS:
        files = [p for p in (repository / "build" / variant).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert {p.suffix for p in files} == {".py", ".json", ""}
        assert {p.name for p in files if not p.suffix} == {"LICENSE", "NOTICE"}
        text = "".join(p.read_text() for p in files if p.suffix == ".py")
        assert "\nfrom openmsa" not in text
        assert "\nimport openmsa" not in text


def test_it_never_overwrites_a_folder_of_others(tmp_path):
    (tmp_path / "precious").write_text("data")
    done = subprocess.run([sys.executable, ROOT / "scripts" / "build_hub.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert "OUTPUT must be" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]
