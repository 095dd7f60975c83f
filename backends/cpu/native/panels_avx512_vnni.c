/* Kernels of CPUs with AVX-512 and VNNI: Intel from Ice Lake and Cascade Lake on, AMD from Zen 4 on. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define NARROW 0
/* Not the intrinsic: compilers would copy sums between registers at the end of each step. */
#define DOT(acc, codes, x)                                                                                            \
    ({                                                                                                                \
        __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));                                               \
        acc;                                                                                                          \
    })

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

#ifndef WITHOUT_PANELS_AVX512_BF16
#define FLASH_PAIRS flash_avx512_bf16
#else
#define FLASH_PAIRS 0
#endif

const Kernels panels_avx512_vnni = {round_rows, multiply, rows, attend, join, rotate, flash_floats,
                                    FLASH_PAIRS, convolve, delta, adapt};

#endif
