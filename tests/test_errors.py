# SPDX-License-Identifier: MIT
"""Bad arguments of public functions raise an error that names the argument, the rule and the value, and change no cache."""

import functools
import math

import pytest
import torch

from openmsa import (
    Sequences,
    block_scores,
    dense_attention,
    explain,
    msa_attention,
    select_blocks,
    select_blocks_from_scores,
    sparse_attention,
)
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import paged, problem, random_blocks
from tests.contract import DEVICES

NAN = math.nan
devices = pytest.mark.parametrize("device", DEVICES)


def good(device="cpu"):
    """Returns good arguments by name: two sequences, 4 query heads, 2 KV heads, blocks of 16."""
    p = problem((5, 3), (40, 33)).to(device)
    scores, blocks = torch.zeros(2, 8, 3, device=device), random_blocks(p, 3, 16, 2)
    names = {name: getattr(p, name) for name in ("q", "k", "v", "index_q", "index_k", "seqs")}
    return names | {"topk": 3, "block_size": 16, "scores": scores, "blocks": blocks}


TAKES = {
    block_scores: ("index_q", "index_k", "seqs", "block_size"),
    select_blocks: ("index_q", "index_k", "topk", "seqs", "block_size"),
    select_blocks_from_scores: ("scores", "topk", "seqs", "block_size"),
    sparse_attention: ("q", "k", "v", "blocks", "seqs", "block_size"),
    dense_attention: ("q", "k", "v", "seqs", "block_size"),
    msa_attention: ("q", "k", "v", "index_q", "index_k", "topk", "seqs", "block_size"),
}
INDEX = (block_scores, select_blocks, msa_attention)
MAIN = (sparse_attention, dense_attention, msa_attention)
COUNTS = (select_blocks, select_blocks_from_scores, msa_attention)


def lengths(q=(0, 5, 8), k=(0, 40, 73), **fields):
    return Sequences(torch.tensor(q, dtype=torch.int32), torch.tensor(k, dtype=torch.int32), **fields)


def at(x, where, value):
    """Returns a copy with one element changed."""
    x = x.clone()
    x[where] = value
    return x


