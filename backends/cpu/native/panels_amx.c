/* Products by the tiles of AMX: Intel's server CPUs from Sapphire Rapids on. */

#include "tiles.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET                                                                                                        \
    __attribute__((target("amx-tile,amx-int8,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define NARROW 0

/* Compilers' intrinsics do not all say which memory they read (gcc 12's _tile_loadconfig: 8 of 64 bytes, _tile_loadd:
   none), so that stores before them could be moved or left out. Here the whole configuration is an operand. */
#define WRITTEN(at) __asm__ volatile("" ::"r"(at) : "memory")
#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config))
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, at, stride)                                                                                      \
    do {                                                                                                              \
        WRITTEN(at);                                                                                                  \
        _tile_loadd(t, at, (size_t)(stride));                                                                         \
    } while (0)
#define TILE_STORE(t, at, stride)                                                                                     \
    do {                                                                                                              \
        _tile_stored(t, at, (size_t)(stride));                                                                        \
        WRITTEN(at);                                                                                                  \
    } while (0)
#define TILE_CODES(sum, a, b) _tile_dpbsud(sum, a, b)
#define TILE_FLOATS(sum, a, b) _tile_dpbf16ps(sum, a, b)

#include "panels_512.inc"
#include "vectors.inc"
#include "tiles.inc"

const TileKernels tiles_amx = {4, round_rows, arrange, multiply_tiles};

#endif
