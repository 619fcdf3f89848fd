# SPDX-License-Identifier: MIT
"""What a newcomer does by mistake is answered with a sentence where it would else give a wrong result, or none, in silence."""

import contextlib
import itertools
import math
import warnings

import pytest
import torch

from fmha_sm100 import fmha_sm100_plan
from openmsa import (
    E4M3,
    MXFP4,
    NVFP4,
    CertifiedKeys,
    DecodePlan,
    Int8,
    PagedIndexKeys,
    PagedKV,
    Sequences,
    block_scores,
    dense_attention,
    explain,
    index_loss,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.modules import MSAConfig, MSAttention
from openmsa.parallel import TokenShards
from openmsa.runtime import overlap
from openmsa.testing.inputs import paged, problem, random_blocks
from tests.contract import DEVICES

FORMATS = (E4M3, Int8, NVFP4, MXFP4, CertifiedKeys)
devices = pytest.mark.parametrize("device", DEVICES)
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def path(p, **changes):
    """Returns the arguments of `msa_attention`."""
    names = ("q", "k", "v", "index_q", "index_k")
    return {name: getattr(p, name) for name in names} | {"topk": 2, "block_size": 16} | changes


def refused(words, function, *args, error=ValueError, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    for word in words.split(" | "):
        assert word in str(caught.value)


# Gradients


@devices
@pytest.mark.parametrize("name", ["index_q", "index_k"])
def test_a_selection_has_no_gradient(device, name):
    p = problem((5,), (40,)).to(device)
    asked = getattr(p, name).clone().requires_grad_()
    words = f"{name} must not require a gradient | no derivative | pass {name}.detach()"
    whole = path(p, **{name: asked})
    select = {key: whole[key] for key in ("index_q", "index_k", "topk", "block_size")}
    for function, arguments in ((msa_attention, whole), (select_blocks, select)):
        refused(words, function, **arguments)
        refused(words, explain, function, **arguments)
    if device == "cpu":
        with torch.no_grad():
            msa_attention(**whole)
        msa_attention(**whole | {name: asked.detach()})


def test_tangents_are_not_lost():
    """Forward-mode derivatives of what has none raise; a loss without its tangent would pass for a constant."""
    p = problem((5,), (40,))
    loss = {name: getattr(p, name) for name in ("q", "k", "index_q", "index_k")} | {"block_size": 16}
    whole = path(p)
    with torch.autograd.forward_ad.dual_level():
        for function, arguments, name in ((index_loss, loss, "index_q"), (msa_attention, whole, "v")):
            dual = torch.autograd.forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
            refused("jvp", function, **arguments | {name: dual}, error=NotImplementedError)
            function(**arguments)


def test_the_gradients_of_the_main_branch_stay():
    p = problem((5,), (40,))
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    msa_attention(**path(p, q=q, k=k, v=v)).sum().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in (q, k, v))


def test_gradients_of_a_pool_are_not_lost():
    p = problem((5,), (40,))
    kv, _ = paged(p, 16)
    kv.v.requires_grad_()
    assert explain(sparse_attention, p.q, kv, None, random_blocks(p, 3, 16, 2), block_size=16).chosen == "reference"
    dense_attention(p.q, kv).sum().backward()
    assert kv.v.grad is not None


@devices
@pytest.mark.parametrize("format", ["plain", "e4m3"])
def test_a_cache_takes_no_graph(device, format):
    """Appending what a model computed with gradients leaves the pool a plain tensor."""
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    kv = PagedKV.allocate(table, 4, 2, 16, 32, format=format)
    new = torch.randn(20, 2, 32, device=device, requires_grad=True)
    kv.append(new, new * 2)
    assert not kv.requires_grad
    assert kv.seq_lens.tolist() == [20]


# Lengths


@devices
def test_more_queries_than_keys_need_lengths(device):
    """Without lengths the queries are the last positions of the keys; with them a query may see nothing."""
    q, k = torch.randn(700, 4, 32, device=device), torch.randn(300, 2, 32, device=device)
    blocks = torch.zeros(700, 2, 1, dtype=torch.int32, device=device)
    words = "must be at most the number of keys (300) where seqs gives no lengths | last positions | got 700"
    for seqs in (None, Sequences(), Sequences(max_seqlen_q=700)):
        refused(f"q.shape[0] {words}", dense_attention, q, k, k, seqs)
        refused(f"q.shape[0] {words}", sparse_attention, q, k, k, blocks, seqs)
        refused(f"q.shape[0] {words}", msa_attention, q, k, k, q[:, :2], k, 2, seqs)
        refused(f"index_q.shape[0] {words}", block_scores, q, k, seqs)
        refused(f"index_q.shape[0] {words}", select_blocks, q, k, 2, seqs)
    refused(
        "scores.shape[1] must be at most the number of keys (384)", select_blocks_from_scores, q.transpose(0, 1)[..., :3], 2
    )
    if device == "cpu":
        assert dense_attention(q, k, k, causal=False).shape == q.shape
        out, lse = dense_attention(q, k, k, Sequences.from_lengths([700], [300]), return_lse=True)
        assert bool((out[:400] == 0).all())
        assert bool(lse[:400].isneginf().all())
        offset = torch.zeros(1, dtype=torch.int32)
        assert bool(dense_attention(q, k, k, Sequences(q_offset=offset))[0].any())


def test_more_queries_than_cached_keys():
    p = problem((5,), (40,))
    kv, index_keys = paged(p, 16)
    q = torch.randn(41, 4, 64)
    refused("q.shape[0] must be at most the number of keys (40) | got 41", dense_attention, q, kv)
    refused("index_q.shape[0] must be at most the number of keys (40)", block_scores, q[:, :2], index_keys)


@devices
@pytest.mark.parametrize("formats", [("plain", "plain"), ("e4m3", "int8")])
@pytest.mark.parametrize("view", [False, True])
def test_two_caches_must_not_advance_the_same_lengths(device, formats, view):
    """Two appends of 20 would count 40."""
    table = torch.arange(4, dtype=torch.int32, device=device)[None]
    kv = PagedKV.allocate(table, 4, 2, 16, 32, format=formats[0])
    lens = kv.seq_lens[:] if view else kv.seq_lens
    keys = PagedIndexKeys.allocate(table, 4, 1, 16, 32, format=formats[1]).keys
    index_keys = PagedIndexKeys(keys, table, lens)
    new = torch.randn(20, 2, 32, device=device)
    kv.append(new, new)
    refused(
        "seq_lens of PagedIndexKeys must be its own | a PagedKV with other pools | seq_lens.clone()",
        index_keys.append,
        new[:, :1],
    )
    assert kv.seq_lens.tolist() == [20]
    assert not index_keys.gather()[0].any()
    kv.append(new, new)
    assert kv.seq_lens.tolist() == [40]
    layer = PagedKV(*torch.zeros(2, 4, 2, 16, 32, device=device), table, lens)
    refused("seq_lens of PagedKV must be its own | a PagedKV with other pools", layer.append, new[:2], new[:2])


def test_a_cache_made_anew_over_its_pools_appends():
    """An engine wraps the same pools and lengths at each step."""
    table, new = torch.arange(4, dtype=torch.int32)[None], torch.randn(5, 2, 32)
    first = PagedKV.allocate(table, 4, 2, 16, 32)
    for step in range(1, 4):
        again = PagedKV(first.k, first.v, table, first.seq_lens)
        (first if step == 2 else again).append(new, new)
        assert first.seq_lens.tolist() == [5 * step]
    lens = first.seq_lens
    del first, again
    other = PagedIndexKeys(torch.zeros(4, 1, 16, 32), table, lens.zero_())  # the owner is gone
    other.append(new[:, :1])
    assert lens.tolist() == [5]


def test_caches_of_one_step_may_share_lengths_that_their_owner_advances():
    p = problem((5,), (40,))
    kv, index_keys = paged(p, 16)
    shared = PagedIndexKeys(index_keys.keys, index_keys.page_table, kv.seq_lens)
    msa_attention(p.q, kv, None, p.index_q, shared, 2, block_size=16)


@pytest.mark.parametrize("other", [None, "lengths", 3])
def test_sequences_are_compared_by_value(other):
    same = [Sequences.from_lengths([1, 2], [3, 4]) for _ in range(2)]
    assert same[0] == same[1]
    assert same[0] != other
    offset = torch.tensor([2, 2], dtype=torch.int32)
    different = (
        Sequences(),
        Sequences.from_lengths([1, 2], [3, 5]),
        Sequences.from_lengths([1], [3]),
        Sequences(same[0].cu_seqlens_q, same[0].cu_seqlens_k),
        Sequences(same[0].cu_seqlens_q, same[0].cu_seqlens_k, 2, 4, offset),
        Sequences(same[0].cu_seqlens_q.long(), same[0].cu_seqlens_k, 2, 4),
    )
    assert all(same[0] != one for one in different)
    assert Sequences(max_seqlen_q=3) == Sequences(max_seqlen_q=3)


@pytest.mark.parametrize(
    ("lens", "got"), [(10, "int"), (torch.tensor([10]), r"Tensor; pass q_lens.tolist()"), ("10", "q_lens[0] must be an int")]
)
def test_lengths_are_lists(lens, got):
    refused(f"q_lens | must be | {got}", Sequences.from_lengths, lens, [300], error=TypeError)


def test_lengths_in_place_of_starts():
    q, k = torch.randn(10, 4, 32), torch.randn(300, 2, 32)
    lens = Sequences(torch.tensor([10]), torch.tensor([300]))
    refused("seqs.cu_seqlens_q must start at 0, got 10 | from_lengths", dense_attention, q, k, k, lens)


# Selections


@pytest.mark.parametrize("queries", [1, 20])
def test_a_block_named_twice(queries):
    """Past the visible blocks, where ids are skipped, one may stand twice."""
    p = problem((queries,), (40,))
    blocks = torch.tensor([0, 2, 7, 7], dtype=torch.int32).expand(queries, 2, 4).contiguous()
    right = sparse_attention(p.q, p.k, p.v, blocks, block_size=16)
    assert torch.equal(right, sparse_attention(p.q, p.k, p.v, blocks.clamp(max=3), block_size=16))
    blocks[-1, 1, 1] = 0
    words = f"blocks must hold distinct ids in a row, got 0 twice at row {queries - 1}, head 1"
    refused(words, sparse_attention, p.q, p.k, p.v, blocks, block_size=16)


# Scales


@pytest.mark.parametrize("scale", [0, 0.0, -1.0, math.inf, -math.inf, math.nan, 1e-50, 1e39])
def test_scales_are_positive_and_finite(scale):
    rows = torch.randn(6, 2, 32)
    words = f"must be positive and finite | got {scale}"
    for given, quoted in ((scale, words), (torch.tensor(float(scale)), "must be positive and finite")):
        refused(f"scale {quoted}", E4M3.quantize, rows, given)
        refused(f"global_scale {quoted}", NVFP4.quantize, rows, given)
    refused(f"E4M3.scale {words}", E4M3, E4M3.quantize(rows).data, scale)
    refused(f"E4M3.scale {words}", E4M3.allocate, (6, 2, 32), scale=scale)
    stored = NVFP4.quantize(rows)
    refused(f"NVFP4.global_scale {words}", NVFP4, stored.data, stored.scale, scale)
    refused(f"NVFP4.global_scale {words}", NVFP4.allocate, (6, 2, 32), global_scale=scale)


def test_one_bad_scale_of_many_is_named():
    rows = torch.randn(3, 2, 16, 32)
    heads = torch.tensor([1.0, -2.0])
    refused("scale must be positive and finite, got -2.0 at (1,)", E4M3.quantize, rows, heads)
    pages = torch.ones(3, 2)
    pages[2, 0] = math.nan
    refused("scale must be positive and finite, got nan at (2, 0)", E4M3.quantize, rows, pages)
    E4M3(E4M3.quantize(rows).data, torch.zeros(3, 2))  # pages that none has filled yet


@pytest.mark.parametrize("scale", [True, "half"])
def test_scales_are_numbers(scale):
    refused("E4M3.scale must be a torch.Tensor", E4M3.quantize, torch.randn(6, 2, 32), scale, error=TypeError)


# Names of implementations


@pytest.mark.parametrize("impl", ["triton_decode", "triton", "fastest", "", None, 3])
def test_names_of_implementations(impl):
    p = problem((5,), (40,))
    table = "['triton_decode', 'triton_prefill', 'cpu', 'reference']"
    words = f"impl must be 'auto' or one of ['cpu', 'reference'] | select_blocks has ['triton', 'cpu', | attention has {table}"
    refused(f"{words} | got {impl!r}", msa_attention, **path(p), impl=impl)
    refused(f"{words} | got {impl!r}", explain, msa_attention, **path(p), impl=impl)
    if impl != "triton":
        refused(f"for dense_attention, got {impl!r}", dense_attention, p.q, p.k, p.v, impl=impl)


def test_names_of_implementations_when_registered():
    transformers = pytest.importorskip("openmsa.integrations.transformers")
    minimax = pytest.importorskip("openmsa.integrations.minimax_m3")
    refused("impl must be 'auto' or one of | got 'fastest'", transformers.register, "never", impl="fastest")
    refused("impl must be 'auto' or one of | got 'triton'", minimax.register_minimax_m3, "never", impl="triton")


def test_training_a_registered_model_needs_no_care():
    transformers = pytest.importorskip("openmsa.integrations.transformers")
    q, k = torch.randn(9, 4, 32, requires_grad=True), torch.randn(9, 2, 32, requires_grad=True)
    assert not any(x.requires_grad for x in transformers.group_mean_index(torch.nn.Identity(), q, k))


# Shapes


@pytest.mark.parametrize("store", [lambda x: x, E4M3.quantize], ids=["plain", "e4m3"])
def test_a_batch_is_to_be_packed(store):
    q, k = store(torch.randn(1, 8, 70, 32)), store(torch.randn(1, 2, 70, 32))
    words = "q must have shape [total_q, num_q_heads, head_dim] (3 dimensions), got (1, 8, 70, 32)"
    hint = ".transpose(1, 2).flatten(0, 1) | seqs has the lengths"
    refused(f"{words} | {hint}", dense_attention, q, k, k)
    refused(f"{words} | {hint}", msa_attention, q, k, k, k, k)
    refused(f"index_q must have shape | {hint}", block_scores, k, k)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 8), (8, 2), (8, 1)])