# Functions, changed argument(s) as a function of the good ones, the error and the words that its message must hold.
BAD = {
    "q rank": (MAIN, lambda g: {"q": g["q"][0]}, ValueError, "q must have shape [total_q, num_q_heads, head_dim] | (4, 64)"),
    "k rank": (MAIN, lambda g: {"k": g["k"][None]}, ValueError, "k must have shape [total_k, | (1, 73, 2, 64)"),
    "v rank": (MAIN, lambda g: {"v": g["v"][:, 0]}, ValueError, "v must have shape [total_k, | (73, 64)"),
    "q type": (MAIN, lambda g: {"q": [1.0]}, TypeError, "q must be a torch.Tensor | list"),
    "v missing": (MAIN, lambda g: {"v": None}, TypeError, "v must be a torch.Tensor | NoneType"),
    "q integers": (MAIN, lambda g: {"q": g["q"].int()}, TypeError, "q must have dtype | int32"),
    "q complex": (MAIN, lambda g: {"q": g["q"].cfloat()}, TypeError, "q must have dtype | complex64"),
    "k dtype": (MAIN, lambda g: {"k": g["k"].half()}, TypeError, "k must have the dtype of q | float32 | float16"),
    "v dtype": (MAIN, lambda g: {"v": g["v"].double()}, TypeError, "v must have the dtype of q | float32 | float64"),
    "k device": (MAIN, lambda g: {"k": g["k"].to("meta")}, ValueError, "k must be on the device of q | meta"),
    "v device": (MAIN, lambda g: {"v": g["v"].to("meta")}, ValueError, "v must be on the device of q | meta"),
    "k head dim": (MAIN, lambda g: {"k": g["k"][..., :48]}, ValueError, "k.shape[2] must be 64 | got 48"),
    "v head dim": (MAIN, lambda g: {"v": g["v"][..., :48]}, ValueError, "v.shape[2] must be 64 | got 48"),
    "v tokens": (MAIN, lambda g: {"v": g["v"][1:]}, ValueError, "v.shape[0] must be 73 | got 72"),
    "v heads": (MAIN, lambda g: {"v": g["v"][:, :1]}, ValueError, "v.shape[1] must be 2 | got 1"),
    "heads do not divide": (
        MAIN,
        lambda g: {"q": g["q"][:, :3]},
        ValueError,
        "num_kv_heads must divide num_q_heads (3) | got 2",
    ),
    "more KV heads": (MAIN, lambda g: {"q": g["q"][:, :1]}, ValueError, "num_kv_heads must divide num_q_heads (1) | got 2"),
    "no KV heads": (
        MAIN,
        lambda g: {"k": g["k"][:, :0], "v": g["v"][:, :0]},
        ValueError,
        "num_kv_heads must divide num_q_heads (4) | got 0",
    ),
    "no query heads": (MAIN, lambda g: {"q": g["q"][:, :0]}, ValueError, "num_q_heads must be at least 1 | got 0"),
    "q nested": (
        MAIN,
        lambda g: {"q": torch.nested.nested_tensor(list(g["q"]))},
        TypeError,
        "q must be a dense tensor | nested",
    ),
    "q sparse": (MAIN, lambda g: {"q": g["q"].to_sparse()}, TypeError, "q must be a dense tensor | torch.sparse_coo"),
    "head dim 24": (
        MAIN,
        lambda g: {name: g[name][..., :24] for name in "qkv"},
        ValueError,
        "head_dim must be a multiple of 16 | got 24",
    ),
    "head dim 272": (
        MAIN,
        lambda g: {name: torch.zeros(*g[name].shape[:2], 272) for name in "qkv"},
        ValueError,
        "head_dim must be a multiple of 16 from 16 to 256 | got 272",
    ),
    "scale NaN": (MAIN, lambda g: {"softmax_scale": NAN}, ValueError, "softmax_scale must be finite | nan"),
    "scale infinite": (MAIN, lambda g: {"softmax_scale": -math.inf}, ValueError, "softmax_scale must be finite | -inf"),
    "scale past float32": (
        MAIN,
        lambda g: {"softmax_scale": -1e39},
        ValueError,
        "softmax_scale must be finite in float32 | -1e+39",
    ),
    "scale past float64": (
        MAIN,
        lambda g: {"softmax_scale": 10**400},
        ValueError,
        "softmax_scale must be finite in float32 | 1000000",
    ),
    "scale bool": (MAIN, lambda g: {"softmax_scale": True}, TypeError, "softmax_scale must be a float | bool"),
    "scale tensor": (MAIN, lambda g: {"softmax_scale": torch.ones(())}, TypeError, "softmax_scale must be a float | Tensor"),
    "NaN in q": (
        MAIN,
        lambda g: {"q": at(g["q"], (7, 3, 5), NAN), "check": True},
        ValueError,
        "q must hold no NaN | (7, 3, 5)",
    ),
    "NaN in k": (
        MAIN,
        lambda g: {"k": at(g["k"], (1, 0, 2), NAN), "check": True},
        ValueError,
        "k must hold no NaN | (1, 0, 2)",
    ),
    "NaN in v": (
        MAIN,
        lambda g: {"v": at(g["v"], (9, 1, 0), NAN), "check": True},
        ValueError,
        "v must hold no NaN | (9, 1, 0)",
    ),
    "index_q rank": (INDEX, lambda g: {"index_q": g["index_q"][0]}, ValueError, "index_q must have shape [total_q, | (2, 64)"),
    "index_k rank": (
        INDEX,
        lambda g: {"index_k": g["index_k"][:, 0]},
        ValueError,
        "index_k must have shape [total_k, | (73, 64)",
    ),
    "index_k type": (INDEX, lambda g: {"index_k": None}, TypeError, "index_k must be a torch.Tensor | NoneType"),
    "index_q integers": (INDEX, lambda g: {"index_q": g["index_q"].long()}, TypeError, "index_q must have dtype | int64"),
    "index_k dtype": (
        INDEX,
        lambda g: {"index_k": g["index_k"].half()},
        TypeError,
        "index_k must have the dtype of index_q | float32 | float16",
    ),
    "index_k device": (
        INDEX,
        lambda g: {"index_k": g["index_k"].to("meta")},
        ValueError,
        "index_k must be on the device of | meta",
    ),
    "index_k dim": (INDEX, lambda g: {"index_k": g["index_k"][..., :32]}, ValueError, "index_k.shape[2] must be 64 | got 32"),
    "index heads do not divide": (
        INDEX,
        lambda g: {"index_k": g["index_k"].repeat(1, 3, 1)},
        ValueError,
        "index_key_heads must divide index_heads (2) | got 3",
    ),
    "no index heads": (
        INDEX,
        lambda g: {"index_q": g["index_q"][:, :0]},
        ValueError,
        "index_heads must be at least 1 | got 0",
    ),
    "index dim 8": (
        INDEX,
        lambda g: {name: g[name][..., :8] for name in ("index_q", "index_k")},
        ValueError,
        "index_dim must be a multiple of 16 | got 8",
    ),
    "NaN in index_q": (
        INDEX,
        lambda g: {"index_q": at(g["index_q"], (7, 1, 5), NAN), "check": True},
        ValueError,
        "index_q must hold no NaN | (7, 1, 5)",
    ),
    "NaN in index_k": (
        INDEX,
        lambda g: {"index_k": at(g["index_k"], (72, 0, 0), NAN), "check": True},
        ValueError,
        "index_k must hold no NaN | (72, 0, 0)",
    ),
    "topk 0": (COUNTS, lambda g: {"topk": 0}, ValueError, "topk must be from 1 to 64 | got 0"),
    "topk 65": (COUNTS, lambda g: {"topk": 65}, ValueError, "topk must be from 1 to 64 | got 65"),
    "topk bool": (COUNTS, lambda g: {"topk": True}, TypeError, "topk must be an int | bool"),
    "topk float": (COUNTS, lambda g: {"topk": 3.0}, TypeError, "topk must be an int | 3.0"),
    "init -1": (COUNTS, lambda g: {"init_blocks": -1}, ValueError, "init_blocks must be at least 0 | got -1"),
    "local -1": (COUNTS, lambda g: {"local_blocks": -1}, ValueError, "local_blocks must be at least 0 | got -1"),
    "local bool": (COUNTS, lambda g: {"local_blocks": True}, TypeError, "local_blocks must be an int | bool"),
    "too many forced": (
        COUNTS,
        lambda g: {"init_blocks": 2, "local_blocks": 2},
        ValueError,
        "init_blocks + local_blocks must be at most topk (3) | 2 + 2",
    ),
    "block size 15": (TAKES, lambda g: {"block_size": 15}, ValueError, "block_size must be from 16 to 256 | got 15"),
    "block size 257": (TAKES, lambda g: {"block_size": 257}, ValueError, "block_size must be from 16 to 256 | got 257"),
    "block size bool": (TAKES, lambda g: {"block_size": True}, TypeError, "block_size must be an int | bool"),
    "seqs type": (TAKES, lambda g: {"seqs": [5, 3]}, TypeError, "seqs must be an openmsa.Sequences | list"),
    "queries not covered": (
        TAKES,
        lambda g: {"seqs": lengths(q=(0, 5, 7))},
        ValueError,
        "seqs.cu_seqlens_q must end at | (8), got 7",
    ),
    "decreasing": (
        TAKES,
        lambda g: {"seqs": lengths(q=(0, 9, 8))},
        ValueError,
        "seqs.cu_seqlens_q must not decrease, got 9 then 8",
    ),
    "small maximum": (
        TAKES,
        lambda g: {"seqs": lengths(max_seqlen_k=39)},
        ValueError,
        "seqs.max_seqlen_k must be at least | (40), got 39",
    ),
    "keys not covered": (
        (*INDEX, *MAIN),
        lambda g: {"seqs": lengths(k=(0, 40, 72))},
        ValueError,
        "seqs.cu_seqlens_k must end at the number of keys (73), got 72",
    ),
    "batches differ": (
        TAKES,
        lambda g: {"seqs": lengths(k=(0, 73))},
        ValueError,
        "seqs.cu_seqlens_k must describe as many | (2; | got 1",
    ),
    "blocks rank": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"][0]},
        ValueError,
        "blocks must have shape [total_q, | (2, 3)",
    ),
    "blocks dtype": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"].long()},
        TypeError,
        "blocks must have dtype torch.int32 | int64",
    ),
    "blocks device": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"].to("meta")},
        ValueError,
        "blocks must be on the device of q | meta",
    ),
    "blocks rows": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"][1:]},
        ValueError,
        "blocks.shape[0] must be 8 | got 7",
    ),
    "blocks heads": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"].repeat(1, 2, 1)},
        ValueError,
        "blocks.shape[1] must be num_kv_heads (2) or 1 | got 4",
    ),
    "blocks topk 0": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"][..., :0]},
        ValueError,
        "blocks.shape[2] (topk) must be from 1 to 64 | 0",
    ),
    "blocks topk 65": (
        (sparse_attention,),
        lambda g: {"blocks": g["blocks"].repeat(1, 1, 22)[..., :65]},
        ValueError,
        "blocks.shape[2] (topk) must be from 1 to 64 | 65",
    ),
    "block id 3": (
        (sparse_attention,),
        lambda g: {"blocks": at(g["blocks"], (4, 1, 2), 3), "check": True},
        ValueError,
        "blocks must lie from -1 to 2 | got 3 at (4, 1, 2)",
    ),
    "block id -2": (
        (sparse_attention,),
        lambda g: {"blocks": at(g["blocks"], (4, 1, 2), -2), "check": True},
        ValueError,
        "blocks must lie from -1 to 2 | got -2 at (4, 1, 2)",
    ),
    "block id twice": (
        (sparse_attention,),
        lambda g: {"blocks": at(torch.full_like(g["blocks"], -1), (5, 0), torch.tensor([1, -1, 1]).int()), "check": True},
        ValueError,
        "blocks must hold distinct ids | got 1 twice at row 5, head 0",
    ),
    "no result": (
        (dense_attention,),
        lambda g: {"return_out": False},
        ValueError,
        "return_out, return_lse or return_max_score must be True",
    ),
    "scores rank": (
        (select_blocks_from_scores,),
        lambda g: {"scores": g["scores"][0]},
        ValueError,
        "scores must have shape | (8, 3)",
    ),
    "scores dtype": (
        (select_blocks_from_scores,),
        lambda g: {"scores": g["scores"].int()},
        TypeError,
        "scores must have dtype | int32",
    ),
    "too few scores": (
        (select_blocks_from_scores,),
        lambda g: {"scores": g["scores"][..., :2]},
        ValueError,
        "scores.shape[2] must cover the longest sequence (3 blocks), got 2",
    ),
    "visible blocks and seqs": (
        (select_blocks_from_scores,),
        lambda g: {"visible_blocks": torch.ones(8, dtype=torch.int32)},
        ValueError,
        "seqs must be None when visible_blocks is given",
    ),
    "visible blocks rows": (
        (select_blocks_from_scores,),
        lambda g: {"visible_blocks": torch.ones(7, dtype=torch.int32), "seqs": None},
        ValueError,
        "visible_blocks.shape[0] must be 8 | got 7",
    ),
    "visible blocks dtype": (
        (select_blocks_from_scores,),
        lambda g: {"visible_blocks": torch.ones(8), "seqs": None},
        TypeError,
        "visible_blocks must have dtype torch.int32 | float32",
    ),
    "chunk 0": ((msa_attention,), lambda g: {"query_chunk": 0}, ValueError, "query_chunk must be at least 1 | got 0"),
    "chunk bool": ((msa_attention,), lambda g: {"query_chunk": True}, TypeError, "query_chunk must be an int | bool"),
    "index heads and KV heads": (
        (msa_attention,),
        lambda g: {"index_q": g["index_q"].repeat(1, 2, 1)},
        ValueError,
        "index_q.shape[1] must be num_kv_heads (2) or 1 | got 4",
    ),
    "index branch on another device": (
        (msa_attention,),
        lambda g: {"index_q": g["index_q"].to("meta"), "index_k": g["index_k"].to("meta")},
        ValueError,
        "device | meta",
    ),
    "tokens of the branches differ": (
        (msa_attention,),
        lambda g: {"index_q": g["index_q"][1:], "index_k": g["index_k"][1:], "seqs": None},
        ValueError,
        "index_q.shape[0] must be 8 | got 7",
    ),
    "keys of the branches differ": (
        (msa_attention,),
        lambda g: {"index_k": g["index_k"][1:], "seqs": None},
        ValueError,
        "index_k.shape[0] must be 73 | got 72",
    ),
}
CASES = [pytest.param(function, case, id=f"{function.__name__}-{case}") for case in BAD for function in BAD[case][0]]


