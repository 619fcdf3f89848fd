/* SPDX-License-Identifier: MIT */
/* Attention KV-outer of the queries of one KV head: blocks are taken one after another, and the queries that selected a block
 * are attended to it. Each row, a query of a head, keeps its greatest logit, its denominator and its sum of values, which are
 * corrected when a greater logit comes. A tile's logits stay in cache from their product to that with values. */

#include "cpu_units.h"

/* The state of a call in its memory. */
typedef struct {
    float *q, *sums;         /* [rows + 1, dim]: queries times scale, and sums of values; the last row is one of padding */
    float *largest, *total;  /* [rows]: the greatest logit and the denominator */
    float *columns, *panels; /* a block's keys as panels of columns, and its values as panels [dim / PANEL, keys, PANEL] */
    float *logits;           /* [TILE + 1, width]; the last row is zeros */
    int64_t rows, width;
    Pairs pairs;
    char *end;
} State;

/* The rows of a tile. */
typedef struct {
    int64_t count, strips;
    int64_t row[TILE];
    const float *q[TILE], *next[TILE]; /* next: queries of the next tile, or others */
    float *sums[TILE];
    float correction[TILE];
    int64_t seen[TILE], most, least;   /* keys of the block that each row sees, and the most and the least of them */
} Tile;

static State state_of(const Call *c, char *memory) {
    State s;
    char *at = memory;
    int64_t dim = c->dim, padded = (dim + PANEL - 1) / PANEL * PANEL;
    s.rows = c->queries * c->group;
    s.q = take(&at, (s.rows + 1) * dim * 4);
    s.sums = take(&at, (s.rows + 1) * dim * 4);
    s.largest = take(&at, s.rows * 4);
    s.total = take(&at, s.rows * 4);
    s.pairs = pairs_in(c, &at);
    s.width = (c->block_size + PANEL - 1) / PANEL * PANEL + LINE; /* Rows lie in different sets of the cache. */
    s.columns = take(&at, s.width * dim * 4);
    s.panels = take(&at, c->block_size * padded * 4);
    s.logits = take(&at, (TILE + 1) * s.width * 4);
    s.end = at;
    return s;
}

static void start_rows(const Call *c, State *s) {
    convert_queries(s->q, c->q, c->q_token, c->q_head, c->q_type, c->scales, c->queries, c->group, c->dim);
    memset(s->sums, 0, (s->rows + 1) * c->dim * 4);
    for (int64_t r = 0; r < s->rows; r++)
        s->largest[r] = -INFINITY, s->total[r] = 0;
}

/* Does what pack_values does for values of a type. */
INLINE void pack_rows(float *panels, const Rows *values, Run block, Run later, int64_t dim, int64_t type) {
    for (int64_t k = 0; k < block.count; k++) {
        const char *from = row_at(values, block.first + k);
        if (k % LANES == 0)
            ask_ahead(values, later, k, dim);
        for (int64_t i = 0; i < dim; i += PANEL) {
            float *to = panels + i * block.count + k * PANEL;
            write_floats(to, read_numbers(from, i, type));
            write_floats(to + LANES, i + LANES < dim ? read_numbers(from, i + LANES, type) : every(0));
        }
    }
}

/* Writes a block's values as panels, with zeros behind dim, and asks memory for those of a later block. */
static void pack_values(float *panels, const Rows *values, Run block, Run later, int64_t dim) {
#define PACK(TYPE) pack_rows(panels, values, block, later, dim, TYPE);
    BY_TYPE(values->type, PACK)
#undef PACK
}

/* Says whether numbers, as many as a multiple of LANES, are finite. */
static int all_finite(const float *numbers, int64_t count) {
    ints odd = {0};
    for (int64_t i = 0; i < count; i += LANES)
        odd |= (read_floats(numbers + i) - read_floats(numbers + i)) != 0.0f;
    int found = 0;
    for (int i = 0; i < LANES; i++)
        found |= odd[i];
    return !found;
}