@pytest.mark.parametrize("q_len", [1, 70])
def test_heads_first(q_heads, kv_heads, q_len):
    """What is read as 70 heads of a few tokens gets a warning that names q first, whether the call can go on or not."""
    q, k = torch.randn(q_heads, q_len, 32), torch.randn(kv_heads, 70, 32)
    index = torch.randn(kv_heads, q_len, 32), torch.randn(1, 70, 32)
    blocks = torch.zeros(q_heads, 1, 1, dtype=torch.int32)
    calls = ((dense_attention, (q, k, k)), (sparse_attention, (q, k, k, blocks)), (msa_attention, (q, k, k, *index)))
    for function, arguments in calls:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with contextlib.suppress(ValueError):
                function(*arguments)
        assert str(told[0].message).startswith(f"q {tuple(q.shape)} and k {tuple(k.shape)} are read as [tokens, heads, dim]")
        assert "70 heads" in str(told[0].message)
        assert told[0].filename == __file__, "the warning points at the call"


@pytest.mark.parametrize("function", [block_scores, select_blocks])
def test_heads_first_of_index_keys(function):
    with pytest.warns(UserWarning, match="index_q .* are read as") as told:
        function(torch.randn(4, 70, 32), torch.randn(8, 70, 32))
    assert told[0].filename == __file__, "the warning points at the call"