def assert_refused(function, arguments, error, words):
    """The call must raise exactly this kind of error, and every piece of `words` must stand in its message."""
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        function(**arguments)
    assert caught.type is error, caught.value
    for piece in words.split(" | "):
        assert piece in str(caught.value)


@pytest.mark.parametrize(("function", "case"), CASES)
def test_bad_arguments(function, case):
    _, change, error, words = BAD[case]
    g = good()
    arguments = {name: g[name] for name in TAKES[function]}
    function(**arguments)  # good before the change
    assert_refused(function, arguments | change(g), error, words)


FLAGS = {
    block_scores: ("check",),
    select_blocks: ("certified", "check"),
    sparse_attention: ("return_lse", "check"),
    dense_attention: ("causal", "return_out", "return_lse", "return_max_score", "check"),
    msa_attention: ("certified", "return_lse", "check"),
}


@pytest.mark.parametrize("value", [1, 0, None, "no", torch.tensor(True)], ids=str)
@pytest.mark.parametrize("function", FLAGS, ids=lambda f: f.__name__)
def test_flags_are_true_or_false(function, value):
    """What merely counts as true is refused, such as the string "no"."""
    g = good()
    arguments = {name: g[name] for name in TAKES[function]}
    for flag in FLAGS[function]:
        for call in (function, functools.partial(explain, function)):
            assert_refused(call, arguments | {flag: value}, TypeError, f"{flag} must be True or False | {type(value).__name__}")


