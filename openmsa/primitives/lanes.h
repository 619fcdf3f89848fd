/* SPDX-License-Identifier: MIT */
/* Vectors of float32 for the C kernels of a CPU, in the vector extensions of GCC and Clang: numbers of keys as they are stored,
 * the exponential, and a product of a few rows with a panel of keys, whose sums stay in registers. */

#ifndef OPENMSA_LANES_H
#define OPENMSA_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h> /* GCC widens small numbers by these instructions alone. */
#endif

/* LANES: float32 numbers of a vector. STRIP: rows that are multiplied at a time; their sums and a key's numbers fill most of
 * the vector registers. */
#if defined(__AVX512F__)
#define LANES 16
#define STRIP 8
#elif defined(__AVX__)
#define LANES 8
#define STRIP 6
#elif defined(__aarch64__)
#define LANES 4
#define STRIP 8
#else
#define LANES 4
#define STRIP 6
#endif

#define PANEL (2 * LANES)     /* columns that are multiplied at a time */
#define TILE (8 * STRIP)      /* rows whose logits or scores are held at a time */
#define LARGEST_BLOCK 256     /* keys */
#define LARGEST_DIM 256       /* a multiple of 16 */
#define LINE 16               /* float32 numbers of a cache line */
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));

/* How a number is stored; openmsa/primitives/cpu_rows.py has the same list. */
enum { FLOAT32, BFLOAT16, FLOAT16, E4M3 };
static const int64_t SIZES[] = {4, 2, 2, 1};

/* Does DO(TYPE), a macro that ends with a semicolon, for a type that the compiler then knows. */
#define BY_TYPE(type, DO)              \
    switch (type) {                    \
    case FLOAT32: DO(FLOAT32) break;   \
    case BFLOAT16: DO(BFLOAT16) break; \
    case FLOAT16: DO(FLOAT16) break;   \
    case E4M3: DO(E4M3) break;         \
    }

/* Keys or values of a sequence: packed, one long run of rows, or in pages, runs of `run` rows. Distances are bytes: from a page
 * of the pool to the next, from a head to the next, from a row to the next. */
typedef struct {
    const char *first;    /* the first row of head 0, of the sequence or of page 0 */
    const int32_t *pages; /* the sequence's pages, in order; packed: 0 */
    int64_t page, head, stride, run, type;
} Rows;

INLINE Rows of_head(Rows rows, int64_t head) {
    rows.first += head * rows.head;
    return rows;
}

INLINE const char *row_at(const Rows *rows, int64_t key) {
    if (!rows->pages)
        return rows->first + key * rows->stride;
    return rows->first + rows->pages[key / rows->run] * rows->page + key % rows->run * rows->stride;
}

/* Asks memory for a row that is read soon. */
INLINE void ask_for(const Rows *rows, int64_t key, int64_t dim) {
    const char *from = row_at(rows, key);
    for (int64_t i = 0; i < dim * SIZES[rows->type]; i += 64)
        __builtin_prefetch(from + i, 0, 2);
}

INLINE floats every(float x) { return x - (floats){0}; }

INLINE floats either(ints which, floats yes, floats no) { return (floats)((which & (ints)yes) | (~which & (ints)no)); }

/* The greater number of each lane; `b` where `a` is NaN. */
INLINE floats greater(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b); /* GCC makes three instructions of the other form. */
#else
    return either(a > b, a, b);
#endif
}

/* sums + a * b, rounded once where a processor can. Left to the compiler, what stands around a sum decides whether it is, so
 * that a row alone could have other bits than beside others. */
INLINE floats fused(floats sums, floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__FMA__) && defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#else
    return sums + a * b;
#endif
}