@pytest.mark.parametrize(("tokens", "heads"), [(5, 40), (5, 64), (200, 128), (0, 8)])
def test_many_heads_of_few_tokens_pass(tokens, heads):
    x = torch.randn(tokens, heads, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dense_attention(x, x, x)


# Devices


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
def test_meta_tensors(impl):
    p = problem((5,), (40,))
    m = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in path(p).items()}
    blocks = random_blocks(p, 2, 16, 2).to("meta")
    lengths = Sequences.from_lengths([5], [40], "meta")
    words = f"impl={impl!r} cannot serve this call | meta"
    for function, arguments in (
        (msa_attention, m),
        (dense_attention, {name: m[name] for name in "qkv"} | {"seqs": lengths}),
        (sparse_attention, {name: m[name] for name in "qkv"} | {"blocks": blocks}),
        (block_scores, {name: m[name] for name in ("index_q", "index_k")}),
        (select_blocks, {name: m[name] for name in ("index_q", "index_k")}),
        (select_blocks_from_scores, {"scores": torch.zeros(2, 5, 3, device="meta"), "topk": 2}),
    ):
        refused(words, function, **arguments, impl=impl, error=NotImplementedError)
        reasons = [one.reasons["reference"] for one in explain(function, **arguments).by_stage]
        assert all("meta device hold no values" in reason for reason in reasons)


