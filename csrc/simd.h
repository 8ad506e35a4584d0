// One 16-lane vector of float and of int32 on every instruction set, so that algorithms are written once.
//
// A f32x16 is one 512-bit, two 256-bit or four 128-bit registers. Operations are lane by lane and rounded once,
// so a kernel written with them gives the same bits on every instruction set that has fused multiply-add
// ("portable" without it rounds products first; its results are self-consistent, not equal to the others').
// This file is compiled once per instruction set, inside the namespace OCTAVO_ISA; it uses no std:: template,
// because the linker could keep the wide-register copy of one and call it from portable code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef OCTAVO_ISA
#error "OCTAVO_ISA names the namespace of the instruction set; CMakeLists.txt defines it"
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kWidth = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kWidth = 4, kRegisters = 32;
#else
constexpr int kWidth = 4, kRegisters = 16;
#endif
constexpr int kParts = 16 / kWidth;                  // machine registers per f32x16
constexpr int kVectors = kRegisters / kParts;        // f32x16 values the register file holds

typedef float fvec __attribute__((vector_size(4 * kWidth)));
typedef int32_t ivec __attribute__((vector_size(4 * kWidth)));
typedef uint32_t uvec __attribute__((vector_size(4 * kWidth)));

struct f32x16 {
  fvec v[kParts];
};
struct i32x16 {
  ivec v[kParts];
};

#define OCTAVO_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

// ---- load, store, broadcast -------------------------------------------------------------------------------

OCTAVO_INLINE f32x16 load(const float* p) {
  f32x16 r;
  OCTAVO_EACH std::memcpy(&r.v[i], p + i * kWidth, sizeof(fvec));
  return r;
}
OCTAVO_INLINE void store(float* p, f32x16 a) {
  OCTAVO_EACH std::memcpy(p + i * kWidth, &a.v[i], sizeof(fvec));
}
OCTAVO_INLINE i32x16 load(const int32_t* p) {
  i32x16 r;
  OCTAVO_EACH std::memcpy(&r.v[i], p + i * kWidth, sizeof(ivec));
  return r;
}
OCTAVO_INLINE void store(int32_t* p, i32x16 a) {
  OCTAVO_EACH std::memcpy(p + i * kWidth, &a.v[i], sizeof(ivec));
}
OCTAVO_INLINE fvec broadcast_part(float x) {
#if defined(__AVX512F__)
  return (fvec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (fvec)_mm256_set1_ps(x);
#elif defined(__aarch64__)
  return (fvec)vdupq_n_f32(x);
#else
  return x - fvec{};  // x - 0 is x for every x; 0 + x is not (-0)
#endif
}
OCTAVO_INLINE f32x16 broadcast(float x) {
  f32x16 r;
  OCTAVO_EACH r.v[i] = broadcast_part(x);
  return r;
}
OCTAVO_INLINE i32x16 broadcast(int32_t x) {
  i32x16 r;
  OCTAVO_EACH r.v[i] = x - ivec{};
  return r;
}
OCTAVO_INLINE f32x16 zero() {
  f32x16 r;
  OCTAVO_EACH r.v[i] = fvec{};
  return r;
}

// The first n lanes (0 <= n <= 16); the others are `fill`, and their memory is not touched.
OCTAVO_INLINE f32x16 load_first(const float* p, int n, float fill = 0.0f) {
#if defined(__AVX512F__)
  f32x16 r;
  r.v[0] = (fvec)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), p);
  return r;
#else
  if (n == 16) return load(p);
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = fill;
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
#endif
}
OCTAVO_INLINE void store_first(float* p, int n, f32x16 a) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)a.v[0]);
#else
  if (n == 16) return store(p, a);
  float lanes[16];
  store(lanes, a);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
#endif
}

// ---- arithmetic -------------------------------------------------------------------------------------------

OCTAVO_INLINE f32x16 operator+(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] += b.v[i];
  return a;
}
OCTAVO_INLINE f32x16 operator-(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] -= b.v[i];
  return a;
}
OCTAVO_INLINE f32x16 operator*(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] *= b.v[i];
  return a;
}
OCTAVO_INLINE f32x16 operator/(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] /= b.v[i];
  return a;
}
OCTAVO_INLINE i32x16 operator+(i32x16 a, i32x16 b) {
  OCTAVO_EACH a.v[i] += b.v[i];
  return a;
}
OCTAVO_INLINE i32x16 operator-(i32x16 a, i32x16 b) {
  OCTAVO_EACH a.v[i] -= b.v[i];
  return a;
}
OCTAVO_INLINE i32x16 operator*(i32x16 a, i32x16 b) {
  OCTAVO_EACH a.v[i] *= b.v[i];
  return a;
}

OCTAVO_INLINE i32x16 operator<<(i32x16 a, int bits) {
  OCTAVO_EACH a.v[i] = a.v[i] << bits;
  return a;
}
OCTAVO_INLINE i32x16 operator>>(i32x16 a, int bits) {
  OCTAVO_EACH a.v[i] = a.v[i] >> bits;
  return a;
}

