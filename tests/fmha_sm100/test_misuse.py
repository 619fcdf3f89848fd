# SPDX-License-Identifier: MIT
"""`fmha_sm100` refuses wrong arguments always, and wrong values with ``check_input_valid=True``."""

import pytest
import torch

from fmha_sm100.api import _fmha_sm100, fmha_sm100, fmha_sm100_plan
from fmha_sm100.plan_rows import Plan
from tests.contract import DEVICES
from tests.fmha_sm100.batch import batch, lengths, pages, selection

TOTAL, HEADS = 47, 4
BLOCKS = torch.zeros(TOTAL, 2, 3, dtype=torch.int32)


def call(device="cpu", plan=None, change=None, **changes):
    """Makes a call over pages of 32 keys with whatever is to be wrong about it."""
    p = batch(dtype=torch.float32 if device == "cpu" else torch.bfloat16).to(device)
    k, v, _, table, _ = pages(p, 32)
    options = {"num_kv_heads": 2, "page_size": 32, "device": device} | (plan or {})
    planned = fmha_sm100_plan(*lengths(p), HEADS, **options)
    arguments = {"q": p.q, "k": k, "v": v, "plan_info": planned, "kv_indices": table} | changes
    if change is not None:
        change(arguments)
    return fmha_sm100(**arguments)


SPARSE = {"kv_block_num": 3, "split_prefill_decode": False}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"out": torch.zeros(1, 4, 32).expand(TOTAL, -1, -1)},
            ValueError,
            "out must not be expanded or overlap itself, as it is written to",
        ),
        ({"q": torch.zeros(TOTAL - 1, 4, 32)}, ValueError, r"q.shape\[0\] must be 47 \(the queries of the plan\)"),
        ({"q": torch.zeros(TOTAL, 8, 32)}, ValueError, r"q.shape\[1\] must be 4 \(num_qo_heads of the plan\)"),
        ({"q": torch.zeros(TOTAL, 4, 64)}, ValueError, r"k.shape\[-1\] must be 64"),
        ({"q": torch.zeros(TOTAL, 4, 32, dtype=torch.int32)}, TypeError, "q must have dtype"),
        ({"plan": {"num_kv_heads": 4}}, ValueError, r"k.shape\[1\] must be 4 \(num_kv_heads of the plan\)"),
        ({"v": None}, TypeError, "v must be a torch.Tensor"),
        ({"v": torch.zeros(3, 2, 32, 32)}, ValueError, "v must have the shape of k"),
        ({"plan_info": {}}, TypeError, "plan_info must be what fmha_sm100_plan returned, got dict"),
        ({"plan_info": (True, 1, 2, {}, None)}, ValueError, "returned, got a dict without batch_size, block_size, "),
        ({"plan_info": (True, 1, 2, {}, {})}, ValueError, "plan_info must be what fmha_sm100_plan returned"),
        ({"plan_info": (False, 0, 2, {}, None)}, ValueError, "plan_info must be what _fmha_sm100_plan returned"),
        ({"kv_indices": None}, ValueError, "kv_indices must be given with paged k and v"),
        ({"kv_indices": torch.zeros(9)}, TypeError, "kv_indices must be an int32 tensor, got torch.float32"),
        ({"kv_indices": torch.zeros(5, 9, dtype=torch.int32)}, ValueError, r"kv_indices must be flat or \[6, pages\]"),
        ({"plan": {"page_size": 64}}, ValueError, r"k.shape\[2\] must be the page_size of the plan \(64\), got 32"),
        ({"k": torch.zeros(9, 2, 32), "v": torch.zeros(9, 2, 32), "kv_indices": None}, ValueError, "plan has a page_size"),
        ({"out": torch.zeros(TOTAL, 4, 16)}, ValueError, r"out must have shape \(47, 4, 32\), got \(47, 4, 16\)"),
        ({"out": torch.zeros(TOTAL, 4, 32).half()}, TypeError, "out must have dtype torch.float32"),
        ({"lse": torch.zeros(TOTAL, 2)}, ValueError, r"lse must have shape \(47, 4\)"),
        ({"sm_scale": "1"}, TypeError, "sm_scale must be a float"),
        ({"q_scale": float("nan")}, ValueError, "q_scale must be finite"),
        ({"o_scale": float("inf")}, ValueError, "o_scale must be finite"),
        ({"k_scale": torch.ones(())}, TypeError, "k_scale must be a number"),
        ({"q_offset_override": 1.5}, TypeError, "q_offset_override must be an int"),
        ({"q_offset_override": torch.zeros(5, dtype=torch.int32)}, ValueError, "q_offset_override must have 6 entries"),
        ({"output_o": False}, ValueError, "output_o=False needs a plan with output_maxscore=True .* got max_k_tiles=-1"),
        ({"max_score": torch.zeros(4, 128, TOTAL)}, ValueError, "max_score needs a plan with output_maxscore=True"),
        ({"output_o": False, "output_maxscore": False}, ValueError, "output_o or output_maxscore must be True"),
        (
            {"plan": {"output_maxscore": True}, "max_score": torch.zeros(4, 9, TOTAL)},
            ValueError,
            r"max_score must have shape \(4, 128, 47\) or \(47, 4, 128\), got \(4, 9, 47\)",
        ),
        ({"plan": {"output_maxscore": True}, "max_score": torch.zeros(1).half()}, ValueError, "max_score must have shape"),
        ({"plan": SPARSE}, ValueError, "kv_block_indexes must be given: the plan has kv_block_num=3"),
        ({"plan": SPARSE, "kv_block_indexes": BLOCKS.long()}, TypeError, "kv_block_indexes must have dtype torch.int32"),
        ({"plan": SPARSE, "kv_block_indexes": BLOCKS[:5]}, ValueError, r"kv_block_indexes.shape\[0\] must be 47"),
        ({"plan": SPARSE, "kv_block_indexes": BLOCKS.expand(-1, 2, -1)[:, :0]}, ValueError, "must be num_kv_heads"),
        ({"plan": SPARSE, "kv_block_indexes": BLOCKS[..., :2]}, ValueError, r"kv_block_num of the plan \(3\), got 2"),
        ({"plan": SPARSE, "kv_block_indexes": BLOCKS, "output_o": False}, ValueError, "output_o must be True"),
        ({"unknown": 1}, TypeError, "unknown"),
        ({"output_o": "no"}, TypeError, r"output_o must be a bool, got str \('no'\)"),
        ({"check_input_valid": None}, TypeError, "check_input_valid must be a bool, got NoneType"),
    ],
)
def test_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        call(**arguments)