INLINE floats read_floats(const float *from) {
    floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void write_floats(float *to, floats x) { memcpy(to, &x, sizeof x); }

/* Reads LANES whole numbers of `size` bytes, 1 or 2. */
INLINE words read_codes(const char *from, int size) {
#if defined(__AVX512F__)
    if (size == 2)
        return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    if (size == 2)
        return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#endif
    words found;
    for (int i = 0; i < LANES; i++)
        found[i] = size == 1 ? ((const uint8_t *)from)[i] : ((const uint16_t *)from)[i];
    return found;
}

#if defined(__F16C__)
/* Reads LANES numbers of float16 or E4M3, which becomes float16 first: its exponent has a bias of 7 instead of 15. */
INLINE floats read_halves(const char *from, int64_t i, int64_t type) {
    shorts half;
    if (type == E4M3) {
#if LANES == 16
        shorts code = (shorts)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(from + i)));
#else
        shorts code = (shorts)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(from + i)));
#endif
        half = ((code << 8) >> 1 & (int16_t)0xbf80) | (((code & 0x7f) == 0x7f) & 0x7c00); /* the code 0x7f is NaN */
    } else {
        memcpy(&half, from + 2 * i, sizeof half);
    }
#if LANES == 16
    floats x = (floats)_mm512_cvtph_ps((__m256i)half);
#else
    floats x = (floats)_mm256_cvtph_ps((__m128i)half);
#endif
    return type == E4M3 ? x * 0x1p8f : x;
}
#endif

/* Reads LANES numbers of a type, which the compiler should know, from number i on. */
INLINE floats read_numbers(const char *from, int64_t i, int64_t type) {
    if (type == FLOAT32)
        return read_floats((const float *)from + i);
#if defined(__F16C__)
    if (type == E4M3 || type == FLOAT16)
        return read_halves(from, i, type);
#endif
    if (type == E4M3) { /* Its exponent is that of float32 but for a bias of 7 instead of 127. */
        words code = read_codes(from + i, 1);
        floats magnitude = (floats)((code & 0x7f) << 20) * 0x1p120f;
        ints nan = (ints)((code & 0x7f) == 0x7f) & 0x7fc00000;
        return (floats)((ints)magnitude | nan | (ints)((code & 0x80) << 24));
    }
    words code = read_codes(from + 2 * i, 2);
    if (type == BFLOAT16)
        return (floats)(code << 16);
    floats magnitude = (floats)((code & 0x7fff) << 13) * 0x1p112f; /* a bias of 15 */
    ints not_finite = (ints)((code & 0x7c00) == 0x7c00) & 0x7f800000;
    return (floats)((ints)magnitude | not_finite | (ints)((code & 0x8000) << 16));
}

/* Writes LANES numbers from number i on, rounded to nearest, ties to even. */
INLINE void write_numbers(char *to, int64_t i, int64_t type, floats x) {
    if (type == FLOAT32) {
        write_floats((float *)to + i, x);
        return;
    }
    words bits = (words)x, sign = bits & 0x80000000, magnitude = bits & 0x7fffffff;
    words nan = (words)(magnitude > 0x7f800000), found;
    if (type == BFLOAT16) {
        found = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    } else {
        words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
        words tiny = (words)((floats)magnitude + 0.5f) - 0x3f000000; /* the addition rounds to steps of 2**-24 */
        words is_tiny = (words)(magnitude < 0x38800000), is_large = (words)(magnitude >= 0x477ff000);
        found = (is_tiny & tiny) | (~is_tiny & ((is_large & 0x7c00) | (~is_large & normal)));
    }
    found = (nan & (type == BFLOAT16 ? 0x7fc0 : 0x7e00)) | (~nan & found) | sign >> 16;
    halves stored = __builtin_convertvector(found, halves);
    memcpy(to + 2 * i, &stored, sizeof stored);
}

/* exp(x), to 2 units in the last place; 0 below -87; NaN stays. x is at most 88. */
INLINE floats exponential(floats x) {
    const floats low = every(-87.0f);
    floats clamped = either(x < low, low, x);
    floats shifted = clamped * 1.44269504f + 0x1.8p23f; /* the nearest whole number n stands in the low bits */
    floats n = shifted - 0x1.8p23f;
    floats rest = clamped - n * 0x1.62e4p-1f; /* ln 2 in two parts, of which the first has few bits */
    rest -= n * 1.42860677e-6f;
    floats sum = every(1.381459879e-3f);
    sum = sum * rest + 8.368716575e-3f;
    sum = sum * rest + 4.166838899e-2f;
    sum = sum * rest + 1.666652113e-1f;
    sum = sum * rest + 4.999999404e-01f;
    sum = sum * (rest * rest) + rest;
    sum = sum + 1.0f;
    return (floats)((ints)((words)sum + ((words)shifted << 23)) & ~(ints)(x < low));
}

