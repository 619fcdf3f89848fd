# SPDX-License-Identifier: MIT

"""A decode layer of a small batch in one launch: scoring, selection, attention and merge.

Three kinds of programs, in the order of their tickets (see `openmsa.decode.triton_words`). Scoring: a share of one sequence's
blocks for one index key head and all its rows. Attention: one token, KV head and split; while the scores are made it loads its
queries, then selects for itself (every program of a row finds the same blocks) and reads its tiles of them. Merge: one token
and query head, or half of its columns. Latency bounds it: a launch costs more than what is computed, and so does a flag behind
a fence.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from openmsa.decode.triton_scoring import fetch_share, pages_ahead, score_share
from openmsa.decode.triton_select import LANES, chosen_ids, load_words, no_words, select
from openmsa.decode.triton_words import absent, any_of, arrived, draw, look, put, put_pairs, value_of
from openmsa.sparse_attention.triton_decode_tiles import first_keys, store_rows, walk

EVERY, SCORE, ATTEND, MERGE = (tl.constexpr(i) for i in range(4))  # kinds of programs in a launch


@triton.jit
def attend_share(
    i, q, k, v, table, seq_lens, index_lens, words, part, part_lse, tag, blocks, out, lse, scale, queries, num_blocks,
    num_pages, capacity, index_capacity, tiles, stride_qt, stride_qh, stride_qd, stride_kp, stride_kh, stride_kn, stride_kd,
    stride_vp, stride_vh, stride_vn,
    stride_vd,
    stride_tb, stride_tp, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    INIT: tl.constexpr, LOCAL: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PAGES_PAD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, REPS: tl.constexpr,
    STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Partial words of one split, [tokens, q heads, SPLITS, D], or the output itself when there is one split."""
    ROW_TILES: tl.constexpr = (G + BM - 1) // BM
    PER: tl.constexpr = BLOCK // BN
    i_s, i_p = i % SPLITS, i // SPLITS
    i_t, i_h = i_p // (HEADS * ROW_TILES), i_p // ROW_TILES % HEADS
    i_b = i_t // queries
    o_r = (i_p % ROW_TILES) * BM + tl.arange(0, BM)  # head in the group
    m_r = o_r < G
    o_d = tl.arange(0, BD)
    p_q = q + i_t.to(tl.int64) * stride_qt + (i_h * G + o_r[:, None]) * stride_qh + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_r[:, None] & (o_d[None, :] < D), other=0.0)  # [BM, BD]
    # Both caches hold as many keys. Did they not, no program may wait for words that none writes: the fewer count.
    length = tl.minimum(tl.load(seq_lens + i_b), tl.minimum(tl.load(index_lens + i_b), index_capacity))
    n_k = tl.minimum(tl.minimum(length, capacity), length - queries + i_t % queries + 1)  # keys that the query sees
    n_blocks = tl.maximum(n_k + BLOCK - 1, 0) // BLOCK

    i_row = i_t * INDEX_HEADS + (i_h if INDEX_HEADS > 1 else 0)
    p_w = words + i_row.to(tl.int64) * num_blocks
    low, high = tl.minimum(n_blocks, INIT), tl.maximum(n_blocks - LOCAL, tl.minimum(n_blocks, INIT))
    p_table = table + i_b.to(tl.int64) * stride_tb
    o_p = tl.arange(0, PAGES_PAD)
    b_table = tl.load(p_table + o_p * stride_tp, mask=o_p * PAGE < capacity, other=-1)
    # The whole row, so that pages of selected blocks then come from the L1 cache; a bound as good as num_pages is its use.
    end_page = tl.max(tl.where(b_table < num_pages, b_table, -1), 0) + 1
    b_q = arrived(b_q, WAIT)
    if WAIT and REPS > 1:  # one word a lane, about the last to come: programs that ask for all at a time crowd the L2 cache
        o_b = tl.maximum(high - LANES, low) + tl.arange(0, LANES)
        missing = True
        while missing:
            missing = any_of(absent(look(p_w + tl.minimum(o_b, num_blocks - 1), WAIT), tag, o_b < high))
    b_words, missing = no_words(REPS), True
    while missing:
        b_words, missing = load_words(p_w, tag, low, high, num_blocks, REPS, WAIT)
    b_rows = select(b_words, n_blocks, REPS, TOPK, INIT, LOCAL)
    b_u = i_s * TILES + tl.arange(0, TILES)
    b_id = tl.where(b_u < TOPK * PER, chosen_ids(b_rows, b_u // PER, REPS), -1)
    b_first, b_page = first_keys(b_u, b_id, p_table, stride_tp, n_k, n_blocks, end_page, BLOCK, PAGE, BN)
    b_acc, b_m, b_z = walk(
        b_q, k + i_h.to(tl.int64) * stride_kh, v + i_h.to(tl.int64) * stride_vh, b_first, b_page, blocks, 1, p_table, stride_tp,
        i_s, tiles, 0, n_k, n_blocks, num_pages, scale, stride_kp, stride_kn, stride_kd, stride_vp, stride_vn, stride_vd,
        D, TOPK, BLOCK, PAGE, BM, BN, BD, TILES, False, STAGES,
    )  # fmt: skip
    if SPLITS == 1:
        out += i_t.to(tl.int64) * stride_ot + i_h * G * stride_oh
        lse += i_t.to(tl.int64) * stride_lt + i_h * G * stride_lh
        store_rows(out, lse, b_acc, b_m, b_z, o_r, o_d, m_r, stride_oh, stride_od, stride_lh, D)
    else:
        o_p = ((i_t * HEADS + i_h) * G + o_r) * SPLITS + i_s
        b_part = b_acc / tl.where(b_z == 0, 1.0, b_z)[:, None]
        o_c = tl.arange(0, BD // 2) * 2  # D is even
        p_part = part + o_p[:, None].to(tl.int64) * D + o_c[None, :]
        b_even, b_odd = tl.split(b_part.reshape(BM, BD // 2, 2))
        put_pairs(p_part, b_even, b_odd, tag, m_r[:, None] & (o_c < D)[None, :], WAIT)
        put(part_lse + o_p, b_m + tl.log2(b_z), tag, m_r, WAIT)
    if (i_s == 0) & (i_h < INDEX_HEADS) & (i_p % ROW_TILES == 0):  # last: nothing waits for it
        o_k = tl.arange(0, TOPK_PAD)
        tl.store(blocks + i_row.to(tl.int64) * TOPK + o_k, chosen_ids(b_rows, o_k, REPS), mask=o_k < TOPK)


@triton.jit
def merge_share(
    i, part, part_lse, tag, out, lse, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
    MERGE_PARTS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One of MERGE_PARTS parts of the output of a token and query head."""
    i_part, i = i % MERGE_PARTS, i // MERGE_PARTS
    o_s, o_d = tl.arange(0, SPLITS_PAD), i_part * (BD // MERGE_PARTS) + tl.arange(0, BD // MERGE_PARTS)
    m_s = o_s < SPLITS
    m_sd = m_s[:, None] & (o_d < D)[None, :]
    p_lse = part_lse + i * SPLITS + tl.minimum(o_s, SPLITS - 1)
    p_part = part + i.to(tl.int64) * (SPLITS * D) + (o_s[:, None] * D + o_d[None, :])
    b_heads = look(p_lse, WAIT)
    if WAIT:
        while any_of(absent(b_heads, tag, m_s)):
            b_heads = look(p_lse, WAIT)
    b_words = tl.load(p_part, mask=m_sd, other=0, volatile=True)  # [SPLITS_PAD, BD // MERGE_PARTS]
    b_lse = value_of(b_heads, m_s)  # what needs no partials is computed while they are on their way
    b_m = tl.max(b_lse, 0)
    b_w = tl.exp2(b_lse - tl.where(b_m == float("-inf"), 0.0, b_m))
    b_z = tl.sum(b_w, 0)
    if WAIT:
        while any_of(absent(b_words, tag, m_sd)):
            b_words = tl.load(p_part, mask=m_sd, other=0, volatile=True)
    b_part = tl.where(m_sd, b_words.to(tl.int32).to(tl.float32, bitcast=True), 0.0)
    b_out = tl.sum(b_part * b_w[:, None], 0) / tl.where(b_z == 0, 1.0, b_z)
    i_t, i_h = (i // HEADS).to(tl.int64), i % HEADS
    tl.store(out + i_t * stride_ot + i_h * stride_oh + o_d * stride_od, b_out.to(out.dtype.element_ty), mask=o_d < D)
    tl.store(lse + i_t * stride_lt + i_h * stride_lh, (b_m + tl.log2(b_z)) * 0.6931471805599453, mask=i_part == 0)


RUNTIME_NUMBERS = [
    "queries", "num_blocks", "index_pages", "index_capacity", "num_pages", "capacity", "score_splits", "score_tiles", "tiles",
    "scoring", "attending", "programs",
]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME_NUMBERS)
def layer_kernel(
    index_q, index_keys, key_pool, index_table, index_lens, q, k, v, table, seq_lens, words, part, part_lse, counter, blocks,
    out, lse, scale,
    queries, num_blocks, index_pages, index_capacity, num_pages, capacity, score_splits, score_tiles, tiles,
    scoring, attending, programs,
    stride_iqt, stride_iqh, stride_iqd, stride_ip, stride_ih, stride_in, stride_id, stride_itb, stride_qt, stride_qh, stride_qd,
    stride_kp, stride_kh, stride_kn, stride_kd, stride_vp, stride_vh, stride_vn, stride_vd, stride_tb, stride_tp,
    stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
    INDEX_HEADS: tl.constexpr, INDEX_KEY_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
    INDEX_PAGE: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, SUB: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr,
    TMA: tl.constexpr, SCORE_STAGES: tl.constexpr,
    HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, INIT: tl.constexpr,
    LOCAL: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PAGES_PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, REPS: tl.constexpr,
    MERGE_PARTS: tl.constexpr, STAGES: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    """Grid (programs). index_keys: key_pool, or its descriptor for the copy engine. KIND: EVERY, or the one kind of programs
    that this launch is, which then waits for nothing. FETCH: `fetch_share` before waiting for the kernel in front."""
    WAIT: tl.constexpr = KIND == 0
    if WAIT:
        if FETCH:  # by place in the grid, which is known before the ticket: every share is fetched by some program
            ahead = tl.program_id(0)
            pages = pages_ahead(
                ahead, index_table, index_capacity, scoring, score_splits, score_tiles, stride_itb,
                INDEX_KEY_HEADS, INDEX_PAGE, BLOCK, KEYS, SUB, PARTS, SHARE,
            )  # fmt: skip
        i, tag = draw(counter, programs)
        if PDL:  # tickets are drawn before the next launch may start, and nothing is read before the last one has ended
            gdc_launch_dependents()
            if FETCH and ahead < scoring:
                fetch_share(
                    ahead, pages, key_pool, index_pages, score_splits, score_tiles, stride_ip, stride_ih, stride_in,
                    INDEX_KEY_HEADS, DIM, INDEX_PAGE, BLOCK, TILE, KEYS, SUB, PARTS, SHARE,
                )  # fmt: skip
            gdc_wait()
    else:
        i, tag = tl.program_id(0) + (scoring if KIND > 1 else 0) + (attending if KIND > 2 else 0), tl.full([], 1, tl.int32)
    if i < scoring:
        score_share(
            i, index_q, index_keys, index_table, index_lens, words, tag, queries, num_blocks, index_pages, index_capacity,
            score_splits, score_tiles, stride_iqt, stride_iqh, stride_iqd, stride_ip, stride_ih, stride_in, stride_id,
            stride_itb,
            INDEX_HEADS, INDEX_KEY_HEADS, DIM, DIM_PAD, INDEX_PAGE, BLOCK, TILE, KEYS, SUB, PARTS, ROWS, SHARE, TMA,
            SCORE_STAGES, WAIT,
        )  # fmt: skip
    elif i < scoring + attending:
        attend_share(
            i - scoring, q, k, v, table, seq_lens, index_lens, words, part, part_lse, tag, blocks, out, lse, scale, queries,
            num_blocks, num_pages, capacity, index_capacity, tiles, stride_qt, stride_qh, stride_qd, stride_kp, stride_kh,
            stride_kn, stride_kd, stride_vp, stride_vh, stride_vn, stride_vd, stride_tb, stride_tp, stride_ot, stride_oh,
            stride_od, stride_lt, stride_lh,
            HEADS, INDEX_HEADS, G, D, TOPK, TOPK_PAD, INIT, LOCAL, BLOCK, PAGE, PAGES_PAD, BM, BN, BD, TILES, SPLITS, REPS,
            STAGES, WAIT,
        )  # fmt: skip
    else:
        merge_share(
            i - scoring - attending, part, part_lse, tag, out, lse, stride_ot, stride_oh, stride_od, stride_lt, stride_lh,
            HEADS * G, D, BD, SPLITS, SPLITS_PAD, MERGE_PARTS, WAIT,
        )  # fmt: skip
