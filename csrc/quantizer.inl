// How a vector becomes whole numbers within [-limit, limit]: round(x * inverse), half to even, x being about number * scale.

struct Quantizer {
  float inverse, scale;

  // Given the largest magnitude, and a sum that is 0 or, where a value is not finite, NaN. The scale is largest / limit, or
  // 0 where that would be subnormal, and so imprecise. A vector with a NaN or an infinity gets scale NaN and numbers 0:
  // what is multiplied with it turns NaN as a whole. As quantize_rows in numpy_quant.py.
  OCTAVO_INLINE Quantizer(float largest, float poison, float limit) {
    const bool is_plain = poison == 0.0f && largest >= limit * 1.17549435e-38f;
    inverse = is_plain ? limit / largest : 0.0f;
    scale = poison != 0.0f ? poison : is_plain ? largest / limit : 0.0f;
  }
  Quantizer() = default;

  // x * inverse. Nothing is multiplied where that is 0: x may be NaN.
  OCTAVO_INLINE f32x16 scaled(f32x16 x) const { return inverse == 0.0f ? zero() : x * broadcast(inverse); }
};

// Of the values that load(i) gives, 16 from each i on.
template <class Load>
OCTAVO_INLINE Quantizer quantizer_of(int begin, int end, float limit, const Load& load) {
  f32x16 largest = zero(), poison = zero();
  for (int i = begin; i < end; i += 16) {
    const f32x16 values = load(i);
    largest = max(largest, abs(values));
    poison = poison + (values - values);  // NaN where the value is NaN or infinite
  }
  return {reduce_max(largest), reduce_add(poison), limit};
}

OCTAVO_INLINE Quantizer quantizer_of(const float* x, int width, float limit) {
  return quantizer_of(0, width, limit, [&](int i) __attribute__((always_inline)) {
    return load_lanes(x + i, width - i < 16 ? width - i : 16);
  });
}