INLINE float greatest_lane(floats x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++)
        found = x[i] > found ? x[i] : found;
    return found;
}

INLINE float sum_of_lanes(floats x) {
    float lanes[LANES];
    write_floats(lanes, x);
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            lanes[i] += lanes[i + n];
    return lanes[0];
}

INLINE void multiply_rows(floats sums[][2], const float *const *rows, int count, const float *panel, int64_t depth) {
    const float *row[STRIP];
    floats held[STRIP][2];
    for (int r = 0; r < count; r++) {
        row[r] = rows[r];
        held[r][0] = sums[r][0], held[r][1] = sums[r][1];
    }
    for (int64_t i = 0; i < depth; i++, panel += PANEL) {
        floats low = read_floats(panel), high = read_floats(panel + LANES);
        for (int r = 0; r < count; r++) {
            floats x = every(row[r][i]);
            held[r][0] = fused(held[r][0], x, low);
            held[r][1] = fused(held[r][1], x, high);
        }
    }
    for (int r = 0; r < count; r++)
        sums[r][0] = held[r][0], sums[r][1] = held[r][1];
}

/* sums[r] += the sum over i < depth of rows[r][i] * panel[i]: [STRIP, PANEL] += [STRIP, depth] @ [depth, PANEL]. A row's
 * sums do not depend on the other rows. */
static __attribute__((noinline)) void multiply(floats sums[STRIP][2], const float *const rows[STRIP], const float *panel,
                                               int64_t depth) {
    multiply_rows(sums, rows, STRIP, panel, depth);
}

/* Does the same for the first half of the rows alone. */
static __attribute__((noinline)) void multiply_half(floats sums[STRIP][2], const float *const rows[STRIP], const float *panel,
                                                    int64_t depth) {
    multiply_rows(sums, rows, STRIP / 2, panel, depth);
}

/* Converts a row of dim numbers times `factor`, which is 1 where there is none. */
static void convert_row(float *to, const char *from, int64_t dim, int64_t type, float factor) {
#define CONVERT(TYPE)                        \
    for (int64_t i = 0; i < dim; i += LANES) \
        write_floats(to + i, read_numbers(from, i, TYPE) * factor);
    BY_TYPE(type, CONVERT)
#undef CONVERT
}

/* Writes queries [queries, group, dim], whose strides are in bytes, as rows [queries * group, dim] times the factor of each
 * head of the group, and a row of zeros behind them. */
static void convert_queries(float *to, const char *q, int64_t q_token, int64_t q_head, int64_t type, const float *scales,
                            int64_t queries, int64_t group, int64_t dim) {
    for (int64_t t = 0; t < queries; t++)
        for (int64_t h = 0; h < group; h++)
            convert_row(to + (t * group + h) * dim, q + t * q_token + h * q_head, dim, type, scales[h]);
    memset(to + queries * group * dim, 0, dim * 4);
}

/* Returns the last key that the query at a position sees; below 0: none. */
INLINE int64_t last_key_at(int64_t position, int64_t k_len) { return position < k_len ? position : k_len - 1; }

/* Takes lane l of `b` where l has the bit `with`, a power of two, and of `a` elsewhere; but the lane `swap_a` or `swap_b`, 0
 * or a power of two, away from it. */
