/* The kernels of panels_amx.c with the instructions of tiles in plain C, for tests on any CPU with AVX2.

   The operations are those of Intel's manual: what a tile configuration forbids ends the process, as the instruction
   would. Sums of integers wrap. A product of bfloat16 sums the first values of all pairs and the second ones apart,
   each product and sum rounded once, to nearest even, then adds both, then adds that to the tile; denormal numbers
   count as zeros and become zeros. */

#include "tiles.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NARROW 0
#define FLUSH 0x9fc0 /* control of SSE: denormals are zeros, exceptions are masked, rounding is to nearest even */

typedef struct {
    uint8_t bytes[TILE_ROWS][TILE_BYTES];
    int rows, width;
} Tile;

static _Thread_local Tile tiles[8];

static void forbid(int wrong) {
    if (wrong) __builtin_trap();
}

static void configure_tiles(const void *config) {
    const uint8_t *bytes = config;
    forbid(bytes[0] != 1);
    for (int i = 1; i < 16; i++) forbid(bytes[i] != 0);
    for (int i = 0; i < 8; i++) {
        uint16_t width;
        memcpy(&width, bytes + 16 + 2 * i, 2);
        const int rows = bytes[48 + i];
        forbid(width > TILE_BYTES || rows > TILE_ROWS || !width != !rows);
        memset(tiles + i, 0, sizeof *tiles);
        tiles[i].rows = rows, tiles[i].width = width;
    }
}

static void release_tiles(void) { memset(tiles, 0, sizeof tiles); }

static void zero_tile(int number) {
    forbid(!tiles[number].rows);
    memset(tiles[number].bytes, 0, sizeof tiles[number].bytes);
}

static void load_tile(int number, const char *at, int64_t stride) {
    Tile *t = tiles + number;
    zero_tile(number);
    for (int r = 0; r < t->rows; r++) memcpy(t->bytes[r], at + r * stride, (size_t)t->width);
}

static void store_tile(int number, char *at, int64_t stride) {
    const Tile *t = tiles + number;
    forbid(!t->rows);
    for (int r = 0; r < t->rows; r++) memcpy(at + r * stride, t->bytes[r], (size_t)t->width);
}

static void check_shapes(const Tile *sum, const Tile *a, const Tile *b) {
    forbid(sum == a || sum == b || a == b || !sum->rows || !a->rows || !b->rows || a->width % 4);
    forbid(a->rows != sum->rows || b->width != sum->width || a->width / 4 != b->rows);
}

static void multiply_bytes(int to, int one, int other) {
    Tile *sum = tiles + to;
    const Tile *a = tiles + one, *b = tiles + other;
    check_shapes(sum, a, b);
    uint32_t sums[TILE_ROWS][16];
    memcpy(sums, sum->bytes, sizeof sums);
    for (int k = 0; k < b->rows; k++) {
        int32_t weight[4][16];
        for (int n = 0; n < 16; n++)
            for (int i = 0; i < 4; i++) weight[i][n] = b->bytes[k][4 * n + i];
        for (int m = 0; m < a->rows; m++) {
            const int8_t *x = (const int8_t *)a->bytes[m] + 4 * k;
            const int32_t x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
            for (int n = 0; n < 16; n++)
                sums[m][n] += (uint32_t)(x0 * weight[0][n] + x1 * weight[1][n] + x2 * weight[2][n] + x3 * weight[3][n]);
        }
    }
    memcpy(sum->bytes, sums, sizeof sums);
}

static float widen(const uint8_t *at) {
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Not inlined: the control register is set around it. */
static TARGET __attribute__((noinline)) void multiply_pairs(Tile *sum, const Tile *a, const Tile *b) {
    float sums[TILE_ROWS][16], first[TILE_ROWS][16] = {{0}}, second[TILE_ROWS][16] = {{0}};
    memcpy(sums, sum->bytes, sizeof sums);
    for (int k = 0; k < b->rows; k++) {
        float even[16], odd[16];
        for (int n = 0; n < 16; n++) even[n] = widen(b->bytes[k] + 4 * n), odd[n] = widen(b->bytes[k] + 4 * n + 2);
        for (int m = 0; m < a->rows; m++) {
            const float x0 = widen(a->bytes[m] + 4 * k), x1 = widen(a->bytes[m] + 4 * k + 2);
            for (int n = 0; n < 16; n++) {
                first[m][n] = __builtin_fmaf(x0, even[n], first[m][n]);
                second[m][n] = __builtin_fmaf(x1, odd[n], second[m][n]);
            }
        }
    }
    for (int m = 0; m < a->rows; m++)
        for (int n = 0; n < 16; n++) sums[m][n] += first[m][n] + second[m][n];
    memcpy(sum->bytes, sums, sizeof sums);
}

static void multiply_floats(int to, int one, int other) {
    check_shapes(tiles + to, tiles + one, tiles + other);
    const unsigned held = _mm_getcsr();
    _mm_setcsr(FLUSH);
    multiply_pairs(tiles + to, tiles + one, tiles + other);
    _mm_setcsr(held);
}

#define TILE_CONFIGURE(config) configure_tiles(&config)
#define TILE_RELEASE() release_tiles()
#define TILE_ZERO(t) zero_tile(t)
#define TILE_LOAD(t, at, stride) load_tile(t, at, stride)
#define TILE_STORE(t, at, stride) store_tile(t, at, stride)
#define TILE_CODES(sum, a, b) multiply_bytes(sum, a, b)
#define TILE_FLOATS(sum, a, b) multiply_floats(sum, a, b)

#include "panels_256.inc"
#include "vectors.inc"
#include "tiles.inc"

const TileKernels tiles_amx_emulated = {0, round_rows, arrange, multiply_tiles};

#endif