def test_what_meta_tensors_cannot_tell():
    q = torch.zeros(5, 2, 32, device="meta")
    starts = torch.zeros(2, dtype=torch.int32, device="meta")
    refused("seqs.max_seqlen_q must be given on the meta device", dense_attention, q, q, q, Sequences(starts, starts))
    refused("check must be False on the meta device", dense_attention, q, q, q, check=True)
    cache = PagedKV.allocate(torch.zeros(1, 4, dtype=torch.int32, device="meta"), 4, 2, 16, 32)
    refused("the cache must hold values | meta", cache.append, q, q, error=NotImplementedError)
    refused("the cache must hold values | meta", cache.gather, error=NotImplementedError)


@without_cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cuda", 0)], ids=str)
def test_a_device_that_is_not_there(device):
    table = torch.zeros(1, 4, dtype=torch.int32)
    words = f"device must be 'cpu' where PyTorch finds no CUDA device, got {device}"
    refused(words, Sequences.from_lengths, [1], [1], device=device)
    refused(words, PagedKV.allocate(table, 4, 2, 16, 32).to, device)
    for kind in FORMATS:
        refused(words, kind.allocate, (4, 2, 32), device)
        refused(words, kind.quantize(torch.randn(4, 2, 32)).to, device)
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "page_size": 16, "max_pages": 4}
    refused(words, DecodePlan, max_batch=1, **sizes, device=device)
    refused(words, TokenShards((4,), 2).rows, 0, device)
    refused(words, TokenShards((4,), 2).pieces, 0, device=device)
    refused(words, MSAttention, 32, 2, 2, 16, MSAConfig(2), device=device)
    one = torch.ones(1, dtype=torch.int32)
    refused(words, fmha_sm100_plan, one, one, 1, device=device)
    refused("device must be 'cpu' where PyTorch finds no CUDA device, got cuda:0", fmha_sm100_plan, one, one, 1, device=0)


