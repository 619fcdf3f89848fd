# SPDX-License-Identifier: MIT
"""Lists of readers that are counted are those that are sorted, number by number."""

import pytest
import torch

pytest.importorskip("triton")

from openmsa.primitives import triton_readers
from openmsa.primitives.readers import readers
from openmsa.sparse_attention import STAGE
from openmsa.testing.compare import assert_equal
from openmsa.testing.inputs import problem, random_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES = [  # lengths of queries, lengths of keys, offsets, selection heads, block_size, topk, item
    ((40, 9), (100, 20), None, 2, 16, 3, 4),
    ((70,), (70,), None, 1, 16, 5, 2),
    ((11, 0, 3, 1), (133, 0, 64, 1), (124, 0, -1, 0), 2, 64, 2, 3),
    ((1, 2, 33, 31, 0, 64), (17, 300, 33, 90, 16, 64), None, 2, 32, 7, 512),
    ((150,), (2100,), (-20,), 1, 16, 66, 8),
]


def equal(found, expected):
    """Compares lists with lists; entries after the last list may be anything."""
    used = int(expected.starts[-1])
    assert_equal("entries", found.entries[:used], expected.entries[:used])
    for name in ("starts", "item_starts", "extra_starts", "lists", "sequences", "reads"):
        x, y = getattr(found, name), getattr(expected, name)
        assert x.dtype == y.dtype
        assert_equal(name, x, y)


@pytest.mark.parametrize(("q_lens", "k_lens", "offsets", "heads", "block", "topk", "item"), CASES)
def test_counted_and_sorted_lists_are_equal(q_lens, k_lens, offsets, heads, block, topk, item, monkeypatch):
    monkeypatch.setattr(triton_readers, "STEP", 16)
    p = problem(q_lens, k_lens, kv_heads=2, group=1, head_dim=16, offsets=offsets).to(DEVICE)
    blocks = random_blocks(p.to("cpu"), topk, block, heads)
    blocks[blocks < 0] = torch.tensor([-1, 2**31 - 1, 2**26, -(2**31)], dtype=torch.int32).repeat(blocks.numel())[
        : int((blocks < 0).sum())
    ]
    blocks = blocks.to(DEVICE)
    wide = torch.full((*blocks.shape[:2], 2 * topk), 7, dtype=torch.int32, device=DEVICE)
    wide[..., ::2] = blocks
    seqs = STAGE.check(p.q, p.k, p.v, blocks[..., : min(topk, 64)].contiguous(), p.seqs, block_size=block).seqs
    expected = readers(blocks, seqs, sum(k_lens), block, item)
    for given in (blocks, wide[..., ::2]):
        equal(triton_readers.listed(given, seqs, sum(k_lens), block, item), expected)


def test_chunks_of_queries():
    p = problem((60, 21), (100, 90), kv_heads=1, group=1, head_dim=16).to(DEVICE)
    blocks = random_blocks(p.to("cpu"), 3, 16, 1).to(DEVICE)
    seqs = STAGE.check(p.q, p.k, p.v, blocks, p.seqs, block_size=16).seqs
    for start, stop in ((0, 33), (33, 66), (66, 81)):
        here = seqs.query_chunk(start, stop)
        found, expected = (make(blocks[start:stop], here, 190, 16, 4) for make in (triton_readers.listed, readers))
        equal(found, expected)


def test_nothing_to_list():
    p = problem((0,), (40,), kv_heads=1, group=1, head_dim=16).to(DEVICE)
    blocks = torch.zeros((0, 1, 3), dtype=torch.int32, device=DEVICE)
    seqs = STAGE.check(p.q, p.k, p.v, blocks, p.seqs, block_size=16).seqs
    assert triton_readers.listed(blocks, seqs, 40, 16, 4).starts.tolist() == [0] * 4


def test_a_call_of_too_many_words_is_sorted(monkeypatch):
    p = problem((33,), (33,), kv_heads=1, group=1, head_dim=16).to(DEVICE)
    blocks = random_blocks(p.to("cpu"), 2, 16, 1).to(DEVICE)
    seqs = STAGE.check(p.q, p.k, p.v, blocks, p.seqs, block_size=16).seqs
    monkeypatch.setattr(triton_readers, "MOST_WORDS", 5)
    monkeypatch.setattr(triton_readers, "launch_kernel", None)
    found = triton_readers.listed(blocks, seqs, 33, 16, 4)
    equal(found, readers(blocks, seqs, 33, 16, 4))
