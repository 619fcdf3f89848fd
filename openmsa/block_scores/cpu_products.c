/* SPDX-License-Identifier: MIT */
/* Block scores of a CPU: the greatest product of each query with the visible keys of each block. Products never leave the
 * registers. A NaN is no product. */

#include "../primitives/lanes.h"

#define MOST_FEW_ROWS 16
#define AHEAD 8192 /* few rows: so many bytes of keys behind a key memory is asked for another */
#if LANES == 16 && !defined(__AVX512VP2INTERSECT__)
#define SPARSE 256 /* one row, packed keys: it is asked for a line of so many bytes; the processor sees runs of the others */
#else
#define SPARSE 64 /* Processors without AVX-512, and Zen 5, which has that instruction, are asked for every line. */
#endif

typedef struct {
    const char *q;           /* [queries, heads, dim], strides in bytes */
    int64_t q_token, q_head, q_type;
    const float *scales;     /* [heads]: the factor of each head's products */
    Rows keys;               /* each head of keys serves `group` heads of queries */
    int64_t queries, group, dim, block_size, k_len, position; /* position: that of the first query */
    int64_t blocks, parts;   /* blocks to be scored, for few rows in so many parts */
    float *scores;           /* [heads, queries, blocks], strides in elements; what a query does not see is not written */
    int64_t score_head, score_token;
} Call;

/* Returns how many bytes of memory a piece of a call needs. */
int64_t memory_bytes(const Call *c) {
    return 4 * ((c->queries * c->group + 1) * c->dim + (LARGEST_BLOCK + PANEL) * c->dim) + 256;
}

/* Returns what a head of keys and its queries are to a call. */
static Call of_key_head(const Call *call, int64_t head) {
    Call c = *call;
    c.q += head * c.group * c.q_head;
    c.scales += head * c.group;
    c.keys = of_head(c.keys, head);
    c.scores += head * c.group * c.score_head;
    return c;
}

/* Returns the last key that a query of the call sees; below 0: none. */
static int64_t last_key(const Call *c, int64_t query) { return last_key_at(c->position + query, c->k_len); }

/* Returns the rows [queries * group + 1, dim] times their factors, of which the last is zeros. */
static float *start_rows(const Call *c, char **memory) {
    float *q = take(memory, (c->queries * c->group + 1) * c->dim * 4);
    convert_queries(q, c->q, c->q_token, c->q_head, c->q_type, c->scales, c->queries, c->group, c->dim);
    return q;
}

static float *place(const Call *c, int64_t row, int64_t block) {
    return c->scores + row % c->group * c->score_head + row / c->group * c->score_token + block;
}

/* Scores one block for the rows of a tile, the first of which is `row`. */
static void score_tile(const Call *c, const float *q, const float *columns, int64_t row, int64_t block) {
    int64_t rows = c->queries * c->group, first = block * c->block_size, most = 0;
    int64_t count = rows - row < TILE ? rows - row : TILE, strips = (count + STRIP - 1) / STRIP;
    const float *of_row[TILE];
    int32_t seen[TILE];
    floats best[TILE];
    ints lane;
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t sees = r < count ? last_key(c, (row + r) / c->group) - first + 1 : 0;
        seen[r] = (int32_t)(sees < c->block_size ? sees : c->block_size);
        most = seen[r] > most ? seen[r] : most;
        of_row[r] = q + (r < count ? row + r : rows) * c->dim;
        best[r] = every(-INFINITY);
    }
    for (int64_t p = 0; p < most; p += PANEL)
        for (int64_t strip = 0; strip < strips; strip++) {
            floats found[STRIP][2];
            memset(found, 0, sizeof found);
            multiply(found, of_row + strip * STRIP, columns + p * c->dim, c->dim);
            for (int64_t r = 0; r < STRIP; r++) {
                int64_t at = strip * STRIP + r;
                for (int half = 0; half < 2; half++) {
                    floats products = found[r][half];
                    if (seen[at] < p + PANEL)
                        products = either(lane + (int32_t)(p + half * LANES) < seen[at], products, every(-INFINITY));
                    best[at] = greater(products, best[at]);
                }
            }
        }
    for (int64_t r = 0; r < count; r++)
        if (seen[r] > 0)
            *place(c, row + r, block) = greatest_lane(best[r]);
}

/* Scores the blocks of many rows. A piece is a head of keys. */
void score(const void *call, int64_t piece, char *memory) {
    const Call of = of_key_head(call, piece), *c = &of;
    const float *q = start_rows(c, &memory);
    float *columns = take(&memory, (LARGEST_BLOCK + PANEL) * c->dim * 4);
    for (int64_t b = 0; b < c->blocks; b++) {
        int64_t first = b * c->block_size, count = c->k_len - first < c->block_size ? c->k_len - first : c->block_size;
        int64_t sees = first > c->position ? first - c->position : 0; /* the first query that sees the block */
        if (sees >= c->queries || count <= 0)
            return;
        int64_t left = c->k_len - first - count;
        Run later = {first + count, b + 1 == c->blocks ? 0 : left < c->block_size ? left : c->block_size};
        pack_columns(columns, &c->keys, (Run){first, count}, later, c->dim);
        for (int64_t row = sees * c->group; row < c->queries * c->group; row += TILE)
            score_tile(c, q, columns, row, b);
    }
}

