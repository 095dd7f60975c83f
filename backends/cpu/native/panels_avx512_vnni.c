/* Kernels of CPUs with AVX-512 and VNNI: Intel from Ice Lake and Cascade Lake on, AMD from Zen 4 on. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define NARROW 0
/* Not the intrinsic: compilers would copy sums from register to register at the end of each step. */
#define DOT(acc, codes, x)                                                                                            \
    ({                                                                                                                \
        __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));                                               \
        acc;                                                                                                          \
    })

#include "panels_512.inc"
#include "panels.inc"
#include "rows.inc"
#include "attend.inc"
#include "turn.inc"

#define PAIRS 0
#include "flash.inc"
#undef PAIRS
#undef TARGET
#define PAIRS 1
#define TARGET                                                                                                        \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")))
#include "flash.inc"

const Kernels panels_avx512_vnni = {round_rows, multiply, rows, attend, join, turn, flash_floats, flash_pairs};

#endif
