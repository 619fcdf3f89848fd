# SPDX-License-Identifier: MIT
"""Caches and formats move to other devices, are copied and pickled; what they do not offer they say."""

import copy
import io
import pickle

import pytest
import torch

from openmsa import E4M3, MXFP4, NVFP4, CertifiedKeys, Int8, PagedIndexKeys, PagedKV
from openmsa.testing.compare import assert_equal
from tests.contract import DEVICES

FORMATS = ("plain", "e4m3", "int8", "nvfp4", "mxfp4", "certified")


def by_torch(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


KEEPING = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "torch": by_torch, "copy": copy.deepcopy}
keeping = pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
devices = pytest.mark.parametrize("device", DEVICES)


def caches(format, device="cpu"):
    """Returns a cache of the format with 20 tokens."""
    table = torch.tensor([[3, 1, 0, -1]], dtype=torch.int32, device=device)
    new = torch.randn(20, 2, 32, device=device)
    index_keys = PagedIndexKeys.allocate(table, 4, 2, 16, 32, torch.bfloat16, format=format)
    index_keys.append(new)
    if format not in ("plain", *PagedKV.formats):
        return (index_keys,)
    kv = PagedKV.allocate(table, 4, 2, 16, 32, torch.bfloat16, format=format)
    kv.append(new, -new)
    return index_keys, kv


def same(one, other):
    assert type(one) is type(other)
    for name in ("page_table", "seq_lens"):
        assert_equal(name, getattr(one, name).cpu(), getattr(other, name).cpu())
    for mine, theirs in zip(one.gather(), other.gather(), strict=True):
        assert_equal("rows", mine.cpu(), theirs.cpu())


@devices
@keeping
@pytest.mark.parametrize("format", FORMATS)
def test_caches_are_kept(device, keep, format):
    for cache in caches(format, device):
        kept = keep(cache)
        same(cache, kept)
        new = torch.randn(9, 2, 32, device=device)
        for one in (cache, kept):  # a copy has lengths of its own
            one.append(*[new] * len(one.pools()))
        same(cache, kept)
        if format == "certified":
            assert kept.keys.coarse.words() is not None, "scale and error lie side by side"


@devices
@pytest.mark.parametrize("format", FORMATS)
def test_caches_move(device, format):
    for cache in caches(format):
        moved = cache.to(device)
        assert (
            moved.device
            == moved.seq_lens.device
            == moved.page_table.device
            == torch.device(device, 0 if device != "cpu" else None)
        )
        same(cache, moved)
        same(cache, moved.to("cpu"))
        assert cache.to("meta").device.type == "meta"


@keeping
@pytest.mark.parametrize(
    "stored",
    [
        lambda x: E4M3.quantize(x),
        lambda x: E4M3.quantize(x, per="head"),
        lambda x: NVFP4.quantize(x, 0.5),
        lambda x: NVFP4.quantize(x, None, "128x4"),
        Int8.quantize,
        MXFP4.quantize,
        CertifiedKeys.quantize,
    ],
)
def test_formats_are_kept(keep, stored):
    value = stored(torch.randn(50, 2, 32))
    kept = keep(value)
    assert type(kept) is type(value)
    assert (kept.shape, kept.dtype) == (value.shape, value.dtype)
    assert_equal("numbers", kept.dequantize(), value.dequantize())
    assert getattr(kept, "layout", None) == getattr(value, "layout", None)


@pytest.mark.parametrize("name", ["state_dict", "load_state_dict"])
def test_a_cache_says_why_it_has_no_state_dict(name):
    for cache in caches("plain"):
        with pytest.raises(
            AttributeError,
            match=rf"'{type(cache).__name__}' object has no .* '{name}', as a cache .* torch.save\(cache, file\)",
        ):
            getattr(cache, name)
        assert not hasattr(cache, name)
        with pytest.raises(AttributeError, match="object has no attribute 'keyz'"):
            cache.keyz  # noqa: B018


def test_caches_are_equal_only_to_themselves():
    (cache, kv) = caches("plain")
    assert cache == cache
    assert cache != copy.deepcopy(cache)
    assert cache != kv
    assert len({cache, kv}) == 2
