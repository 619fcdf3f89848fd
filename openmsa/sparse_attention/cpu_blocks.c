/* SPDX-License-Identifier: MIT */
/* Attention KV-outer of the queries of one KV head: blocks are taken one after another, and the queries that selected a block
 * are attended to it. Each row, a query of a head, keeps its greatest logit, its denominator and its sum of values, which are
 * corrected when a greater logit comes. A tile's logits stay in cache from their product to that with values. */

#include "../primitives/lanes.h"

typedef struct {
    const char *q;           /* [queries, group, dim], strides in bytes */
    int64_t q_token, q_head, q_type;
    const float *scales;     /* [group]: the factor of each head's logits */
    const int32_t *ids;      /* [queries, topk], strides in elements */
    int64_t ids_token, ids_slot;
    Rows keys, values;
    double value_scale;
    int64_t queries, group, dim, topk, block_size, k_len, position; /* position: that of the first query */
    char *out;               /* [queries, group, dim], strides in bytes */
    int64_t out_token, out_head, out_type;
    float *lse;              /* [queries, group], strides in elements */
    int64_t lse_token, lse_head;
} Call;

/* The state of a call in its memory. */
typedef struct {
    float *q, *sums;         /* [rows + 1, dim]: queries times scale, and sums of values; the last row is one of padding */
    float *largest, *total;  /* [rows]: the greatest logit and the denominator */
    int64_t *ends;           /* [blocks + 1]: where the queries of each block end in `order` */
    int32_t *order;          /* [queries * topk]: the queries of each block, ascending */
    float *columns, *panels; /* a block's keys as panels of columns, and its values as panels [dim / PANEL, keys, PANEL] */
    float *logits;           /* [TILE + 1, width]; the last row is zeros */
    int64_t rows, blocks, width;
    char *end;
} State;

/* The rows of a tile. */
typedef struct {
    int64_t count, strips;
    int64_t row[TILE];
    const float *q[TILE], *next[TILE]; /* next: queries of the next tile, or others */
    float *sums[TILE];
    float correction[TILE];
    int64_t seen[TILE], most;          /* keys of the block that each row sees, and the most of them */
} Tile;

static State state_of(const Call *c, char *memory) {
    State s;
    char *at = memory;
    int64_t dim = c->dim, padded = (dim + PANEL - 1) / PANEL * PANEL;
    s.rows = c->queries * c->group;
    s.blocks = (c->k_len + c->block_size - 1) / c->block_size;
    s.q = take(&at, (s.rows + 1) * dim * 4);
    s.sums = take(&at, (s.rows + 1) * dim * 4);
    s.largest = take(&at, s.rows * 4);
    s.total = take(&at, s.rows * 4);
    s.ends = take(&at, (s.blocks + 1) * 8);
    s.order = take(&at, c->queries * c->topk * 4);
    s.width = (c->block_size + PANEL - 1) / PANEL * PANEL + LINE; /* Rows lie in different sets of the cache. */
    s.columns = take(&at, s.width * dim * 4);
    s.panels = take(&at, c->block_size * padded * 4);
    s.logits = take(&at, (TILE + 1) * s.width * 4);
    s.end = at;
    return s;
}

/* Returns how many bytes of memory a call needs. */
int64_t memory_bytes(const Call *c) { return state_of(c, 0).end - (char *)0 + 64; }

/* Returns the last key that a query of the call sees; below 0: none. */
static int64_t last_key(const Call *c, int64_t query) { return last_key_at(c->position + query, c->k_len); }

static void start_rows(const Call *c, State *s) {
    convert_queries(s->q, c->q, c->q_token, c->q_head, c->q_type, c->scales, c->queries, c->group, c->dim);
    memset(s->sums, 0, (s->rows + 1) * c->dim * 4);
    for (int64_t r = 0; r < s->rows; r++)
        s->largest[r] = -INFINITY, s->total[r] = 0;
}

/* Sorts the pairs of a query and a visible block that it selected by blocks. */
static void sort_by_block(const Call *c, State *s) {
    memset(s->ends, 0, (s->blocks + 1) * 8);
    for (int writes = 0; writes < 2; writes++) {
        for (int64_t t = 0; t < c->queries; t++)
            for (int64_t j = 0; j < c->topk; j++) {
                int64_t id = c->ids[t * c->ids_token + j * c->ids_slot];
                if (id < 0 || id * c->block_size > last_key(c, t))
                    continue;
                if (writes)
                    s->order[s->ends[id]++] = (int32_t)t;
                else
                    s->ends[id + 1]++;
            }
        for (int64_t b = 0; b < s->blocks && !writes; b++)
            s->ends[b + 1] += s->ends[b];
    }
}

