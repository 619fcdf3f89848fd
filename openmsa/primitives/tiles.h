/* SPDX-License-Identifier: MIT */
/* Products of bfloat16 on the matrix tiles of a processor (Intel's AMX). A tile holds 16 rows of 64 bytes. A product takes 16
 * rows of 32 numbers, and 32 rows of 16 numbers as 16 rows of pairs: of each column the numbers of two rows side by side. */

#ifndef OPENMSA_TILES_H
#define OPENMSA_TILES_H

#include "lanes.h"

#define DEPTH 32 /* numbers of a row that one product sums over */

/* TILES says whether the processor has tiles. load_tile and store_tile move tile T, a constant below 8, whose rows lie `apart`
 * bytes apart; add_product adds the product of tiles A and B to the float32 numbers of tile C. */
#if defined(EMULATED_TILES) && LANES == 16
#define TILES 1
static __thread float tile_held[8][16][16];
#define begin_tiles()
#define end_tiles()
#define clear_tile(T) memset(tile_held[T], 0, sizeof tile_held[T])
#define load_tile(T, from, apart) move_tile(T, (char *)(from), apart, 0)
#define store_tile(T, to, apart) move_tile(T, (char *)(to), apart, 1)
#define add_product(C, A, B) multiply_tiles(C, A, B)

static void move_tile(int tile, char *at, int64_t apart, int stores) {
    for (int r = 0; r < 16; r++)
        memcpy(stores ? at + r * apart : (char *)tile_held[tile][r], stores ? (char *)tile_held[tile][r] : at + r * apart, 64);
}

static float number_of(int tile, int row, int i) {
    uint16_t code;
    uint32_t bits;
    float number;
    memcpy(&code, (char *)tile_held[tile][row] + 2 * i, 2);
    bits = (uint32_t)code << 16;
    memcpy(&number, &bits, 4);
    return number;
}

static void multiply_tiles(int sums, int a, int b) {
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) { /* The processor adds two sums, those of even and of odd numbers. */
            float even = 0, odd = 0;
            for (int k = 0; k < DEPTH; k += 2) {
                even += number_of(a, m, k) * number_of(b, k / 2, 2 * n);
                odd += number_of(a, m, k + 1) * number_of(b, k / 2, 2 * n + 1);
            }
            tile_held[sums][m][n] += even + odd;
        }
}

static int tiles_allowed(void) { return 1; }
#elif defined(__AMX_BF16__) && defined(__linux__) && LANES == 16
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#define end_tiles() _tile_release()
#define clear_tile(T) _tile_zero(T)
#define load_tile(T, from, apart)                                                                \
    do {                                                                                         \
        __asm__ volatile("" : : : "memory"); /* GCC's own form does not say that memory is read. */ \
        _tile_loadd(T, from, apart);                                                             \
    } while (0)
#define store_tile(T, to, apart) _tile_stored(T, to, apart)
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
#define TILES 0
static int tiles_allowed(void) { return 0; }
#endif

/* Says whether a library with this file multiplies on tiles. */
int64_t multiplies_on_tiles(void) { return tiles_allowed(); }

#if TILES
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
