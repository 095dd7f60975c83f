/* Kernels of CPUs with AVX-512 and VNNI: Intel from Ice Lake and Cascade Lake on, AMD from Zen 4 on. */

#include "panels.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>
#include <string.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")))
#define UNROLL _Pragma("GCC unroll 8")
#define LANES 16
#define ANY(a) "v"(a)
#define PARTS 1
#define ROWS 8
#define WIDE 4
#define NARROW 0
#define VI __m512i
#define VF __m512
#define V static inline TARGET __attribute__((always_inline))

V VI v_zero(void) { return _mm512_setzero_si512(); }
V VI v_set_int(int32_t a) { return _mm512_set1_epi32(a); }
V VF v_set(float a) { return _mm512_set1_ps(a); }
V VI v_load_int(const void *p) { return _mm512_loadu_si512(p); }
V VF v_load(const float *p) { return _mm512_loadu_ps(p); }
V void v_store(float *p, VF a) { _mm512_storeu_ps(p, a); }
V void v_store_int(int32_t *p, VI a) { _mm512_storeu_si512(p, a); }
V VI v_load_bytes(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
V VF v_load_half(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
V void v_store_half(uint16_t *p, VF a) {
    _mm256_storeu_si256((void *)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
V VF v_load_bf16(const uint16_t *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}
V void v_store_bf16(uint16_t *p, VF a) {
    const VI bits = _mm512_castps_si512(a);
    const VI odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    VI y = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    y = _mm512_mask_mov_epi32(y, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((void *)p, _mm512_cvtepi32_epi16(y));
}
V void v_store_codes(int8_t *p, VF a) { _mm_storeu_si128((void *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a))); }
V VF v_load_signed(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
V __m256 v_fold(VF a) { return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)); }
V void v_sum4(float *p, VF a, VF b, VF c, VF d) {
    const __m256 ab = _mm256_hadd_ps(v_fold(a), v_fold(b)), cd = _mm256_hadd_ps(v_fold(c), v_fold(d));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
V void v_turn(VF *r) {
    VF t[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int c = 0; c < 2; c++) {
        r[i + 2 * c] = _mm512_shuffle_ps(t[i + c], t[i + 2 + c], 0x44);
        r[i + 2 * c + 1] = _mm512_shuffle_ps(t[i + c], t[i + 2 + c], 0xee);
    }
    UNROLL for (int c = 0; c < 4; c++) {
        const VF even = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), odd = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
        const VF even2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88);
        const VF odd2 = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
        r[c] = _mm512_shuffle_f32x4(even, even2, 0x88), r[8 + c] = _mm512_shuffle_f32x4(even, even2, 0xdd);
        r[4 + c] = _mm512_shuffle_f32x4(odd, odd2, 0x88), r[12 + c] = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}
V float v_largest(VF a) { return _mm512_reduce_max_ps(a); }
V VF v_inside(VF a, int64_t from, int64_t to) {
    const int low = from < 0 ? 0 : from > 16 ? 16 : (int)from, high = to < 0 ? 0 : to > 16 ? 16 : (int)to;
    const __mmask16 seen = (__mmask16)(((1 << high) - 1) & ~((1 << low) - 1));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, a);
}
V VI v_magnitude(VF a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
V VI v_max(VI a, VI b) { return _mm512_max_epi32(a, b); }
V VF v_mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
V VI v_mul_int(VI a, VI b) { return _mm512_mullo_epi32(a, b); }
V VF v_fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
V VF v_add(VF a, VF b) { return _mm512_add_ps(a, b); }
V VF v_div(VF a, VF b) { return _mm512_div_ps(a, b); }
V VF v_least(VF a, VF b) { return _mm512_min_ps(a, b); }
V VF v_most(VF a, VF b) { return _mm512_max_ps(a, b); }
V VF v_whole(VF a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
V VF v_power(VF a) { return _mm512_scalef_ps(_mm512_set1_ps(1), a); }
V int v_same(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ) != 0; }
V VF v_float(VI a) { return _mm512_cvtepi32_ps(a); }
V VI v_and(VI a, VI b) { return _mm512_and_si512(a, b); }
V VI v_shift4(VI a) { return _mm512_srli_epi32(a, 4); }
V VI v_four(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
/* Not the intrinsic: compilers would copy sums from register to register at the end of each step. */
V VI v_dot(VI acc, VI codes, VI x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
    return acc;
}

/* Sums take at most 24 of the 32 registers: groups have two for each row and vector. */
#define BY4(DO, form, bits) DO(form, bits, 1, 4) DO(form, bits, 2, 4) DO(form, bits, 3, 4)
#define BY4_MORE(DO, form, bits) DO(form, bits, 4, 4) DO(form, bits, 5, 4) DO(form, bits, 6, 4)
#define BY3(DO, form, bits) DO(form, bits, 7, 3) DO(form, bits, 8, 3)
#define BY2(DO, form, bits)                                                                                           \
    DO(form, bits, 1, 2) DO(form, bits, 2, 2) DO(form, bits, 3, 2) DO(form, bits, 4, 2) DO(form, bits, 5, 2)            \
    DO(form, bits, 6, 2)
#define BY1(DO, form, bits)                                                                                           \
    DO(form, bits, 1, 1) DO(form, bits, 2, 1) DO(form, bits, 3, 1) DO(form, bits, 4, 1) DO(form, bits, 5, 1)            \
    DO(form, bits, 6, 1) DO(form, bits, 7, 1) DO(form, bits, 8, 1)
#define ALL_WHOLE(bits)                                                                                               \
    BY4(TILE, whole, bits) BY4_MORE(TILE, whole, bits) BY3(TILE, whole, bits) BY1(TILE, whole, bits)                    \
    static const Tile whole_##bits##_4[ROWS] = {BY4(NAMED, whole, bits) BY4_MORE(NAMED, whole, bits)};                 \
    static const Tile whole_##bits##_3[ROWS] = {BY3(NAMED, whole, bits)};                                             \
    static const Tile whole_##bits##_1[ROWS] = {BY1(NAMED, whole, bits)};
#define ALL_GROUPS(bits)                                                                                              \
    BY4(TILE, groups, bits) BY2(TILE, groups, bits) BY1(TILE, groups, bits)                                            \
    static const Tile groups_##bits##_4[ROWS] = {BY4(NAMED, groups, bits)};                                           \
    static const Tile groups_##bits##_2[ROWS] = {BY2(NAMED, groups, bits)};                                           \
    static const Tile groups_##bits##_1[ROWS] = {BY1(NAMED, groups, bits)};
#define TILES                                                                                                         \
    ALL_WHOLE(8) ALL_WHOLE(4) ALL_GROUPS(8) ALL_GROUPS(4)                                                              \
    static const Tile *const whole_single[2] = {whole_8_1, whole_4_1};                                                \
    static const Tile *const group_single[2] = {groups_8_1, groups_4_1};                                              \
    static const Form whole_forms[] = {                                                                               \
        {6, 6, 4, {whole_8_4, whole_4_4}},                                                                            \
        {8, 8, 3, {whole_8_3, whole_4_3}},                                                                            \
        {INT64_MAX, 6, 4, {whole_8_4, whole_4_4}},                                                                    \
    };                                                                                                                \
    static const Form group_forms[] = {                                                                               \
        {3, 3, 4, {groups_8_4, groups_4_4}},                                                                          \
        {6, 6, 2, {groups_8_2, groups_4_2}},                                                                          \
        {8, 8, 1, {groups_8_1, groups_4_1}},                                                                          \
        {INT64_MAX, 3, 4, {groups_8_4, groups_4_4}},                                                                  \
    };

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