/* Writes a block's values as panels, with zeros behind dim, and says whether all of them are finite. */
static int pack_values(float *panels, const Rows *values, int64_t first, int64_t count, int64_t dim) {
    float row[LARGEST_DIM + PANEL] = {0};
    ints odd = {0};
    for (int64_t k = 0; k < count; k++) {
        if (k + LANES < count)
            ask_for(values, first + k + LANES, dim);
        convert_row(row, row_at(values, first + k), dim, values->type, 1.0f);
        for (int64_t i = 0; i < dim; i += LANES)
            odd |= (read_floats(row + i) - read_floats(row + i)) != 0.0f;
        for (int64_t i = 0; i < dim; i += PANEL)
            memcpy(panels + (i * count + k * PANEL), row + i, PANEL * 4);
    }
    int found = 0;
    for (int i = 0; i < LANES; i++)
        found |= odd[i];
    return !found;
}

/* Finds the tile of the rows from `first` on of the `of` rows whose queries stand at `order`. The block has `count` keys from
 * `first_key` on. */
static void find_rows(Tile *t, const Call *c, const State *s, const int32_t *order, int64_t first, int64_t of,
                      int64_t first_key, int64_t count) {
    t->count = of - first < TILE ? of - first : TILE;
    t->strips = (t->count + STRIP - 1) / STRIP;
    t->most = 0;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t row = s->rows, after = first + TILE + r < of ? first + TILE + r : of - 1;
        t->seen[r] = 0;
        if (r < t->count) {
            int64_t query = order[(first + r) / c->group], sees = last_key(c, query) - first_key + 1;
            row = query * c->group + (first + r) % c->group;
            t->seen[r] = sees < count ? sees : count;
        }
        t->row[r] = row;
        t->q[r] = s->q + row * c->dim;
        t->sums[r] = s->sums + row * c->dim;
        t->next[r] = s->q + (order[after / c->group] * c->group + after % c->group) * c->dim;
        t->most = t->seen[r] > t->most ? t->seen[r] : t->most;
    }
}

/* logits = q @ keys.T, while the rows' sums of values come nearer. */
static void multiply_keys(const Tile *t, const State *s, int64_t dim) {
    int64_t panels = (t->most + PANEL - 1) / PANEL, share = (dim / panels + LINE - 1) / LINE * LINE;
    for (int64_t p = 0; p < panels; p++)
        for (int64_t strip = 0; strip < t->strips; strip++) {
            floats found[STRIP][2];
            memset(found, 0, sizeof found);
            for (int r = 0; r < STRIP; r++)
                for (int64_t i = p * share; i < (p + 1) * share && i < dim; i += LINE)
                    __builtin_prefetch(t->sums[strip * STRIP + r] + i, 1, 2);
            multiply(found, t->q + strip * STRIP, s->columns + p * PANEL * dim, dim);
            for (int r = 0; r < STRIP; r++)
                memcpy(s->logits + (strip * STRIP + r) * s->width + p * PANEL, found[r], sizeof found[r]);
        }
}

/* Logits become weights, relative to the greatest logit so far, and the rows' corrections are found. */
static void weigh(Tile *t, State *s) {
    int64_t width = (t->most + PANEL - 1) / PANEL * PANEL;
    float change[TILE + LANES];
    memset(s->logits + t->count * s->width, 0, (t->strips * STRIP - t->count) * s->width * 4);
    for (int64_t r = 0; r < TILE; r++) {
        float *logits = s->logits + r * s->width;
        change[r] = 0;
        if (r >= t->count)
            continue;
        for (int64_t k = t->seen[r]; k < width; k++)
            logits[k] = -INFINITY;
        floats largest = every(s->largest[t->row[r]]), sum = {0};
        for (int64_t k = 0; k < width; k += LANES)
            largest = greater(read_floats(logits + k), largest);
        float top = greatest_lane(largest), base = top == -INFINITY ? 0 : top;
        for (int64_t k = 0; k < width; k += LANES) {
            floats weight = exponential(read_floats(logits + k) - base);
            sum += weight;
            write_floats(logits + k, weight);
        }
        change[r] = s->largest[t->row[r]] - base;
        s->largest[t->row[r]] = top;
        t->correction[r] = sum_of_lanes(sum); /* for a moment the sum of the weights */
    }
    for (int64_t r = 0; r < TILE; r += LANES)
        write_floats(change + r, exponential(read_floats(change + r)));
    for (int64_t r = 0; r < TILE; r++) {
        if (r < t->count)
            s->total[t->row[r]] = s->total[t->row[r]] * change[r] + t->correction[r];
        t->correction[r] = change[r];
    }
}

