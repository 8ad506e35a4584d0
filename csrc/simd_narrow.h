// Values in fewer bits than 32: halves and int8, to and from 16 lanes, and the dot product of bytes. Part of simd.h.
#pragma once

namespace octavo {
namespace OCTAVO_ISA {

// ---- half precision ---------------------------------------------------------------------------------------

// Exact. Halves are spread into the float's fields; subnormals are renormalised by a subtraction.
OCTAVO_INLINE float half_to_float(uint16_t h) {
  uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
  const uint32_t exponent = bits & 0x0f800000;
  bits += 0x38000000;                                  // rebias 15 -> 127
  if (exponent == 0x0f800000) bits += 0x38000000;      // infinity, NaN
  float f;
  if (exponent == 0) {                                 // zero, subnormal
    bits += 0x00800000;
    std::memcpy(&f, &bits, 4);
    f -= 6.103515625e-05f;                             // 2^-14
    std::memcpy(&bits, &f, 4);
  }
  bits |= (uint32_t)(h & 0x8000) << 16;
  std::memcpy(&f, &bits, 4);
  return f;
}
#if !defined(__F16C__) && !defined(__AVX512F__) && !defined(__aarch64__)
// To nearest, ties to even, as the hardware instruction does.
OCTAVO_INLINE uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);   // NaN
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (bits < 0x38800000) {                                   // subnormal half: let the adder round
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + ((bits >> 13) & 1);  // rebias 127 -> 15, round half to even
  return (uint16_t)(sign | (bits >> 13));
}
#endif

// One machine register.
OCTAVO_INLINE fvec load_half_part(const uint16_t* p) {
#if defined(__AVX512F__)
  return (fvec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  return (fvec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (fvec)vcvt_f32_f16((float16x4_t)vld1_u16(p));
#else
  fvec r;
  for (int i = 0; i < kWidth; ++i) r[i] = half_to_float(p[i]);
  return r;
#endif
}
OCTAVO_INLINE f32x16 load_half(const uint16_t* p) {
  f32x16 r;
  OCTAVO_EACH r.v[i] = load_half_part(p + i * kWidth);
  return r;
}
OCTAVO_INLINE void store_half(uint16_t* p, f32x16 a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)a.v[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  OCTAVO_EACH _mm_storeu_si128((__m128i*)(p + 8 * i), _mm256_cvtps_ph((__m256)a.v[i], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  OCTAVO_EACH vst1_u16(p + 4 * i, (uint16x4_t)vcvt_f16_f32((float32x4_t)a.v[i]));
#else
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(lanes[i]);
#endif
}

// ---- int8 -------------------------------------------------------------------------------------------------

// The low byte of each lane.
OCTAVO_INLINE void store_low_bytes(int8_t* p, i32x16 a) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)a.v[0]));
#elif defined(__aarch64__)
  const int16x8_t low = vmovn_high_s32(vmovn_s32((int32x4_t)a.v[0]), (int32x4_t)a.v[1]);
  const int16x8_t high = vmovn_high_s32(vmovn_s32((int32x4_t)a.v[2]), (int32x4_t)a.v[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
#else
  int32_t lanes[16];
  store(lanes, a);
  for (int i = 0; i < 16; ++i) p[i] = (int8_t)lanes[i];
#endif
}

// ---- dot products of bytes --------------------------------------------------------------------------------

// Unsigned bytes w meet signed ones: as they are where an instruction takes both, as w - 128 where it does not.
#if defined(__aarch64__)
constexpr int kByteShift = 128;
OCTAVO_INLINE uvec shift_bytes(uvec w) { return w ^ 0x80808080u; }
#else
constexpr int kByteShift = 0;
OCTAVO_INLINE uvec shift_bytes(uvec w) { return w; }
#endif

#if !defined(__AVX512VNNI__) && !defined(__AVXVNNI__) && !defined(__aarch64__)
typedef int16_t svec __attribute__((vector_size(4 * kWidth)));

// Products of 16-bit lanes, each of which fits 16 bits, summed in pairs to 32-bit lanes.
OCTAVO_INLINE ivec multiply_pairs(svec a, svec b) {
#if defined(__AVX512BW__)
  return (ivec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (ivec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const ivec products = (ivec)(a * b);
  return (products << 16 >> 16) + (products >> 16);
#endif
}
#endif

// sum + in each lane the dot product of its four bytes of w, any after shift_bytes() or 0 to 127 without, with the
// four int8 in `four`, none of them -128. Exact.
OCTAVO_INLINE ivec dot4_part(ivec sum, uvec w, int32_t four) {
  const ivec a = broadcast_part(four);
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(a));  // g++ 12 copies and spills the intrinsic's accumulators
  return sum;
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(a));
  return sum;
#elif defined(__ARM_FEATURE_DOTPROD)
  return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)a);
#elif defined(__aarch64__)
  const int8x16_t x = (int8x16_t)w, y = (int8x16_t)a;
  const int16x8_t low = vmull_s8(vget_low_s8(x), vget_low_s8(y)), high = vmull_high_s8(x, y);
  return (ivec)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));  // two of at most 128 * 127 fit 16 bits
#else
  const svec odd = (svec)a >> 8, even = (svec)a << 8 >> 8;
  sum += multiply_pairs((svec)(w & 0x00ff00ff), even);
  return sum + multiply_pairs((svec)(w >> 8 & 0x00ff00ff), odd);
#endif
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
