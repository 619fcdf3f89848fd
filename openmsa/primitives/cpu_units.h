/* SPDX-License-Identifier: MIT */
/* Attention KV-outer in products of bfloat16 on tiles (see tiles.h). A unit is UNIT heads of a query, whose logits are the
 * columns of a tile. Keys are its rows, so that maxima and sums over keys are those of vectors with a lane for each head. */

#ifndef OPENMSA_CPU_UNITS_H
#define OPENMSA_CPU_UNITS_H

#include "tiles.h"
#include "cpu_pairs.h"

#if defined(TILES)
#define UNIT 16        /* heads of a query */
#define TILE_BYTES 1024
#define CHUNK 64       /* keys, in four tiles, which are multiplied at a time; their number is padded with zeros */
#define SLACK 8.0f     /* Sums are corrected where a logit is greater than the one that they are relative to by so much. */

/* The state of a call in its memory. Logits are those of powers of two. */
typedef struct {
    char *q;                /* [units, dim / 2, UNIT] pairs of bfloat16 */
    float *sums;            /* [units, dim, UNIT] */
    float *largest, *total; /* [units, UNIT]: the logit that sums are relative to, and the denominator */
    char *keys;             /* of a block, as tiles of 16 keys [width / 16, dim / DEPTH] */
    char *values;           /* as tiles of 16 dims [dim / 16, width / DEPTH] */
    float *logits;          /* [width, UNIT] */
    char *weights;          /* [width / 2, UNIT] pairs of bfloat16 */
    int64_t units, width;
    Pairs pairs;
    char *end;
} Units;

static Units units_of(const Call *c, char *memory) {
    Units s;
    char *at = memory;
    s.units = c->queries * c->group / UNIT;
    s.width = (c->block_size + CHUNK - 1) / CHUNK * CHUNK;
    s.q = take(&at, s.units * c->dim * UNIT * 2);
    s.sums = take(&at, s.units * c->dim * UNIT * 4);
    s.largest = take(&at, s.units * UNIT * 4);
    s.total = take(&at, s.units * UNIT * 4);
    s.keys = take(&at, s.width * c->dim * 2);
    s.values = take(&at, s.width * c->dim * 2);
    s.logits = take(&at, s.width * UNIT * 4);
    s.weights = take(&at, s.width * UNIT * 2);
    s.pairs = pairs_in(c, &at);
    s.end = at;
    return s;
}

/* Says whether tiles serve a call. */
static int on_tiles(const Call *c) {
    int stored = c->q_type == BFLOAT16 && c->keys.type == BFLOAT16 && c->values.type == BFLOAT16;
    return stored && c->dim % DEPTH == 0 && c->group % UNIT == 0 && tiles_allowed();
}

static void start_units(const Call *c, Units *s) {
    for (int64_t u = 0; u < s->units; u++) {
        const char *heads[UNIT], *q = c->q + u / (c->group / UNIT) * c->q_token + u % (c->group / UNIT) * UNIT * c->q_head;
        for (int h = 0; h < UNIT; h++)
            heads[h] = q + h * c->q_head;
        for (int64_t i = 0; i < c->dim; i += DEPTH)
            write_pairs(s->q + (u * c->dim + i) / DEPTH * TILE_BYTES, heads, 2 * i);
    }
    memset(s->sums, 0, s->units * c->dim * UNIT * 4);
    memset(s->total, 0, s->units * UNIT * 4);
    for (int64_t i = 0; i < s->units * UNIT; i++)
        s->largest[i] = -INFINITY;
}

/* Writes a block's keys as tiles, and asks memory for those of a later block. */
static void pack_keys(const Units *s, const Rows *keys, Run block, Run later, int64_t dim) {
    for (int64_t k = 0; k < s->width; k++) {
        const char *from = k < block.count ? row_at(keys, block.first + k) : 0;
        char *to = s->keys + k / 16 * (dim / DEPTH) * TILE_BYTES + k % 16 * 64;
        if (k % LANES == 0)
            ask_ahead(keys, later, k, dim);
        for (int64_t i = 0; i < dim / DEPTH; i++)
            write_floats((float *)(to + i * TILE_BYTES), from ? read_floats((const float *)(from + 64 * i)) : every(0));
    }
}