/* Returns the sum of each of LANES vectors, in the same order of additions for all of them. */
INLINE floats sums_of(floats *parts) {
#define FOLD(DISTANCE)                                                                                          \
    for (int i = 0; i < DISTANCE; i++) {                                                                        \
        floats a = parts[i], b = parts[i + DISTANCE];                                                           \
        parts[i] = lanes_of(a, b, DISTANCE, 0, 0) + lanes_of(a, b, DISTANCE, DISTANCE, DISTANCE);               \
    }
    EACH_DISTANCE(FOLD)
#undef FOLD
    return parts[0];
}

/* A walk through keys, one after the other, from `next` to `end`. left: keys of the run that follow. */
typedef struct {
    const char *key;
    int64_t next, end, left;
} Walk;

INLINE const char *next_key(Walk *walk, const Rows *keys) {
    if (walk->next < walk->end) { /* Otherwise the last key comes again. */
        walk->key = walk->left ? walk->key + keys->stride : row_at(keys, walk->next);
        walk->left = walk->left ? walk->left - 1 : keys->run - 1 - walk->next % keys->run;
        walk->next++;
    }
    return walk->key;
}

/* best[r] becomes the greatest product of each of `count` rows, 1, 2 or 4, with the keys first to end, a lane for every
 * LANES-th key. A key is read once, where it lies, for all rows. soon: keys that memory is asked for, one for each key. */
INLINE void multiply_few(floats *best, const float *const *rows, int count, const Rows *keys, int64_t first, int64_t end,
                         Walk *soon, int64_t dim, int64_t type) {
    floats parts[4][LANES]; /* of each row and key: a lane for every LANES-th product */
    floats q[4][LARGEST_DIM / LANES];
    Walk walk = {0, first, end, 0};
    int64_t apart = count == 1 && !keys->pages && type != E4M3 ? SPARSE : 64;
    for (int r = 0; r < count; r++)
        for (int64_t i = 0; i < dim; i += LANES)
            q[r][i / LANES] = read_floats(rows[r] + i);
    for (int64_t k = first; k < end; k += LANES) {
        for (int j = 0; j < LANES; j++) {
            floats sums[4] = {0};
            const char *key = next_key(&walk, keys), *later = next_key(soon, keys);
            for (int64_t i = 0; i < dim; i += LANES) {
                floats numbers = read_numbers(key, i, type);
                for (int r = 0; r < count; r++)
                    sums[r] += q[r][i / LANES] * numbers;
            }
            for (int64_t i = 0; i < dim * SIZES[type]; i += apart)
                __builtin_prefetch(later + i, 0, 2);
            for (int r = 0; r < count; r++)
                parts[r][j] = sums[r];
        }
        for (int r = 0; r < count; r++)
            best[r] = greater(sums_of(parts[r]), best[r]);
    }
}

/* Scores the blocks `from` to `to` for at most MOST_FEW_ROWS rows, all of which see all keys. dim: that of the call, which the
 * compiler knows where arithmetic takes as long as memory. Then it unrolls a key, and holds rows in registers. */
INLINE void score_blocks(const Call *c, int64_t from, int64_t to, char *memory, int64_t type, int64_t dim) {
    const float *q = start_rows(c, &memory), *rows[MOST_FEW_ROWS + 4];
    int64_t of = c->queries * c->group, next = from * c->block_size, stop = to * c->block_size;
    Walk soon = {0, next, stop < c->k_len ? stop : c->k_len, 0};
    for (int64_t i = 0; i < AHEAD; i += dim * SIZES[type])
        ask_for(&c->keys, soon.next < soon.end ? soon.next : soon.end - 1, dim), next_key(&soon, &c->keys);
    for (int64_t r = 0; r < MOST_FEW_ROWS + 4; r++)
        rows[r] = q + (r < of ? r : of) * dim;
    for (int64_t b = from; b < to; b++) {
        int64_t first = b * c->block_size, end = first + c->block_size < c->k_len ? first + c->block_size : c->k_len;
        floats best[MOST_FEW_ROWS + 4];
        for (int64_t r = 0; r < MOST_FEW_ROWS + 4; r++)
            best[r] = every(-INFINITY);
        for (int64_t r = 0; r < of; r += 4) {
            Walk ends = {soon.key, soon.end, soon.end, 0}; /* Other rows read keys that a cache holds. */
            Walk *asked = r ? &ends : &soon;
            if (of - r == 1)
                multiply_few(best + r, rows + r, 1, &c->keys, first, end, asked, dim, type);
            else if (of - r == 2)
                multiply_few(best + r, rows + r, 2, &c->keys, first, end, asked, dim, type);
            else
                multiply_few(best + r, rows + r, 4, &c->keys, first, end, asked, dim, type);
        }
        for (int64_t r = 0; r < of; r++)
            *place(c, r, b) = greatest_lane(best[r]);
    }
}

/* Scores the blocks of few rows. A piece is a part of the blocks of a head of keys. */
void score_few(const void *call, int64_t piece, char *memory) {
    const Call of = of_key_head(call, piece / ((const Call *)call)->parts), *c = &of;
    int64_t size = (c->blocks + c->parts - 1) / c->parts, from = piece % c->parts * size;
    int64_t to = from + size < c->blocks ? from + size : c->blocks;
    if (from >= to)
        return;
    /* A key of float32 is walked by one instruction, which the processor's prefetcher follows. */
#define SCORE(TYPE)                                    \
    if (TYPE != FLOAT32 && c->dim == 128)              \
        score_blocks(c, from, to, memory, TYPE, 128);  \
    else                                               \
        score_blocks(c, from, to, memory, TYPE, c->dim);
    BY_TYPE(c->keys.type, SCORE)
#undef SCORE
}
