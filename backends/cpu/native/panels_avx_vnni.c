/* Kernels of CPUs with AVX-VNNI but without AVX-512: Intel's client CPUs from Alder Lake on. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define NARROW 0
/* Not the intrinsic: compilers would copy sums between registers at the end of each step. */
#define DOT(acc, codes, x)                                                                                            \
    ({                                                                                                                \
        __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(codes), "x"(x));                                       \
        acc;                                                                                                          \
    })

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

const Kernels panels_avx_vnni = {round_rows, multiply, rows, attend, join, rotate, flash_floats,
                                 0, convolve, delta, adapt};

#endif
