/* Kernels that multiply pairs of bfloat16 on CPUs with AVX512_BF16: dense weights, and attention. */

#include "dense.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#define PAIRS 1

#include "panels_512.inc"
#include "vectors.inc"
#include "dense.inc"
#include "pack.inc"
#undef MOST
#undef BYTES
#include "register_tiles.inc"
#include "attend.inc"
#include "flash.inc"

const DenseKernels dense_avx512_bf16 = {multiply_panels, pack_panels};

void flash_avx512_bf16(Flash *p, float *work) { flash_pairs(p, work); }

void attend_avx512_bf16(const Attend *p, int64_t first, int64_t last) { attend_pairs(p, first, last); }

#endif