/* Writes the values of a block's first keys as tiles of dims, with zeros behind them, and asks memory for a later block. */
static void pack_dims(const Units *s, const Rows *values, Run block, Run later, int64_t dim) {
    for (int64_t k = 0; k < s->width; k += DEPTH) {
        const char *from[DEPTH];
        ask_ahead(values, later, k, dim), ask_ahead(values, later, k + LANES, dim);
        for (int j = 0; j < DEPTH; j++)
            from[j] = k + j < block.count ? row_at(values, block.first + k + j) : 0;
        for (int64_t i = 0; i < dim; i += LANES) {
            floats x[LANES];
            for (int j = 0; j < LANES; j++) {
                words low = from[2 * j] ? read_codes(from[2 * j] + 2 * i, 2) : (words){0};
                words high = from[2 * j + 1] ? read_codes(from[2 * j + 1] + 2 * i, 2) : (words){0};
                x[j] = (floats)(low | high << 16);
            }
            write_turned(s->values + (i / 16 * (s->width / DEPTH) + k / DEPTH) * TILE_BYTES, x);
        }
    }
}

/* logits = keys @ q.T */
static void multiply_unit_keys(const Units *s, const char *q, int64_t sees, int64_t dim) {
    USE_TILES
    int64_t row = dim / DEPTH * TILE_BYTES; /* from a tile of keys to the next */
    for (int64_t k = 0; k < sees; k += CHUNK) {
        const char *keys = s->keys + k / 16 * row;
        clear_sums(0);
        clear_sums(1);
        clear_sums(2);
        clear_sums(3);
        for (int64_t i = 0; i < row; i += TILE_BYTES) {
            load_factor(4, q + i, 64);
            load_factor(5, keys + i, 64);
            add_product(0, 5, 4);
            load_factor(6, keys + row + i, 64);
            add_product(1, 6, 4);
            load_factor(7, keys + 2 * row + i, 64);
            add_product(2, 7, 4);
            load_factor(5, keys + 3 * row + i, 64);
            add_product(3, 5, 4);
        }
        float *to = s->logits + k * UNIT;
        store_sums(0, to, 64);
        store_sums(1, to + 16 * UNIT, 64);
        store_sums(2, to + 32 * UNIT, 64);
        store_sums(3, to + 48 * UNIT, 64);
    }
}

/* sums += values.T @ weights */
static void multiply_unit_values(const Units *s, float *sums, int64_t sees, int64_t dim) {
    USE_TILES
    int64_t row = s->width / DEPTH * TILE_BYTES, end = (sees + DEPTH - 1) / DEPTH * TILE_BYTES;
    for (int64_t i = 0; i < dim; i += 32, sums += 32 * UNIT) {
        const char *values = s->values + i / 16 * row;
        load_sums(0, sums, 64);
        load_sums(1, sums + 16 * UNIT, 64);
        for (int64_t k = 0; k < end; k += TILE_BYTES) {
            load_factor(4, s->weights + k, 64);
            load_factor(5, values + k, 64);
            add_product(0, 5, 4);
            load_factor(6, values + row + k, 64);
            add_product(1, 6, 4);
        }
        store_sums(0, sums, 64);
        store_sums(1, sums + 16 * UNIT, 64);
    }
}

/* 2 to the power of x, to 2 units in the last place; 0 for -inf. */
INLINE floats power_of_two(floats x) {
    floats rest = (floats)_mm512_reduce_ps((__m512)x, 1 /* from the next whole number below */);
    floats sum = every(1.867130213e-3f);
    sum = sum * rest + 9.017030019e-3f;
    sum = sum * rest + 5.579991332e-2f;
    sum = sum * rest + 2.401644501e-1f;
    sum = sum * rest + 6.931513118e-1f;
    sum = sum * rest + 1.0f;
    return (floats)_mm512_scalef_ps((__m512)sum, (__m512)x);
}

/* Pairs of numbers, none below 0, as bfloat16. */
INLINE words pair_of(floats low, floats high) { return ((words)low + 0x8000) >> 16 | (((words)high + 0x8000) & 0xffff0000); }

/* Logits of the keys that a unit sees become weights, and its sums are corrected where greater logits have come. factors: those
 * of its heads. */
