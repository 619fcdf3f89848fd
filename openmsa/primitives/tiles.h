/* SPDX-License-Identifier: MIT */
/* Products of tiles of bfloat16, on the matrix tiles of a processor (Intel's AMX) or by its products of pairs (AVX-512 BF16). A
 * tile holds 16 rows of 64 bytes. A product takes 16 rows of 32 numbers, and 32 rows of 16 numbers as 16 rows of pairs: of each
 * column the numbers of two rows side by side. */

#ifndef OPENMSA_TILES_H
#define OPENMSA_TILES_H

#include "lanes.h"

#define DEPTH 32 /* numbers of a row that one product sums over */

/* TILES says whether products are made so, and by what. Tiles 0 to 3 hold sums, float32 numbers, tiles 4 to 7 factors; T, a
 * constant, names one, whose rows lie `apart` bytes apart in memory. A function that multiplies begins with USE_TILES. A factor
 * stays where it lies until its last product. add_product adds the product of factors A and B to the sums of C. */
#if LANES == 16 && (defined(EMULATED_TILES) || (defined(__AVX512BF16__) && !defined(__AMX_BF16__)))
#define TILES "AVX-512 BF16"
#define begin_tiles()
#define end_tiles()
#define USE_TILES Held held;
#define clear_sums(T) memset(held.sums[T], 0, sizeof held.sums[T])
#define load_sums(T, from, apart) move_sums(held.sums[T], (char *)(from), apart, 0)
#define store_sums(T, to, apart) move_sums(held.sums[T], (char *)(to), apart, 1)
#define load_factor(T, from, apart) held.factors[T - 4] = (Factor){from, apart}
#define add_product(C, A, B) add_held(held.sums[C], held.factors[A - 4], held.factors[B - 4])

typedef struct {
    const char *rows;
    int64_t apart;
} Factor;

typedef struct {
    floats sums[4][16];
    Factor factors[4];
} Held;

INLINE void move_sums(floats sums[16], char *at, int64_t apart, int stores) {
    for (int r = 0; r < 16; r++)
        memcpy(stores ? at + r * apart : (char *)&sums[r], stores ? (char *)&sums[r] : at + r * apart, 64);
}

#if defined(EMULATED_TILES)
static float number_of(Factor factor, int row, int i) {
    uint16_t code;
    uint32_t bits;
    float number;
    memcpy(&code, factor.rows + row * factor.apart + 2 * i, 2);
    bits = (uint32_t)code << 16;
    memcpy(&number, &bits, 4);
    return number;
}

static void add_held(floats sums[16], Factor a, Factor b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) { /* A processor with tiles adds two sums, those of even and of odd numbers. */
            float even = 0, odd = 0;
            for (int k = 0; k < DEPTH; k += 2) {
                even += number_of(a, m, k) * number_of(b, k / 2, 2 * n);
                odd += number_of(a, m, k + 1) * number_of(b, k / 2, 2 * n + 1);
            }
            sums[m][n] += even + odd;
        }
}
#else
/* One instruction adds the products of two numbers of a row with two rows of pairs. */
INLINE void add_held(floats sums[16], Factor a, Factor b) {
    floats held[16];
    for (int m = 0; m < 16; m++)
        held[m] = sums[m];
    for (int64_t k = 0; k < DEPTH / 2; k++) {
        words pairs = (words)read_floats((const float *)(b.rows + k * b.apart));
        for (int m = 0; m < 16; m++) {
            uint32_t pair;
            memcpy(&pair, a.rows + m * a.apart + 4 * k, 4);
            held[m] = (floats)_mm512_dpbf16_ps((__m512)held[m], (__m512bh)pairs, (__m512bh)(pair - (words){0}));
        }
    }
    for (int m = 0; m < 16; m++)
        sums[m] = held[m];
}
#endif

static int tiles_allowed(void) { return 1; }
#elif defined(__AMX_BF16__) && defined(__linux__) && LANES == 16
#include <sys/syscall.h>
#include <unistd.h>
#define TILES "AMX tiles"
#define end_tiles() _tile_release()
#define USE_TILES
#define clear_sums(T) _tile_zero(T)
#define load_sums(T, from, apart) load_factor(T, from, apart)
#define load_factor(T, from, apart)                                                              \
    do {                                                                                         \
        __asm__ volatile("" : : : "memory"); /* GCC's own form does not say that memory is read. */ \
        _tile_loadd(T, from, apart);                                                             \
    } while (0)
#define store_sums(T, to, apart) _tile_stored(T, to, apart)
#define add_product(C, A, B) _tile_dpbf16ps(C, A, B)

/* Asks the kernel once for the use of tiles, which a process needs; says whether it allows it. */
static int tiles_allowed(void) {
    static int known; /* 0: not asked, 1: yes, 2: no. Threads that ask at the same time get the same answer. */
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        found = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* the tiles' data */) ? 2 : 1;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 1;
}

/* Makes the thread's tiles those of this file, until end_tiles. */
INLINE void begin_tiles(void) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++)
        all.row_bytes[i] = 64, all.rows[i] = 16;
    __asm__ volatile("" : : "r"(&all) : "memory"); /* GCC's own form says that it reads the first 8 bytes alone. */
    _tile_loadconfig(&all);
}
#else
static int tiles_allowed(void) { return 0; }
#endif

/* Says by what a library with this file multiplies tiles, "" where it does not. */
const char *multiplies_tiles_by(void) {
#if defined(TILES)
    if (tiles_allowed())
        return TILES;
#endif
    return "";
}

#if defined(TILES)
/* Writes a tile whose row i has number i of each vector. Pairs are moved as if they were numbers. */
INLINE void write_turned(char *tile, floats x[LANES]) {
    transpose(x);
    for (int i = 0; i < LANES; i++)
        write_floats((float *)(tile + 64 * i), x[i]);
}

/* Writes 16 rows of DEPTH numbers of bfloat16, each where `rows` says, as a tile of pairs: row i has numbers 2 i and 2 i + 1 of
 * each of the 16. A row whose address is 0 is zeros. */
INLINE void write_pairs(char *tile, const char *const *rows, int64_t offset) {
    floats x[LANES];
    for (int i = 0; i < LANES; i++)
        x[i] = rows[i] ? read_floats((const float *)(rows[i] + offset)) : every(0);
    write_turned(tile, x);
}
#endif

#endif
