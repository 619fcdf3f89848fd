# SPDX-License-Identifier: MIT
"""The byte model: packed strings are read apart, caches say what prefill says, its file gives back what it was given."""

import json

import pytest
import torch

from openmsa import Sequences
from openmsa.modules import MSAConfig, index_branches, set_stage
from openmsa.tiny import ByteConfig, ByteModel, load, store
from openmsa.tiny.weights import rounded

SIZES = ByteConfig(
    48, 2, 4, 2, 16, 40, 8, 1e4, MSAConfig(index_n_heads=2, index_head_dim=16, index_block_size=16, index_topk_blocks=2)
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ByteModel(SIZES).eval()


def ids(count, seed=0):
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_strings_do_not_see_each_other(model):
    lens = [70, 0, 1, 45]
    text = ids(sum(lens))
    together = model(text, Sequences.from_lengths(lens, lens))
    apart = [model(part) for part in text.split(lens) if len(part)]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_byte_changes_nothing_before_it(model):
    text, other = ids(90), ids(90)
    other[60] ^= 1
    first, second = model(text), model(other)
    assert torch.equal(first[:60], second[:60])
    assert not torch.equal(first[60:], second[60:])


@torch.no_grad()
@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_cached_reading_is_prefill(model, stage):
    set_stage(model, stage)
    text = ids(100)
    cache = model.cache()
    parts = []
    for part in text.split([50, 7, 1, 1, 41]):
        cache.extend([len(part)])
        parts.append(model(part, cache=cache))
    torch.testing.assert_close(torch.cat(parts), model(text), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_generation_is_the_first_choice_of_prefill(model):
    text = ids(60)
    cache = model.cache()
    cache.extend([60])
    logits = model.logits(model(text, cache=cache)[-1])
    bytes_, after = zip(*model.generate(logits, cache, 5), strict=True)
    whole = torch.cat([text, torch.tensor(bytes_)])
    expected = model.logits(model(whole))[-5:]
    torch.testing.assert_close(torch.stack(after), expected, rtol=1e-4, atol=1e-4)
    assert bytes_[0] == logits.argmax()
    assert list(bytes_[1:]) == [int(x.argmax()) for x in after[:-1]]


def test_loss_is_cross_entropy(model):
    text = ids(300)
    hidden = model(text)
    logits = model.logits(hidden).double()
    expected = logits.logsumexp(1) - logits.gather(1, text[:, None])[:, 0]
    torch.testing.assert_close(model.loss(hidden, text).double(), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(hidden, text).double(), expected, rtol=1e-5, atol=1e-5)


def test_both_losses_train_their_own_parts(model):
    index = {id(p) for branch in index_branches(model) for p in branch.parameters()}
    text = ids(64)
    model.loss(model(text), text).mean().backward()
    with_index = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert all(grad.any() for grad in with_index.values())
    model.zero_grad(set_to_none=True)
    set_stage(model, loss_coefficient=0.0)
    model.loss(model(text), text).mean().backward()
    for name, p in model.named_parameters():
        if id(p) in index:
            assert p.grad is None
        else:
            torch.testing.assert_close(p.grad, with_index[name])


def test_a_file_gives_back_the_model(model, tmp_path):
    file = tmp_path / "model.safetensors"
    store(model, file, {"bytes": 7})
    found, about = load(file)
    assert about == {"bytes": 7}
    assert found.config == model.config
    for (name, given), stored in zip(model.state_dict().items(), found.state_dict().values(), strict=True):
        if given.ndim == 2:
            bound = given.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)
            assert ((given - stored).abs() <= bound).all(), name
        else:
            assert torch.equal(given, stored)


def test_rounding_of_rows():
    codes, scale = rounded(torch.tensor([[0.0, 0.0], [1.0, -2.0]]))
    assert codes.tolist() == [[0, 0], [64, -127]]
    assert scale[1].item() == pytest.approx(2 / 127)


def test_config_survives_json():
    assert ByteConfig.from_dict(json.loads(json.dumps(SIZES.to_dict()))) == SIZES


def test_what_is_no_model_is_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(FileNotFoundError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(FileNotFoundError, match="file must be a file that exists"):
        load(tmp_path)
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors here")
    with pytest.raises(ValueError, match=r"text\.safetensors"):
        load(text)
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, other)
    with pytest.raises(ValueError, match=r"other\.safetensors"):
        load(other)