static void weigh_unit(const Units *s, int64_t unit, floats factors, int64_t sees, int64_t dim) {
    float *largest = s->largest + unit * UNIT, *total = s->total + unit * UNIT, *sums = s->sums + unit * dim * UNIT;
    floats tops[4], sum[2] = {0}, before = read_floats(largest);
    int64_t end = (sees + DEPTH - 1) / DEPTH * DEPTH;
    for (int i = 0; i < 4; i++)
        tops[i] = every(-INFINITY);
    for (int64_t k = 0; k < end; k += 4) /* Logits are rounded once, so that the greatest one less itself is 0. */
        for (int i = 0; i < 4; i++) {
            floats logits = k + i < sees ? read_floats(s->logits + (k + i) * UNIT) * factors : every(-INFINITY);
            tops[i] = greater(logits, tops[i]);
            write_floats(s->logits + (k + i) * UNIT, logits);
        }
    floats top = greater(greater(tops[0], tops[1]), greater(tops[2], tops[3]));
    ints grown = top > before + SLACK;
    top = either(grown, top, before);
    floats base = either(top == -INFINITY, every(0), top);
    for (int64_t k = 0; k < end; k += 2) {
        floats low = power_of_two(read_floats(s->logits + k * UNIT) - base);
        floats high = power_of_two(read_floats(s->logits + (k + 1) * UNIT) - base);
        sum[0] += low, sum[1] += high;
        write_floats((float *)s->weights + k / 2 * UNIT, (floats)pair_of(low, high));
    }
    floats change = either(grown, power_of_two(before - base), every(1));
    write_floats(largest, top);
    write_floats(total, read_floats(total) * change + (sum[0] + sum[1]));
    if (greatest_lane(either(grown & (before > -INFINITY), every(1), every(0))) > 0)
        for (int64_t i = 0; i < dim; i++)
            write_floats(sums + i * UNIT, read_floats(sums + i * UNIT) * change);
}

/* Says whether the values of a block are finite. */
static int finite_values(const Units *s, int64_t dim) {
    uint16_t code, odd = 0;
    for (int64_t i = 0; i < s->width * dim; i++) {
        memcpy(&code, s->values + 2 * i, 2);
        odd |= (code & 0x7f80) == 0x7f80;
    }
    return !odd;
}

/* Writes the sums of values divided by their denominators, and lse. */
static void finish_units(const Call *c, const Units *s) {
    for (int64_t u = 0; u < s->units; u++) {
        int64_t query = u / (c->group / UNIT), head = u % (c->group / UNIT) * UNIT;
        const float *largest = s->largest + u * UNIT, *total = s->total + u * UNIT;
        char *out = c->out + query * c->out_token + head * c->out_head;
        for (int64_t h = 0; h < UNIT && c->lse; h++)
            c->lse[query * c->lse_token + (head + h) * c->lse_head] =
                largest[h] == INFINITY ? largest[h] : largest[h] * 0.693147180559945f + logf(total[h]);
        for (int64_t i = 0; i < c->dim; i += LANES) {
            floats x[LANES];
            for (int j = 0; j < LANES; j++)
                x[j] = read_floats(s->sums + (u * c->dim + i + j) * UNIT);
            transpose(x);
            for (int h = 0; h < UNIT; h++)
                write_numbers(out + h * c->out_head, i, c->out_type, x[h] * (total[h] == 0 ? 0 : *c->value_scales / total[h]));
        }
    }
}

/* Attends with the queries of a KV head. */
static void attend_units(const Call *c, char *memory) {
    Units s = units_of(c, memory);
    int64_t units = c->group / UNIT; /* of a query */
    start_units(c, &s);
    sort_pairs(c, &s.pairs);
    Run block = first_block(c, &s.pairs), later;
    begin_tiles();
    for (int64_t pair = 0, next; pair < s.pairs.count; pair = next, block = later) {
        next = end_of(&s.pairs, pair);
        later = block_of(c, &s.pairs, next);
        pack_keys(&s, &c->keys, block, later, c->dim);
        pack_dims(&s, &c->values, block, later, c->dim);
        int64_t packed = block.count; /* keys whose values are packed */
        int finite = -1;              /* not known */
        for (int64_t i = 0; i < (next - pair) * units; i++) {
            int64_t query = (int32_t)s.pairs.at[pair + i / units], unit = query * units + i % units;
            int64_t sees = last_key(c, query) - block.first + 1, wanted = block.count;
            sees = sees < block.count ? sees : block.count;
            if (sees < block.count && finite < 0)
                finite = finite_values(&s, c->dim);
            if (finite == 0) /* A weight of 0 must not meet the NaN or inf of a key that the query does not see. */
                wanted = sees;
            if (packed != wanted)
                pack_dims(&s, &c->values, (Run){block.first, packed = wanted}, (Run){0, 0}, c->dim);
            multiply_unit_keys(&s, s.q + unit * c->dim * UNIT * 2, sees, c->dim);
            weigh_unit(&s, unit, read_floats(c->scales + i % units * UNIT) * 1.44269504f, sees, c->dim);
            multiply_unit_values(&s, s.sums + unit * c->dim * UNIT, sees, c->dim);
        }
    }
    end_tiles();
    finish_units(c, &s);
}
#endif

#endif
