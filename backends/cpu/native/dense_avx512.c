/* Dense weights on CPUs with AVX-512; bfloat16 if the CPU does not multiply its pairs. */

#include "dense.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define PAIRS 0

#include "panels_512.inc"
#include "vectors.inc"
#include "dense.inc"
#include "pack.inc"

const DenseKernels dense_avx512 = {multiply_panels, pack_panels};

#endif