/* Finds the tile of the rows from `first` on of the `of` rows whose queries stand in `pairs`. */
static void find_rows(Tile *t, const Call *c, const State *s, const int64_t *pairs, int64_t first, int64_t of, Run block) {
    t->count = of - first < TILE ? of - first : TILE;
    t->strips = (t->count + STRIP - 1) / STRIP;
    t->most = 0, t->least = block.count;
    for (int64_t r = 0; r < TILE; r++) {
        int64_t row = s->rows, after = first + TILE + r < of ? first + TILE + r : of - 1;
        t->seen[r] = 0;
        if (r < t->count) {
            int64_t query = (int32_t)pairs[(first + r) / c->group], sees = last_key(c, query) - block.first + 1;
            row = query * c->group + (first + r) % c->group;
            t->seen[r] = sees < block.count ? sees : block.count;
        }
        t->row[r] = row;
        t->q[r] = s->q + row * c->dim;
        t->sums[r] = s->sums + row * c->dim;
        t->next[r] = s->q + ((int32_t)pairs[after / c->group] * c->group + after % c->group) * c->dim;
        t->most = t->seen[r] > t->most ? t->seen[r] : t->most;
        t->least = r < t->count && t->seen[r] < t->least ? t->seen[r] : t->least;
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
            (t->count <= STRIP / 2 ? multiply_half : multiply)(found, t->q + strip * STRIP, s->columns + p * PANEL * dim, dim);
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
    (t->count <= STRIP / 2 ? multiply_half : multiply)(found, weights, panel, depth);
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
            float factor = total == 0 ? 0 : *c->value_scales / total;
            char *out = c->out + t * c->out_token + h * c->out_head;
            if (c->lse)
                c->lse[t * c->lse_token + h * c->lse_head] = largest == INFINITY ? largest : largest + logf(total);
            for (int64_t i = 0; i < c->dim; i += LANES)
                write_numbers(out, i, c->out_type, read_floats(s->sums + row * c->dim + i) * factor);
        }
}

/* Returns what a KV head and its queries are to a call. */
static Call of_kv_head(const Call *call, int64_t head) {
    Call c = *call;
    int64_t first = head * c.group;
    c.q += first * c.q_head;
    c.scales += first;
    c.ids += head * c.ids_head;
    c.keys = of_head(c.keys, head);
    c.values = of_head(c.values, head);
    c.value_scales += head;
    c.out += first * c.out_head;
    c.lse += c.lse ? first * c.lse_head : 0;
    return c;
}

/* Attends with the queries of a KV head. */
static void attend_rows(const Call *c, char *memory) {
    State s = state_of(c, memory);
    Tile t;
    start_rows(c, &s);
    memset(s.logits + TILE * s.width, 0, s.width * 4);
    sort_pairs(c, &s.pairs);
    Run block = first_block(c, &s.pairs), later;
    for (int64_t pair = 0, next; pair < s.pairs.count; pair = next, block = later) {
        next = end_of(&s.pairs, pair);
        later = block_of(c, &s.pairs, next);
        pack_columns(s.columns, &c->keys, block, later, c->dim);
        pack_values(s.panels, &c->values, block, later, c->dim);
        int finite = -1; /* not known */
        for (int64_t row = 0, of = (next - pair) * c->group; row < of; row += TILE) {
            find_rows(&t, c, &s, s.pairs.at + pair, row, of, block);
            multiply_keys(&t, &s, c->dim);
            weigh(&t, &s);
            if (t.least < t.most && finite < 0)
                finite = all_finite(s.panels, block.count * ((c->dim + PANEL - 1) / PANEL * PANEL));
            for (int64_t i = 0; i < c->dim; i += PANEL)
                for (int64_t strip = 0; strip < t.strips; strip++)
                    if (t.least == t.most || finite)
                        multiply_values(&t, &s, s.panels + i * block.count, c->dim, i, strip, t.most, -1);
                    else /* A weight of 0 must not meet the NaN or inf of a key that the row does not see. */
                        for (int r = 0; r < STRIP; r++)
                            multiply_values(&t, &s, s.panels + i * block.count, c->dim, i, strip, t.seen[strip * STRIP + r], r);
        }
    }
    finish_rows(c, &s);
}

/* Returns how many bytes of memory a piece of a call needs. */
int64_t memory_bytes(const Call *c) {
#if defined(TILES)
    if (on_tiles(c))
        return units_of(c, 0).end - (char *)0 + 64;
#endif
    return state_of(c, 0).end - (char *)0 + 64;
}

/* Attends with the queries of a call. A piece is a KV head. */
void attend(const void *call, int64_t piece, char *memory) {
    const Call c = of_kv_head(call, piece);
#if defined(TILES)
    if (on_tiles(&c)) {
        attend_units(&c, memory);
        return;
    }
#endif
    attend_rows(&c, memory);
}