# Changes to the caches of the same problem: what is wrong with them shows when they are used.
BAD_CACHES = {
    "page past the pool": (
        lambda c: c.page_table[1].fill_(99),
        "page_table[1, 0] must be a page from 0 to | got 99",
    ),
    "page not assigned": (
        lambda c: c.page_table[0, 2:].fill_(-1),
        "page_table[0, 2] must be a page from 0 to | got -1",
    ),
    "too long": (lambda c: c.seq_lens.fill_(500), "seq_lens must lie from 0 to | got 500"),
    "negative length": (lambda c: c.seq_lens.fill_(-1), "seq_lens must lie from 0 to | got -1"),
}


@devices
@pytest.mark.parametrize("case", BAD_CACHES)
@pytest.mark.parametrize("function", [*INDEX, sparse_attention, dense_attention], ids=lambda f: f.__name__)
def test_bad_caches(device, function, case):
    """Bad caches are refused and stay as they are, on a GPU too when the caller asks for a check."""
    change, words = BAD_CACHES[case]
    g, p = good(device), problem((5, 3), (40, 33)).to(device)
    kv, index_keys = paged(p, 16)
    seqs = Sequences(g["seqs"].cu_seqlens_q)
    arguments = {name: g[name] for name in TAKES[function]} | {"seqs": seqs, "check": device != "cpu"}
    caches = {"k": kv, "v": None, "index_k": index_keys}
    arguments |= {name: cache for name, cache in caches.items() if name in arguments}
    if "index_k" in arguments:
        change(index_keys)
    else:
        change(kv)
    before = [x.clone() for x in (*vars(kv).values(), *vars(index_keys).values())]
    assert_refused(function, arguments, ValueError, words)
    for now, then in zip((*vars(kv).values(), *vars(index_keys).values()), before, strict=True):
        assert_equal("cache", now, then)