INLINE floats lanes_of(floats a, floats b, int with, int swap_a, int swap_b) {
    ints from;
    for (int i = 0; i < LANES; i++)
        from[i] = i & with ? LANES + (i ^ swap_b) : i ^ swap_a;
#ifdef __clang__
    floats found;
    for (int i = 0; i < LANES; i++)
        found[i] = from[i] < LANES ? a[from[i]] : b[from[i] - LANES];
    return found;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* Does STEP(distance), whose distance the compiler must know, for each power of two below LANES, the greatest first. */
#if LANES == 16
#define EACH_DISTANCE(STEP) STEP(8) STEP(4) STEP(2) STEP(1)
#elif LANES == 8
#define EACH_DISTANCE(STEP) STEP(4) STEP(2) STEP(1)
#else
#define EACH_DISTANCE(STEP) STEP(2) STEP(1)
#endif

/* Exchanges the number of a vector and that of a lane. */
INLINE void transpose(floats x[LANES]) {
#define EXCHANGE(DISTANCE)                                            \
    for (int i = 0; i < LANES; i++)                                   \
        if (!(i & DISTANCE)) {                                        \
            floats a = x[i], b = x[i + DISTANCE];                     \
            x[i] = lanes_of(a, b, DISTANCE, 0, DISTANCE);             \
            x[i + DISTANCE] = lanes_of(a, b, DISTANCE, DISTANCE, 0);  \
        }
    EACH_DISTANCE(EXCHANGE)
#undef EXCHANGE
}

/* Some keys, or their values, that follow each other. */
typedef struct {
    int64_t first, count;
} Run;

/* Asks memory for the rows i to i + LANES of a run that is read later. */
INLINE void ask_ahead(const Rows *rows, Run later, int64_t i, int64_t dim) {
    for (int64_t j = i; j < i + LANES && j < later.count; j++)
        ask_for(rows, later.first + j, dim);
}

/* Does what pack_columns does for keys of a type. */
INLINE void pack_typed(float *panels, const Rows *keys, Run run, Run later, int64_t dim, int64_t type) {
    int64_t count = run.count;
    for (int64_t k = 0; k < (count + PANEL - 1) / PANEL * PANEL; k += LANES) {
        const char *from[LANES];
        for (int64_t j = 0; j < LANES; j++)
            from[j] = k + j < count ? row_at(keys, run.first + k + j) : 0;
        ask_ahead(keys, later, k, dim);
        for (int64_t i = 0; i < dim; i += LANES) {
            floats x[LANES];
            for (int j = 0; j < LANES; j++)
                x[j] = from[j] ? read_numbers(from[j], i, type) : every(0);
            transpose(x);
            for (int j = 0; j < LANES; j++)
                write_floats(panels + k / PANEL * dim * PANEL + (i + j) * PANEL + k % PANEL, x[j]);
        }
    }
}

/* Writes a run of keys as panels [keys / PANEL, dim, PANEL], zeros up to a whole panel, and asks memory for a later run. */
static void pack_columns(float *panels, const Rows *keys, Run run, Run later, int64_t dim) {
#define PACK(TYPE) pack_typed(panels, keys, run, later, dim, TYPE);
    BY_TYPE(keys->type, PACK)
#undef PACK
}

/* Calls of a function, each of so many pieces, which threads share: each thread takes the next piece when it is done with one,
 * so that a busy core makes fewer. memory: `bytes` for each thread. */
typedef struct {
    void (*function)(const void *call, int64_t piece, char *memory);
    const void *const *calls;
    int64_t count, pieces, most_threads, bytes;
    char *memory;
    int64_t next, threads; /* 0 at first: pieces that were taken, and threads that serve */
} Work;

/* Makes pieces until none is left. Every thread runs it. */
void serve(Work *work) {
    char *memory = work->memory + __atomic_fetch_add(&work->threads, 1, __ATOMIC_RELAXED) * work->bytes;
    for (;;) {
        int64_t i = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (i >= work->count * work->pieces)
            return;
        work->function(work->calls[i / work->pieces], i % work->pieces, memory);
    }
}

/* Does one work after the other. parallel: GOMP_parallel, or 0, where one thread serves. */
void serve_in_turn(Work *works, int64_t count, void (*parallel)(void (*)(Work *), Work *, unsigned, unsigned)) {
    for (Work *work = works; work < works + count; work++)
        if (parallel && work->most_threads > 1)
            parallel(serve, work, (unsigned)work->most_threads, 0);
        else
            serve(work);
}

/* Hands out pieces of memory that begin at cache lines. */
static void *take(char **memory, int64_t size) {
    char *found = (char *)(((uintptr_t)*memory + 63) & ~(uintptr_t)63);
    *memory = found + size;
    return found;
}

#endif
