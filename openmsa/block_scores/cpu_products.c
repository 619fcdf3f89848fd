/* SPDX-License-Identifier: MIT */
/* Block scores of a CPU: the greatest product of each query with the visible keys of each block. Products never leave the
 * registers, or those of tiles the nearest cache. A NaN is no product. */

#include "../primitives/tiles.h"

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
    int64_t blocks, parts;   /* blocks to be scored, in so many parts */
    float *scores;           /* [heads, queries, blocks], strides in elements; what a query does not see is not written */
    int64_t score_head, score_token;
} Call;

/* Returns what a head of keys and its queries are to a call. */
static Call of_key_head(const Call *call, int64_t head) {
    Call c = *call;
    c.q += head * c.group * c.q_head;
    c.scales += head * c.group;
    c.keys = of_head(c.keys, head);
    c.scores += head * c.group * c.score_head;
    return c;
}

/* Returns the blocks of a part, whose `first` lies behind the last block where there are none. */
static Run blocks_of(const Call *c, int64_t part) {
    int64_t size = (c->blocks + c->parts - 1) / c->parts, first = part * size, left = c->blocks - first;
    return (Run){first, left < size ? left : size};
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

/* Returns the keys of a block; none of one that is not scored. */
static Run keys_of(const Call *c, int64_t block) {
    int64_t first = block * c->block_size, left = c->k_len - first;
    return (Run){first, block >= c->blocks ? 0 : left < c->block_size ? left : c->block_size};
}

/* Returns the first row that sees a block; blocks that are scored have one. */
static int64_t first_row(const Call *c, int64_t block) {
    int64_t first = block * c->block_size;
    return first > c->position ? (first - c->position) * c->group : 0;
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

#if defined(TILES)
/* Many rows of bfloat16 on tiles. Products come transposed, a row of a tile for each key and a lane for each row of the call:
 * maxima over keys are maxima of vectors, lane by lane. The processor takes subnormal numbers, below 2**-126, for 0. */

#define SIDE LANES        /* rows of a tile, and columns of one of products */
#define SQUARE (2 * SIDE) /* keys, and rows of the call, that are multiplied at a time: so each tile is used twice */

/* What lies in the memory of a piece. */
typedef struct {
    int64_t count;   /* rows of the call up to a whole SQUARE */
    char *rows;      /* [count / SIDE, dim / DEPTH, SIDE, 64 bytes]: rows as tiles of pairs, with zeros behind the last */
    char *keys;      /* [block_size, dim] up to a whole tile: keys of a block, with zeros behind the last */
    float *products; /* [SQUARE keys, SQUARE rows] */
    float **scores;  /* [count]: where the score of each row and block 0 stands */
    int32_t *seen;   /* [count]: keys that each row sees, none behind the last row */
    char *end;
} Tiled;

static Tiled tiled(const Call *c, char *memory) {
    Tiled t;
    t.count = (c->queries * c->group + SQUARE - 1) / SQUARE * SQUARE;
    t.rows = take(&memory, t.count * c->dim * 2);
    t.keys = take(&memory, (c->block_size + SIDE) * c->dim * 2);
    t.products = take(&memory, SQUARE * SQUARE * 4);
    t.scores = take(&memory, t.count * sizeof *t.scores);
    t.seen = take(&memory, t.count * sizeof *t.seen);
    t.end = memory;
    return t;
}

/* Says whether tiles make the products of a call. Numbers of bfloat16 have no factors. */
static int takes_tiles(const Call *c) {
    return c->q_type == BFLOAT16 && c->keys.type == BFLOAT16 && c->dim % DEPTH == 0 && tiles_allowed();
}

static void start_tiled(const Call *c, const Tiled *t) {
    int64_t size = c->dim * 2;
    for (int64_t first = 0; first < t->count; first += SIDE) {
        const char *from[SIDE] = {0};
        for (int64_t row = first; row < first + SIDE; row++) {
            int64_t query = row / c->group, is_there = query < c->queries;
            if (is_there)
                from[row - first] = c->q + query * c->q_token + row % c->group * c->q_head;
            t->scores[row] = is_there ? place(c, row, 0) : 0;
            t->seen[row] = is_there ? (int32_t)last_key(c, query) + 1 : 0;
        }
        for (int64_t i = 0; i < size; i += 64)
            write_pairs(t->rows + first * size + i * SIDE, from, i);
    }
}

/* Copies the keys of a block, and asks memory for those of a later one. */
static void copy_keys(char *to, const Rows *keys, Run run, Run later, int64_t dim) {
    int64_t size = dim * 2;
    for (int64_t k = 0; k < run.count; k++) {
        if (k % LANES == 0)
            ask_ahead(keys, later, k, dim);
        memcpy(to + k * size, row_at(keys, run.first + k), size);
    }
    memset(to + run.count * size, 0, (SIDE - 1) * size);
}

/* products = keys @ rows.T for SQUARE rows and one tile of keys, or two. */
INLINE void multiply_square(float *products, const char *keys, const char *rows, int64_t dim, int two) {
    USE_TILES
    int64_t size = dim * 2;
    clear_sums(0);
    clear_sums(1);
    clear_sums(2);
    clear_sums(3);
    for (int64_t i = 0; i < size; i += 64) {
        load_factor(4, keys + i, size);
        load_factor(5, rows + i * SIDE, 64);
        load_factor(6, rows + (size + i) * SIDE, 64);
        add_product(0, 4, 5);
        add_product(1, 4, 6);
        if (two) {
            load_factor(7, keys + SIDE * size + i, size);
            add_product(2, 7, 5);
            add_product(3, 7, 6);
        }
    }
    store_sums(0, products, SQUARE * 4);
    store_sums(1, products + SIDE, SQUARE * 4);
    if (two) {
        store_sums(2, products + SIDE * SQUARE, SQUARE * 4);
        store_sums(3, products + SIDE * SQUARE + SIDE, SQUARE * 4);
    }
}

/* best becomes the greatest product of each of SQUARE rows with `count` keys, the first of which is `key`. seen: how many keys
 * each row sees; 0: it sees these. */
INLINE void take_greatest(floats best[2], const float *products, int64_t key, int64_t count, const int32_t *seen) {
    ints sees[2];
    if (seen)
        memcpy(sees, seen, sizeof sees);
    for (int64_t k = 0; k < count; k++)
        for (int half = 0; half < 2; half++) {
            floats found = read_floats(products + k * SQUARE + half * SIDE);
            if (seen)
                found = either(sees[half] > (int32_t)(key + k), found, every(-INFINITY));
            best[half] = greater(found, best[half]);
        }
}

/* Scores one block for SQUARE rows, the first of which is `row`. The last of them sees the block. */
static void score_square(const Call *c, const Tiled *t, int64_t row, Run keys, int64_t block) {
    int64_t rows = c->queries * c->group, end = row + SQUARE < rows ? row + SQUARE : rows, size = c->dim * 2;
    int64_t most = t->seen[end - 1] - keys.first; /* A later row sees as many keys or more. */
    floats best[2] = {every(-INFINITY), every(-INFINITY)};
    most = most < keys.count ? most : keys.count;
    for (int64_t k = 0; k < most; k += SQUARE) {
        int64_t key = keys.first + k, count = most - k < SQUARE ? most - k : SQUARE;
        multiply_square(t->products, t->keys + k * size, t->rows + row * size, c->dim, count > SIDE);
        take_greatest(best, t->products, key, count, t->seen[row] < key + count ? t->seen + row : 0);
    }
    for (int64_t r = row; r < end; r++)
        if (t->seen[r] > keys.first)
            t->scores[r][block] = best[(r - row) / SIDE][r % SIDE];
}

/* Scores some blocks for many rows on tiles. */
static void score_tiled(const Call *c, Run blocks, char *memory) {
    Tiled t = tiled(c, memory);
    start_tiled(c, &t);
    begin_tiles();
    for (int64_t b = blocks.first; b < blocks.first + blocks.count; b++) {
        Run keys = keys_of(c, b);
        copy_keys(t.keys, &c->keys, keys, keys_of(c, b + 1), c->dim);
        for (int64_t row = first_row(c, b) / SQUARE * SQUARE; row < t.count; row += SQUARE)
            score_square(c, &t, row, keys, b);
    }
    end_tiles();
}
#endif

/* Returns how many bytes of memory a piece of a call needs. */
int64_t memory_bytes(const Call *c) {
    int64_t bytes = 4 * ((c->queries * c->group + 1) * c->dim + (LARGEST_BLOCK + PANEL) * c->dim) + 256;
#if defined(TILES)
    int64_t on_tiles = tiled(c, 0).end - (char *)0 + 64;
    bytes = bytes > on_tiles ? bytes : on_tiles;
#endif
    return bytes;
}

/* Scores the blocks of many rows. A piece is a part of the blocks of a head of keys. */
void score(const void *call, int64_t piece, char *memory) {
    const Call of = of_key_head(call, piece / ((const Call *)call)->parts), *c = &of;
    Run blocks = blocks_of(c, piece % c->parts);
    if (blocks.count <= 0)
        return;
#if defined(TILES)
    if (takes_tiles(c)) {
        score_tiled(c, blocks, memory);
        return;
    }
#endif
    const float *q = start_rows(c, &memory);
    float *columns = take(&memory, (LARGEST_BLOCK + PANEL) * c->dim * 4);
    for (int64_t b = blocks.first; b < blocks.first + blocks.count; b++) {
        pack_columns(columns, &c->keys, keys_of(c, b), keys_of(c, b + 1), c->dim);
        for (int64_t row = first_row(c, b); row < c->queries * c->group; row += TILE)
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
                    sums[r] = fused(sums[r], q[r][i / LANES], numbers);
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

/* Scores some blocks for at most MOST_FEW_ROWS rows, one by one where they do not all see all keys of a block. dim: that of the
 * call, which the compiler knows where arithmetic takes as long as memory. Then it unrolls a key, and holds rows in
 * registers. */
INLINE void score_blocks(const Call *c, Run blocks, char *memory, int64_t type, int64_t dim) {
    const float *q = start_rows(c, &memory), *rows[MOST_FEW_ROWS + 4];
    int64_t of = c->queries * c->group, to = blocks.first + blocks.count;
    int64_t next = blocks.first * c->block_size, stop = to * c->block_size;
    Walk soon = {0, next, stop < c->k_len ? stop : c->k_len, 0};
    for (int64_t i = 0; i < AHEAD; i += dim * SIZES[type])
        ask_for(&c->keys, soon.next < soon.end ? soon.next : soon.end - 1, dim), next_key(&soon, &c->keys);
    for (int64_t r = 0; r < MOST_FEW_ROWS + 4; r++)
        rows[r] = q + (r < of ? r : of) * dim;
    for (int64_t b = blocks.first; b < to; b++) {
        Run keys = keys_of(c, b);
        int64_t end = keys.first + keys.count, together = last_key(c, 0) >= end - 1;
        floats best[MOST_FEW_ROWS + 4];
        for (int64_t r = 0; r < MOST_FEW_ROWS + 4; r++)
            best[r] = every(-INFINITY);
        for (int64_t r = 0; r < of; r += together ? 4 : 1) {
            Walk ends = {soon.key, soon.end, soon.end, 0}; /* Other rows read keys that a cache holds. */
            Walk *asked = r ? &ends : &soon;
            int64_t last = last_key(c, r / c->group), sees = last < end ? last + 1 : end;
            if (sees <= keys.first)
                continue;
            if (!together || of - r == 1)
                multiply_few(best + r, rows + r, 1, &c->keys, keys.first, sees, asked, dim, type);
            else if (of - r == 2)
                multiply_few(best + r, rows + r, 2, &c->keys, keys.first, sees, asked, dim, type);
            else
                multiply_few(best + r, rows + r, 4, &c->keys, keys.first, sees, asked, dim, type);
        }
        for (int64_t r = first_row(c, b); r < of; r++)
            *place(c, r, b) = greatest_lane(best[r]);
    }
}

/* Scores the blocks of few rows. A piece is a part of the blocks of a head of keys. */
void score_few(const void *call, int64_t piece, char *memory) {
    const Call of = of_key_head(call, piece / ((const Call *)call)->parts), *c = &of;
    Run blocks = blocks_of(c, piece % c->parts);
    if (blocks.count <= 0)
        return;
    /* A key of float32 is walked by one instruction, which the processor's prefetcher follows. */
#define SCORE(TYPE)                                 \
    if (TYPE != FLOAT32 && c->dim == 128)           \
        score_blocks(c, blocks, memory, TYPE, 128); \
    else                                            \
        score_blocks(c, blocks, memory, TYPE, c->dim);
    BY_TYPE(c->keys.type, SCORE)
#undef SCORE
}