def cached(device="cpu"):
    p = problem((5, 3), (40, 33)).to(device)
    return p, *paged(p, 16), random_blocks(p, 3, 16, 2)


def test_caches_and_arguments_agree():
    p, kv, index_keys, blocks = cached()
    main = {"q": p.q, "k": kv, "v": None, "seqs": p.seqs}
    assert_refused(dense_attention, main | {"v": p.v}, ValueError, "v must be None when k is a PagedKV")
    assert_refused(dense_attention, main | {"q": p.q.half()}, TypeError, "k.k must have the dtype of q | float16 | float32")
    assert_refused(dense_attention, main | {"q": p.q[..., :32]}, ValueError, "k.k.shape[3] must be 32 | got 64")
    assert_refused(dense_attention, main | {"q": p.q[:, :3]}, ValueError, "num_kv_heads must divide num_q_heads (3) | got 2")
    one = {"seqs": None, "blocks": blocks}
    assert_refused(sparse_attention, main | one, ValueError, "seq_lens must describe as many sequences | got 2")
    longer = lengths(k=(0, 41, 74))
    assert_refused(
        dense_attention, main | {"seqs": longer}, ValueError, "seqs.cu_seqlens_k must not ask for more keys | (40 | got 41"
    )
    assert_refused(dense_attention, main | {"k": index_keys}, TypeError, "k must be | PagedIndexKeys")
    index = {"index_q": p.index_q, "index_k": index_keys, "seqs": p.seqs}
    assert_refused(
        block_scores, index | {"index_q": p.index_q.half()}, TypeError, "index_k.keys must have the dtype of index_q"
    )
    assert_refused(
        block_scores, index | {"index_q": p.index_q[..., :32]}, ValueError, "index_k.keys.shape[3] must be 32 | got 64"
    )
    assert_refused(block_scores, index | {"index_k": kv}, TypeError, "index_k must be | PagedKV")
    both = {"q": p.q, "k": kv, "v": None, "index_q": p.index_q, "index_k": index_keys}
    index_keys.seq_lens[0] -= 1
    assert_refused(msa_attention, both | {"seqs": Sequences(p.seqs.cu_seqlens_q)}, ValueError, "index_k | seq_lens | 39")


