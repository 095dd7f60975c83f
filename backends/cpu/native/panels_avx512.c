/* Kernels of CPUs with AVX-512 but without VNNI: Intel's Skylake servers. As with AVX2, two products are added in 16
   bits, so activations with 8-bit codes have 7. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define NARROW 1
#define DOT(acc, codes, x)                                                                                            \
    _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, x), _mm512_set1_epi16(1)))

#include "panels_512.inc"
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

const Kernels panels_avx512 = {round_rows, multiply, rows, attend, join, rotate, flash_floats,
                               0, convolve, delta, adapt};

#endif