def write(name, index, value):
    """Writes into the plan, or into a copy of an argument."""

    def change(arguments):
        if name in arguments["plan_info"][3]:
            arguments["plan_info"][3][name][index] = value
        else:
            arguments[name] = arguments[name].clone()
            arguments[name][index] = value

    return change


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (write("kv_indices", 3, 10**6), r"kv_indices\[3\] must be a page from 0 to \d+, got 1000000"),
        (write("kv_indices", 0, -1), r"kv_indices\[0\] must be a page from 0"),
        (write("kv_segment_lens", 1, -4), "kv_segment_lens must lie from 0"),
        (write("kv_segment_lens", 5, 10**5), r"kv_page_indptr\[5\] must leave 3125 pages"),
        (write("kv_page_indptr", 1, -2), r"kv_page_indptr\[1\] must be at least 0, got -2"),
        (write("qo_segment_offsets", 1, 50), "qo_segment_offsets must rise from 0 to the rows of q"),
        (write("q", (2, 1, 3), float("nan")), r"q must hold no NaN, got NaN at \(2, 1, 3\)"),
        (write("kv_block_indexes", (4, 1, 0), 9), r"kv_block_indexes\[4, 1, 0\] must be -1 or a block .* got 9"),
        (write("kv_block_indexes", (4, 1, 0), -2), r"kv_block_indexes\[4, 1, 0\] must be -1 or a block .* got -2"),
        (write("kv_block_indexes", (4, 1, slice(2)), 1), r"kv_block_indexes\[4, 1\] must hold distinct blocks, got 1 twice"),
    ],
)
def test_values(device, change, words):
    arguments = {"plan": SPARSE, "kv_block_indexes": selection(batch(), 32).to(device), "check_input_valid": True}
    call(device, **arguments)
    with pytest.raises(ValueError, match=words):
        call(device, change=change, **arguments)


@pytest.mark.parametrize("kept", [0, 600])
def test_packed_keys_that_are_too_few(kept):
    p = batch()
    plan = fmha_sm100_plan(*lengths(p), HEADS)
    with pytest.raises(ValueError, match=r"kv_segment_lens\[\d\] must end before the next request"):
        fmha_sm100(p.q, p.k[:kept], p.v[:kept], plan)


