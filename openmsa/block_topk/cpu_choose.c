/* SPDX-License-Identifier: MIT */
/* Top-k of given scores: a row's best scores so far stand in order, and most of the others are passed over many at a time. */

#include "../primitives/lanes.h"

#define MOST_CHOSEN 64
#define STEP (8 * LANES) /* scores that are passed over at a time */

typedef struct {
    const float *scores; /* [heads, tokens, num_blocks], strides in elements */
    int64_t score_head, score_token;
    const int32_t *visible; /* [tokens]: blocks that each token sees */
    int32_t *blocks;        /* [tokens, heads, topk] */
    int64_t tokens, at_a_time; /* a piece has so many of the tokens */
    int64_t heads, num_blocks, topk, init_blocks, local_blocks;
} Call;

/* Returns how many bytes of memory a piece of a call needs. */
int64_t memory_bytes(const Call *c) { return c->topk; }

/* Writes the ids, ascending, of the `count` best of the scores `first` to `last` that are above -inf, and returns how many
 * there are. Of equal scores the lower ids are better. */
static int64_t best_of(const float *scores, int64_t first, int64_t last, int64_t count, int32_t *ids) {
    float best[MOST_CHOSEN]; /* descending; equal ones in the order of their ids */
    int64_t held = 0;
    for (int64_t start = first; start < last && count > 0; start += STEP) {
        int64_t end = start + STEP < last ? start + STEP : last;
        if (held == count && end - start == STEP) {
            floats most = every(-INFINITY);
            for (int64_t i = 0; i < STEP; i += LANES)
                most = greater(read_floats(scores + start + i), most);
            if (greatest_lane(most) <= best[held - 1])
                continue;
        }
        for (int64_t i = start; i < end; i++) {
            float score = scores[i];
            if (!(score > (held == count ? best[held - 1] : -INFINITY)))
                continue;
            int64_t at = held < count ? held++ : held - 1;
            for (; at > 0 && best[at - 1] < score; at--)
                best[at] = best[at - 1], ids[at] = ids[at - 1];
            best[at] = score, ids[at] = (int32_t)i;
        }
    }
    for (int64_t i = 1; i < held; i++) {
        int32_t id = ids[i];
        int64_t at = i;
        for (; at > 0 && ids[at - 1] > id; at--)
            ids[at] = ids[at - 1];
        ids[at] = id;
    }
    return held;
}

/* Chooses the blocks of each head of a piece's tokens: forced ones and the best of the others, then -1. */
void choose(const void *call, int64_t piece, char *memory) {
    const Call *c = call;
    int64_t from = piece * c->at_a_time, to = from + c->at_a_time < c->tokens ? from + c->at_a_time : c->tokens;
    (void)memory;
    for (int64_t t = from; t < to; t++) {
        int64_t visible = c->visible[t] < c->num_blocks ? c->visible[t] : c->num_blocks;
        int64_t first = c->init_blocks < visible ? c->init_blocks : visible, last = c->visible[t] - c->local_blocks;
        last = last > visible ? visible : last > first ? last : first;
        for (int64_t h = 0; h < c->heads; h++) {
            int32_t *ids = c->blocks + (t * c->heads + h) * c->topk;
            const float *scores = c->scores + h * c->score_head + t * c->score_token;
            int64_t at = 0;
            for (int64_t i = 0; i < first; i++)
                ids[at++] = (int32_t)i;
            at += best_of(scores, first, last, c->topk - first - (visible - last), ids + at);
            for (int64_t i = last; i < visible; i++)
                ids[at++] = (int32_t)i;
            while (at < c->topk)
                ids[at++] = -1;
        }
    }
}
