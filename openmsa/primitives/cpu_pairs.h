/* SPDX-License-Identifier: MIT */
/* A call of attention KV-outer: what it reads and writes, and the pairs of a block and a query in the order of blocks. */

#ifndef OPENMSA_CPU_PAIRS_H
#define OPENMSA_CPU_PAIRS_H

#include "lanes.h"

#define FEW_PAIRS 64 /* So few pairs of a block and a query are sorted by insertion. */

typedef struct {
    const char *q;           /* [queries, heads, dim], strides in bytes */
    int64_t q_token, q_head, q_type;
    const float *scales;     /* [heads]: the factor of each head's logits */
    const int32_t *ids;      /* [queries, KV heads or 1, topk], strides in elements; ids_head: 0 where heads share them */
    int64_t ids_token, ids_head, ids_slot;
    Rows keys, values;       /* each KV head serves `group` heads of queries */
    const float *value_scales; /* [KV heads] */
    int64_t queries, group, dim, topk, block_size, k_len, position; /* position: that of the first query */
    char *out;               /* [queries, heads, dim], strides in bytes */
    int64_t out_token, out_head, out_type;
    float *lse;              /* [queries, heads], strides in elements; 0 where it is not wanted */
    int64_t lse_token, lse_head;
} Call;

/* The pairs of a visible block and a query that selected it. */
typedef struct {
    int64_t *ends, blocks; /* [blocks + 1]: where the pairs of each block end */
    int64_t *at, count;    /* [queries * topk], of which `count` are used: block << 32 | query, ascending */
} Pairs;

static Pairs pairs_in(const Call *c, char **memory) {
    Pairs p = {.blocks = (c->k_len + c->block_size - 1) / c->block_size};
    p.ends = take(memory, (p.blocks + 1) * 8);
    p.at = take(memory, c->queries * c->topk * 8);
    return p;
}

/* Returns the last key that a query of the call sees; below 0: none. */
static int64_t last_key(const Call *c, int64_t query) { return last_key_at(c->position + query, c->k_len); }

/* Finds the pairs, in order. */
static void sort_pairs(const Call *c, Pairs *p) {
    int64_t few = c->queries * c->topk <= FEW_PAIRS, count = 0;
    if (!few)
        memset(p->ends, 0, (p->blocks + 1) * 8);
    for (int writes = few; writes < 2; writes++) {
        for (int64_t t = 0; t < c->queries; t++)
            for (int64_t j = 0; j < c->topk; j++) {
                int64_t id = c->ids[t * c->ids_token + j * c->ids_slot], at = count;
                if (id < 0 || id * c->block_size > last_key(c, t))
                    continue;
                int64_t pair = id << 32 | t;
                if (few) {
                    for (; at > 0 && p->at[at - 1] > pair; at--)
                        p->at[at] = p->at[at - 1];
                    p->at[at] = pair, count++;
                } else if (writes) {
                    p->at[p->ends[id]++] = pair, count++;
                } else {
                    p->ends[id + 1]++;
                }
            }
        for (int64_t b = 0; b < p->blocks && !writes; b++)
            p->ends[b + 1] += p->ends[b];
    }
    p->count = count;
}

/* Returns the end of the pairs of the block of a pair. */
static int64_t end_of(const Pairs *p, int64_t pair) {
    int64_t next = pair + 1;
    while (next < p->count && p->at[next] >> 32 == p->at[pair] >> 32)
        next++;
    return next;
}

/* Returns the keys of the block of a pair; none where there is no such pair. */
static Run block_of(const Call *c, const Pairs *p, int64_t pair) {
    int64_t first = pair < p->count ? (p->at[pair] >> 32) * c->block_size : c->k_len;
    return (Run){first, c->k_len - first < c->block_size ? c->k_len - first : c->block_size};
}

/* Asks memory for the keys and values of the first block. */
static Run first_block(const Call *c, const Pairs *p) {
    Run block = block_of(c, p, 0);
    for (int64_t k = 0; k < block.count; k += LANES)
        ask_ahead(&c->keys, block, k, c->dim), ask_ahead(&c->values, block, k, c->dim);
    return block;
}

#endif