// a * b + c. The one place that decides between one rounding and two, for vectors and for scalars alike.
OCTAVO_INLINE fvec fma_part(fvec a, fvec b, fvec c) {
#if defined(__AVX512F__)
  return (fvec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (fvec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (fvec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
OCTAVO_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  OCTAVO_EACH c.v[i] = fma_part(a.v[i], b.v[i], c.v[i]);
  return c;
}
OCTAVO_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Where a lane of either is NaN the result is b's lane.
OCTAVO_INLINE f32x16 max(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
OCTAVO_INLINE f32x16 min(f32x16 a, f32x16 b) {
  OCTAVO_EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}
OCTAVO_INLINE f32x16 abs(f32x16 a) {
  OCTAVO_EACH a.v[i] = (fvec)((ivec)a.v[i] & 0x7fffffff);
  return a;
}

OCTAVO_INLINE i32x16 max(i32x16 a, i32x16 b) {
  OCTAVO_EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
OCTAVO_INLINE i32x16 bits_of(f32x16 a) {
  i32x16 r;
  OCTAVO_EACH r.v[i] = (ivec)a.v[i];
  return r;
}
OCTAVO_INLINE float float_of(int32_t bits) {
  float r;
  std::memcpy(&r, &bits, sizeof r);
  return r;
}

// Lane by lane: a < b ? x : y. False where a or b is NaN.
OCTAVO_INLINE f32x16 select_less(f32x16 a, f32x16 b, f32x16 x, f32x16 y) {
  OCTAVO_EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
OCTAVO_INLINE i32x16 select_less(f32x16 a, f32x16 b, i32x16 x, i32x16 y) {
  OCTAVO_EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
OCTAVO_INLINE f32x16 select_less(i32x16 a, i32x16 b, f32x16 x, f32x16 y) {
  OCTAVO_EACH x.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return x;
}
// 0, 1, … 15.
OCTAVO_INLINE i32x16 iota() {
  static const int32_t lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(lanes);
}

OCTAVO_INLINE f32x16 to_float(i32x16 a) {
  f32x16 r;
  OCTAVO_EACH r.v[i] = __builtin_convertvector(a.v[i], fvec);
  return r;
}
// To the nearest integer, ties to even, for |a| < 2^22: adding 1.5 * 2^23 leaves the integer in the low bits.
OCTAVO_INLINE i32x16 round_to_int(f32x16 a) {
  i32x16 r;
#if defined(__aarch64__)
  OCTAVO_EACH r.v[i] = (ivec)vcvtnq_s32_f32((float32x4_t)a.v[i]);
#else
  OCTAVO_EACH r.v[i] = (ivec)(a.v[i] + 12582912.0f) - 0x4b400000;
#endif
  return r;
}

// ---- across lanes -----------------------------------------------------------------------------------------

typedef float fvec4 __attribute__((vector_size(16)));
typedef float fvec8 __attribute__((vector_size(32)));

// Lane i of four: op over lanes i, i + 8, then i + 4, i + 12 joined to it.
template <class Op>
OCTAVO_INLINE fvec4 fold_to_four(f32x16 a, const Op& op) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
  const fvec8 low = __builtin_shufflevector(a.v[0], a.v[0], 0, 1, 2, 3, 4, 5, 6, 7);
  const fvec8 high = __builtin_shufflevector(a.v[0], a.v[0], 8, 9, 10, 11, 12, 13, 14, 15);
  const fvec8 b = op(low, high);
#else
  const fvec8 b = op(a.v[0], a.v[1]);
#endif
  return op(__builtin_shufflevector(b, b, 0, 1, 2, 3), __builtin_shufflevector(b, b, 4, 5, 6, 7));
#else
  return op(op(a.v[0], a.v[2]), op(a.v[1], a.v[3]));
#endif
}

// Sum of the lanes in one fixed tree: lane i with i + 8, then + 4, + 2, + 1.
OCTAVO_INLINE float reduce_add(f32x16 a) {
  const fvec4 b = fold_to_four(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
  return (b[0] + b[2]) + (b[1] + b[3]);
}
// Largest lane; NaN lanes may or may not count.
OCTAVO_INLINE float reduce_max(f32x16 a) {
  const fvec4 b = fold_to_four(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
  const float even = b[0] > b[2] ? b[0] : b[2], odd = b[1] > b[3] ? b[1] : b[3];
  return even > odd ? even : odd;
}
OCTAVO_INLINE int32_t reduce_max(i32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)a.v[0]);
#elif defined(__aarch64__)
  OCTAVO_EACH a.v[0] = a.v[0] > a.v[i] ? a.v[0] : a.v[i];
  return vmaxvq_s32((int32x4_t)a.v[0]);
#else
  int32_t x[16], largest = INT32_MIN;
  store(x, a);
  for (int i = 0; i < 16; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
#endif
}
OCTAVO_INLINE int32_t reduce_add(i32x16 a) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)a.v[0]);
#elif defined(__aarch64__)
  return vaddvq_s32((int32x4_t)((a.v[0] + a.v[1]) + (a.v[2] + a.v[3])));
#else
  int32_t x[16], sum = 0;
  store(x, a);
  for (int i = 0; i < 16; ++i) sum += x[i];
  return sum;
#endif
}

// ---- one machine register, for tiles that fill the register file exactly ----------------------------------

OCTAVO_INLINE fvec load_part(const float* p) {
  fvec r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
OCTAVO_INLINE uvec load_part(const uint8_t* p) {
  uvec r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
OCTAVO_INLINE ivec broadcast_part(int32_t x) { return ivec{} + x; }
OCTAVO_INLINE fvec to_float_part(ivec a) { return __builtin_convertvector(a, fvec); }

// ---- memory hints and shares ------------------------------------------------------------------------------

OCTAVO_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
OCTAVO_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
OCTAVO_INLINE void prefetch_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// This worker's part [begin, end) of `count` equal units.
struct Range {
  int64_t begin, end;
};
template <class W>
OCTAVO_INLINE Range range_of(int64_t count, const W& w) {
  return {count * w.id / w.count, count * (w.id + 1) / w.count};
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#include "simd_math.h"
#include "simd_narrow.h"
