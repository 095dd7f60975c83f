/* Kernels of CPUs with AVX-VNNI and without AVX-512: Intel's clients from Alder Lake on. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define NARROW 0
#define DOT(acc, codes, x) _mm256_dpbusd_avx_epi32(acc, codes, x)

#include "panels_256.inc"
#include "panels.inc"

const Kernels panels_avx_vnni = {round_rows, multiply};

#endif