/* sums = sums * correction + weights @ values for the columns of a panel, from `column` on, and the rows of a strip, or one of
 * them, while queries of the next tile come nearer. */
static void multiply_values(const Tile *t, const State *s, const float *panel, int64_t dim, int64_t column, int64_t strip,
                            int64_t depth, int only) {
    const float *weights[STRIP];
    float *sums[STRIP];
    floats found[STRIP][2];
    for (int r = 0; r < STRIP; r++) {
        int64_t at = strip * STRIP + r;
        int serves = only < 0 || only == r;
        sums[r] = (serves ? t->sums[at] : s->sums + s->rows * dim) + column;
        weights[r] = s->logits + (serves ? at : TILE) * s->width;
        found[r][0] = read_floats(sums[r]) * t->correction[at];
        found[r][1] = column + LANES < dim ? read_floats(sums[r] + LANES) * t->correction[at] : every(0);
        for (int64_t i = 0; i < PANEL; i += LINE)
            __builtin_prefetch(t->next[at] + column + i, 0, 2);
    }
    multiply(found, weights, panel, depth);
    for (int r = 0; r < STRIP; r++) {
        write_floats(sums[r], found[r][0]);
        if (column + LANES < dim)
            write_floats(sums[r] + LANES, found[r][1]);
    }
}

/* Writes the sums divided by their denominators, and lse. A row without keys gives 0 and -inf. */
static void finish_rows(const Call *c, const State *s) {
    for (int64_t t = 0; t < c->queries; t++)
        for (int64_t h = 0; h < c->group; h++) {
            int64_t row = t * c->group + h;
            float total = s->total[row], largest = s->largest[row];
            float factor = total == 0 ? 0 : (float)c->value_scale / total;
            char *out = c->out + t * c->out_token + h * c->out_head;
            c->lse[t * c->lse_token + h * c->lse_head] = largest == INFINITY ? largest : largest + logf(total);
            for (int64_t i = 0; i < c->dim; i += LANES)
                write_numbers(out, i, c->out_type, read_floats(s->sums + row * c->dim + i) * factor);
        }
}

/* Attends with the queries of a call. */
void attend(const void *call, char *memory) {
    const Call *c = call;
    State s = state_of(c, memory);
    Tile t;
    start_rows(c, &s);
    sort_by_block(c, &s);
    memset(s.logits + TILE * s.width, 0, s.width * 4);
    for (int64_t b = 0, begin = 0; b < s.blocks; begin = s.ends[b++]) {
        int64_t of = (s.ends[b] - begin) * c->group, first = b * c->block_size;
        int64_t count = c->k_len - first < c->block_size ? c->k_len - first : c->block_size;
        if (!of)
            continue;
        for (int64_t k = 0; k < LANES && k < count; k++)
            ask_for(&c->values, first + k, c->dim);
        pack_columns(s.columns, &c->keys, first, count, c->dim);
        int finite = pack_values(s.panels, &c->values, first, count, c->dim);
        for (int64_t row = 0; row < of; row += TILE) {
            find_rows(&t, c, &s, s.order + begin, row, of, first, count);
            multiply_keys(&t, &s, c->dim);
            weigh(&t, &s);
            for (int64_t i = 0; i < c->dim; i += PANEL)
                for (int64_t strip = 0; strip < t.strips; strip++)
                    if (finite)
                        multiply_values(&t, &s, s.panels + i * count, c->dim, i, strip, t.most, -1);
                    else /* A weight of 0 must not meet the NaN or inf of a key that the row does not see. */
                        for (int r = 0; r < STRIP; r++)
                            multiply_values(&t, &s, s.panels + i * count, c->dim, i, strip, t.seen[strip * STRIP + r], r);
        }
    }
    finish_rows(c, &s);
}