@pytest.mark.parametrize("device", ["xpu:9", "mps", "hpu"])
def test_a_device_of_another_kind(device):
    refused(f"device must be a CUDA device or a CPU, got {device}", Sequences.from_lengths, [1], [1], device=device)


@devices
@pytest.mark.parametrize("k_lens", [(9,), (9, 5, 0)])
def test_a_cache_of_another_number_of_sequences(device, k_lens):
    p = problem((1, 1), (40, 30)).to(device)
    kv, keys = paged(p, 16)
    seqs = Sequences.from_lengths([2] + [0] * (len(k_lens) - 1), k_lens, device)
    words = f"seqs.cu_seqlens_k must have batch + 1 entries (3), got {len(k_lens) + 1}"
    refused(words, dense_attention, p.q, kv, None, seqs)
    refused(words, block_scores, p.index_q, keys, seqs)


def test_places_that_share_memory():
    p = problem((5,), (40,))
    keys, counts = CertifiedKeys.quantize(p.index_k), torch.zeros(1, p.index_q.shape[1], dtype=torch.int32).expand(5, -1)
    words = "rescored must not be expanded or overlap itself, as it is written to"
    refused(words, select_blocks, p.index_q, keys, 2, block_size=16, certified=True, rescored=counts)
    pool, table = torch.zeros(1, 2, 16, 32).expand(3, -1, -1, -1), torch.arange(3, dtype=torch.int32)[None]
    cache = PagedKV(torch.zeros(3, 2, 16, 32), pool, table, torch.zeros(1, dtype=torch.int32))
    new = torch.ones(4, 2, 32)
    refused("v must not be expanded or overlap itself, as it is written to", cache.append, new, new)
    assert not cache.seq_lens.any()
    assert not cache.k.any()


