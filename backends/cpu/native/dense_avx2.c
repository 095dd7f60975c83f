/* Dense weights on CPUs with AVX2, with or without AVX-VNNI. */

#include "dense.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define PAIRS 0

#include "panels_256.inc"
#include "vectors.inc"
#include "dense.inc"
#include "pack.inc"

const DenseKernels dense_avx2 = {multiply_panels, pack_panels};

#endif
