// e^x, sigmoid and tanh on 16 lanes. Part of simd.h. Each is one sequence of operations without table or branch, used
// for whole vectors and tails alike, so that a value's result does not depend on where it stands.
#pragma once

namespace octavo {
namespace OCTAVO_ISA {

// e^x within 2 ulp for x <= 88.72; 0 below -87.33, NaN stays NaN.
OCTAVO_INLINE f32x16 exp_below(f32x16 x) {
  const f32x16 magic = broadcast(12582912.0f);  // 1.5 * 2^23: x / ln 2 is rounded to an integer in the low bits
  const f32x16 z = fma(x, broadcast(1.44269504f), magic);
  const f32x16 n = z - magic;
  f32x16 r = fma(n, broadcast(-0.693359375f), x);  // x - n ln 2 in two parts
  r = fma(n, broadcast(2.12194440e-4f), r);
  f32x16 p = broadcast(1.98756921e-4f);            // minimax polynomial of e^r on [-ln 2 / 2, ln 2 / 2]
  p = fma(p, r, broadcast(1.39819994e-3f));
  p = fma(p, r, broadcast(8.33345205e-3f));
  p = fma(p, r, broadcast(4.16657962e-2f));
  p = fma(p, r, broadcast(1.66666657e-1f));
  p = fma(p, r, broadcast(0.5f));
  p = fma(p, r * r, r + broadcast(1.0f));
  OCTAVO_EACH p.v[i] = (fvec)((ivec)p.v[i] + (ivec)((uvec)z.v[i] << 23));  // times 2^n
  p = p + (x - x);  // 0, or NaN where adding to the exponent of a NaN has made a number of it
  return select_less(x, broadcast(-87.33654f), zero(), p);
}

// The same for any x; infinity above 88.72.
OCTAVO_INLINE f32x16 exp(f32x16 x) {
  return select_less(x, broadcast(88.72284f), exp_below(x), x + broadcast(INFINITY));
}

// 1 / (1 + e^-x).
OCTAVO_INLINE f32x16 sigmoid(f32x16 x) {
  const f32x16 one = broadcast(1.0f);
  return one / (one + exp(zero() - x));
}

// tanh(x) within 4 ulp: an odd polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
OCTAVO_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 one = broadcast(1.0f), magnitude = abs(x), square = x * x;
  const f32x16 e = exp(magnitude + magnitude);
  f32x16 big = one - broadcast(2.0f) / (e + one);
  big = select_less(x, zero(), zero() - big, big);
  f32x16 p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const f32x16 small = fma(p * square, x, x);
  return select_less(magnitude, broadcast(0.625f), small, big);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