@pytest.mark.parametrize(("shape", "strides"), [((4, 3), (2, 1)), ((2, 5, 4), (10, 1, 1)), ((3, 2), (1, 1)), ((2, 2), (0, 1))])
def test_windows_that_overlap_are_not_written(shape, strides):
    window = torch.zeros(64).as_strided(shape, strides)
    refused(
        f"out must not be expanded or overlap itself, as it is written to, got strides {strides}",
        overlap.check_written,
        "out",
        window,
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_permuted_slices_are_written(order):
    overlap.check_written("out", torch.zeros(4, 6, 5)[1:, ::3, 2:4].permute(order))
    overlap.check_written("out", torch.zeros(4, 1, 5)[:, :, :1].expand(4, 1, 1).permute(order))


@pytest.mark.parametrize("format", ["plain", "e4m3", "nvfp4"])
def test_keys_and_values_in_one_place_are_not_appended_to(format):
    table, new = torch.arange(3, dtype=torch.int32)[None], torch.ones(4, 2, 32)
    made = PagedKV.allocate(table, 3, 2, 16, 32, format=format)
    cache = PagedKV(made.k, made.k, table, made.seq_lens)
    refused("v must share no memory with k, as an append writes both", cache.append, new, 2 * new)
    assert not cache.seq_lens.any()


@pytest.mark.parametrize("dimension", range(5))
def test_keys_and_values_side_by_side_are_appended_to(dimension):
    """Engines keep both in one tensor, with a dimension of two anywhere."""
    table, new = torch.arange(3, dtype=torch.int32)[None], torch.ones(4, 2, 32)
    sizes = [3, 2, 16, 32]
    k, v = torch.zeros([*sizes[:dimension], 2, *sizes[dimension:]]).unbind(dimension)
    cache = PagedKV(k, v, table, torch.zeros(1, dtype=torch.int32))
    cache.append(new, 2 * new)
    assert [int(x.unique()) for x in cache.gather()[:2]] == [1, 2]
    pages = torch.zeros(4, *sizes[1:])
    cache = PagedKV(pages[:3], pages[1:], table, torch.zeros(1, dtype=torch.int32))
    refused("v must share no memory with k, as an append writes both", cache.append, new, new)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_device_past_the_last():
    count = torch.cuda.device_count()
    refused(f"device must be one of {count} CUDA devices", Sequences.from_lengths, [1], [1], device=f"cuda:{count}")


@pytest.mark.parametrize("device", ["gpu", torch.float16], ids=str)
def test_what_is_no_device(device):
    refused("device must be a CUDA device or a CPU, got", Sequences.from_lengths, [1], [1], device=device)
    refused("device must be a CUDA device or a CPU, got", E4M3.quantize(torch.randn(4, 2, 32)).to, device)
    refused("device must be a CUDA device or a CPU, got", MSAttention, 32, 2, 2, 16, MSAConfig(2), device=device)
    one = torch.ones(1, dtype=torch.int32)
    refused("device must be a CUDA device or a CPU, got", fmha_sm100_plan, one, one, 1, device=device)
    refused("device must be a CUDA device or a CPU, got", fmha_sm100_plan, one, one, 1, device=-1)
    refused("device must be a torch.device, its name,", fmha_sm100_plan, one, one, 1, device=True, error=TypeError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float32"], ids=str)
def test_weights_are_floats(dtype):
    words = f"dtype must be None or torch.float64 | got {dtype!r}"
    refused(words, MSAttention, 32, 2, 2, 16, MSAConfig(2), dtype=dtype, error=TypeError)


# Explaining


@pytest.mark.parametrize(
    ("function", "given", "words"),
    [
        (sparse_attention, ("q", "k"), "sparse_attention must be given v, blocks: explain takes every argument | got q, k"),
        (msa_attention, (), "msa_attention must be given q, k, v, index_q, index_k | got none"),
        (select_blocks, ("index_q",), "select_blocks must be given index_k"),
        (select_blocks_from_scores, (), "select_blocks_from_scores must be given scores"),
    ],
)
def test_explaining_needs_the_arguments(function, given, words):
    p = problem((5,), (40,))
    refused(words, explain, function, **{name: getattr(p, name) for name in given}, error=TypeError)
    refused(f"{function.__name__}: got an unexpected keyword", explain, function, colour="red", error=TypeError)


def test_explanations_have_one_form():
    p = problem((5,), (40,))
    (alone,) = explain(dense_attention, p.q, p.k, p.v).by_stage
    assert alone.stage == "dense_attention"
    assert [one.stage for one in explain(msa_attention, **path(p)).by_stage] == ["select_blocks", "sparse_attention"]


# Values of a kind that nobody expects


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        (None, TypeError, "shape must be a tuple of ints | NoneType"),
        (8, TypeError, "shape must be a tuple of ints | int"),
        ((), ValueError, "shape must have at least one dimension"),
        ((4, -1, 16, 64), ValueError, "shape[1] must be at least 0, got -1"),
        ((4, 2.0, 16, 64), TypeError, "shape[1] must be an int | float"),
        ((2**63, 2, 16, 64), ValueError, "shape[0] must be from 0 to 2147483647"),
    ],
)
def test_shapes_of_formats(format, shape, error, words):
    refused(words, format.allocate, shape, error=error)


