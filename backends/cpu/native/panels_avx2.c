/* Kernels of CPUs with AVX2 only. Two products are added in 16 bits, so activations with 8-bit codes have 7 bits: 2
   * 255 * 63 fits, 2 * 255 * 127 does not. Codes of 4 bits are at most 15 and allow 8. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NARROW 1
#define ONES _mm256_set1_epi16(1)
#define DOT(acc, codes, x) _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, x), ONES))
/* Without the conversion to 32 bits after each step, which takes as long as the products. Not the intrinsics: compilers
   would add the products of several steps first, and keep sums in memory for lack of registers. */
#define SHORT_DOT(acc, codes, x)                                                                                      \
    ({                                                                                                                \
        __m256i pairs;                                                                                                \
        __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(pairs) : "x"(codes), "x"(x));         \
        acc;                                                                                                          \
    })
#define SHORT_PAIRS(sums) _mm256_madd_epi16(sums, ONES)

#include "panels_256.inc"
#include "vectors.inc"
#include "panels.inc"
#include "rows.inc"
#include "rotary.inc"

#define PAIRS 0
#include "register_tiles.inc"
#include "attend.inc"
#include "flash.inc"
#include "recurrent.inc"
#include "adapters.inc"

const Kernels panels_avx2 = {round_rows, multiply, rows, attend, join, rotate, flash_floats, 0, convolve, delta, adapt};

#endif