def test_checks_read_only_the_keys_that_exist():
    """check=True takes a cache with NaN in slots that no sequence uses: they hold no key."""
    p, kv, index_keys, blocks = cached()
    options = {"block_size": 16, "check": True}
    block_scores(p.index_q, index_keys, p.seqs, **options)
    sparse_attention(p.q, kv, None, blocks, p.seqs, **options)
    dense_attention(p.q, kv, None, p.seqs, **options)
    msa_attention(p.q, kv, None, p.index_q, index_keys, 3, p.seqs, **options)
    page = int(kv.page_table[1, 2])  # key 32 of sequence 1
    kv.v[page, 0, 0, 7] = NAN
    index_keys.keys[page, 0, 0, 7] = NAN
    for function, arguments in (
        (dense_attention, {"q": p.q, "k": kv, "v": None}),
        (sparse_attention, {"q": p.q, "k": kv, "v": None, "blocks": blocks}),
        (select_blocks, {"index_q": p.index_q, "index_k": index_keys}),
    ):
        assert_refused(function, arguments | {"seqs": p.seqs, "check": True, "block_size": 16}, ValueError, "must hold no NaN")


@devices
@pytest.mark.parametrize("function", TAKES, ids=lambda f: f.__name__)
def test_good_arguments_pass_every_check(device, function):
    g = good(device)
    arguments = {name: g[name] for name in TAKES[function]}
    if function is not select_blocks_from_scores:
        arguments["check"] = True
    function(**arguments, impl="reference")