@pytest.mark.parametrize("dtype", ["float32", torch.int32, None, 0, "cpu"])
def test_numbers_are_floats(dtype):
    for format in FORMATS:
        refused(
            "dtype must be torch.float64 or | got", format.quantize(torch.randn(5, 2, 64)).dequantize, dtype, error=TypeError
        )
    p = problem((5,), (40,))
    for cache in paged(p, 16):
        refused("dtype must be torch.float64 or | got", cache.gather, None, dtype, error=TypeError)
    refused("dtype must be torch.float64 or", CertifiedKeys.allocate, (4, 64), "cpu", dtype, error=TypeError)


def test_rows_without_elements_have_no_scale():
    refused("values must have shape [..., dim], dim at least 1", Int8.quantize, torch.zeros(3, 2, 0))


@pytest.mark.parametrize("size", [2**31, 2**63, 10**400])
def test_sizes_beyond_int32(size):
    table = torch.arange(4, dtype=torch.int32)[None]
    words, q = "must be from 1 to 2147483647", torch.randn(5, 2, 64)
    refused(f"page_size {words}", PagedKV.allocate, table, 4, 2, size, 64)
    refused(f"num_heads {words}", PagedIndexKeys.allocate, table, 4, size, 16, 64)
    refused(f"max_batch {words}", DecodePlan, **decode_plan(max_batch=size))
    refused("max_seqlen_q must be from 0 to 2147483647", dense_attention, q, q, q, Sequences(max_seqlen_q=size))


def decode_plan(**changes):
    sizes = {"max_batch": 1, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_pages": 4}
    return sizes | {"dtype": torch.float32, "device": "cpu"} | changes


@pytest.mark.parametrize("impl", [torch.ones(3), ["cpu"], b"cpu"])
def test_names_that_are_no_words(impl):
    p = problem((5,), (40,))
    words = "impl must be 'auto' or one of | got"
    refused(words, dense_attention, p.q, p.k, p.v, impl=impl)
    refused(words, msa_attention, **path(p, impl=impl))
    refused(words, msa_attention, **path(p, q=p.q[:1], index_q=p.index_q[:1], impl=impl))
    refused(words, explain, dense_attention, p.q, p.k, p.v, impl=impl)


def test_a_cache_is_no_index_query():
    p = problem((5,), (40,))
    for cache in paged(p, 16):
        refused("index_q must be a torch.Tensor", msa_attention, **path(p, index_q=cache), error=TypeError)