@pytest.mark.parametrize("plan", [{}, SPARSE])
def test_pages_outside_the_pool(plan):
    blocks = selection(batch(), 32) if plan else None
    with pytest.raises(ValueError, match=r"kv_indices\[3\] must be a page from 0 to \d+, got 1000000"):
        call(plan=plan, kv_block_indexes=blocks, change=write("kv_indices", 3, 10**6))


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("kv_segment_lens", None, TypeError, r"plan_info\['kv_segment_lens'\] must be a torch.Tensor"),
        ("kv_segment_lens", torch.zeros(6), TypeError, r"plan_info\['kv_segment_lens'\] must have dtype torch.int32"),
        ("qo_offset", torch.zeros(7, dtype=torch.int32), ValueError, r"plan_info\['qo_offset'\].shape\[0\] must be 6"),
        ("qo_segment_offsets", torch.zeros(6, dtype=torch.int32), ValueError, r"shape\[0\] must be 7 \(6 rows of the plan\)"),
        ("kv_page_indptr", None, TypeError, r"plan_info\['kv_page_indptr'\] must be a torch.Tensor"),
        ("max_k_tiles", 1.5, TypeError, r"plan_info\['max_k_tiles'\] must be an int, got float"),
        ("page_size", "x", TypeError, r"plan_info\['page_size'\] must be an int, got str"),
        ("batch_size", True, TypeError, r"plan_info\['batch_size'\] must be an int, got bool"),
    ],
)
def test_entries_of_the_plan(name, value, error, words):
    with pytest.raises(error, match=words):
        call(change=lambda arguments: arguments["plan_info"][3].update({name: value}))


@pytest.mark.parametrize("name", sorted(Plan.__annotations__))
def test_entries_that_a_plan_lacks(name):
    with pytest.raises(ValueError, match=f"plan_info must be what _fmha_sm100_plan returned, got a dict without {name}"):
        call(change=lambda arguments: arguments["plan_info"][3].pop(name))


def test_dtypes_of_scores_alone():
    p = batch()
    plan = fmha_sm100_plan(*lengths(p), HEADS, output_maxscore=True)
    with pytest.raises(TypeError, match=r"k must have the dtype of q \(torch.float32\), got torch.float16"):
        fmha_sm100(p.q, p.k.half(), None, plan, output_o=False)


def test_values_of_packed_keys():
    p = batch()
    plan = fmha_sm100_plan(*lengths(p), HEADS, output_maxscore=True)
    fmha_sm100(p.q, p.k, p.v, plan, check_input_valid=True)
    plan[3]["kv_segment_lens"][1] += 1
    with pytest.raises(ValueError, match=r"kv_segment_lens\[1\] must end before the next request \(510\), got 511"):
        fmha_sm100(p.q, p.k, p.v, plan, check_input_valid=True)
    plan[3]["kv_segment_lens"][1] -= 1
    plan[3]["max_k_tiles"] = 2
    with pytest.raises(ValueError, match=r"kv_segment_lens\[0\] must be at most max_k_tiles \* block_size \(256\)"):
        fmha_sm100(p.q, p.k, p.v, plan, check_input_valid=True)


@pytest.mark.parametrize("mixed", [False, True])
def test_unknown_arguments_are_those_of_the_public_functions(mixed):
    """Python's own sentence, and the name of the function that was called."""
    lens, q = torch.tensor([1, 200 if mixed else 1], dtype=torch.int32), torch.zeros(201 if mixed else 2, 2, 32)
    with pytest.raises(TypeError, match=r"^fmha_sm100_plan\(\) got an unexpected keyword argument 'scale'$"):
        fmha_sm100_plan(lens, lens, 2, scale=1.0)
    planned = fmha_sm100_plan(lens, lens, 2)
    assert planned[0] == mixed
    with pytest.raises(TypeError, match=r"^fmha_sm100\(\) got an unexpected keyword argument 'softmax_scale'$"):
        fmha_sm100(q, q, q, planned, softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"^_fmha_sm100\(\) got an unexpected keyword argument 'softmax_scale'$"):
        _fmha_sm100(q, q, q, planned[3], softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"^_fmha_sm100\(\) missing 1 required positional argument: 'plan_info'$"):
        _fmha_sm100(q, q, q)
