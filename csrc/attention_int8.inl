// The inner loops of paged attention on int8 keys and values: as attention_tiles.inl, in whole numbers.
//
// What meets the stored integers is rounded to whole numbers too, of 15 bits and a sign: a query vector, and of one span
// the weights p(t) * scale of v(t). Each is 256 * high + low with two digits within [-127, 127], so that the dot product
// of bytes does the work; those that would need a low digit of -128 are rounded to the next. For one query vector and
// one span
//     score(t)  is scale of k(t) * scale of q * (256 * high . k(t) + low . k(t)); maximum and sum then as for floats
//     acc(d)    is scale of the weights * (256 * sum of high(t) * v(t, d) + sum of low(t) * v(t, d))
// The sums are exact. Tokens a query may not see have digits 0; their scales never enter an operation.
// Weights are whole numbers of 1 / 32,639 of the largest scale that the query sees in the span: where it hardly attends to
// a value that is R times larger than the others, these have so much less precision.

constexpr int kByteVectors = 3;  // query vectors of a tile
constexpr int kByteSums = 2 * kByteVectors * kParts;  // registers that they take for each chunk
constexpr int kByteChunks = kRegisters * 3 / 4 > kByteSums ? kRegisters * 3 / 4 / kByteSums : 1;
constexpr int kDigitBits = 8;
constexpr float kDigitLimit = 127 * 256 + 127;  // the next would have a high digit of 128

// Whole numbers in two digits, times `scale`, which is NaN where one of the numbers was not finite.
struct Digits {
  float scale;
  int32_t offset;  // by what sums over them are too large, as 128 was added to the stored integers
};

// Writes whole numbers in digits, 16 at a time.
class DigitWriter {
 public:
  OCTAVO_INLINE DigitWriter() : high_(broadcast(0)), low_(broadcast(0)) {}

  OCTAVO_INLINE void write(f32x16 x, int8_t* high, int8_t* low) {
    const i32x16 number = round_to_int(x), upper = (number + broadcast(1 << (kDigitBits - 1))) >> kDigitBits;
    const i32x16 lower = max(number - (upper << kDigitBits), broadcast(-127));
    store_low_bytes(high, upper);
    store_low_bytes(low, lower);
    high_ = high_ + upper;
    low_ = low_ + lower;
  }
  OCTAVO_INLINE Digits digits(float scale) const {
    return {scale, (128 - kByteShift) * reduce_add((high_ << kDigitBits) + low_)};
  }

 private:
  i32x16 high_, low_;
};

// The digits of `count` numbers, then zeros up to a multiple of 16.
OCTAVO_INLINE Digits to_digits(const float* x, int count, int8_t* high, int8_t* low) {
  const Quantizer by = quantizer_of(x, count, kDigitLimit);
  DigitWriter writer;
  for (int i = 0; i < count; i += 16) {
    writer.write(by.scaled(load_lanes(x + i, count - i < 16 ? count - i : 16)), high + i, low + i);
  }
  return writer.digits(by.scale);
}

// What makes whole numbers of p(t) * scales[t] for the visible t, where p <= 1.
OCTAVO_INLINE Quantizer quantizer_of_visible(const float* scales, Span visible) {
  return quantizer_of(visible.begin / 16 * 16, visible.end, kDigitLimit, [&](int t) __attribute__((always_inline)) {
    return select_visible(t, visible, load(scales + t), zero());  // of hidden tokens they may be anything
  });
}

// Softmax of the visible scores as softmax_span, then the digits of p(t) * scales[t] for the visible t, and of 0 for the
// others in the vectors of 16 that hold a token of `some`. Where a score is NaN they are anything, and the sum is NaN.
// Calls ask(t) before each 16 of visible ones.
template <class Ask>
OCTAVO_INLINE Digits to_weights(float* scores, const float* scales, Quantizer by, Span visible, Span some,
                                float softcap, int8_t* high, int8_t* low, float* m, float* l, const Ask& ask) {
  DigitWriter writer;
  int t = some.begin / 16 * 16;
  for (; t < visible.begin / 16 * 16; t += 16) writer.write(zero(), high + t, low + t);
  softmax_span(scores, visible, softcap, m, l, [&](int at, f32x16 p) __attribute__((always_inline)) {
    ask(at);
    const f32x16 x = p * (load(scales + at) * broadcast(by.inverse));
    writer.write(select_visible(at, visible, x, zero()), high + at, low + at);
  });
  for (t = (visible.end + 15) / 16 * 16; t < some.end; t += 16) writer.write(zero(), high + t, low + t);
  return writer.digits(by.scale);
}

OCTAVO_INLINE int32_t four_digits(const int8_t* digits) {
  int32_t four;
  __builtin_memcpy(&four, digits, sizeof four);
  return four;
}

// Sums of digits times stored integers, for C vectors of 16 lanes.
template <int C>
struct DigitTile {
  ivec high[C][kParts], low[C][kParts];

  OCTAVO_INLINE void clear() {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      OCTAVO_EACH high[c][i] = low[c][i] = ivec{};
    }
  }
  OCTAVO_INLINE void add(const uvec (&bytes)[C][kParts], const int8_t* digits, int64_t stride) {
    const int32_t upper = four_digits(digits), lower = four_digits(digits + stride);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      OCTAVO_EACH high[c][i] = dot4_part(high[c][i], bytes[c][i], upper);
      OCTAVO_EACH low[c][i] = dot4_part(low[c][i], bytes[c][i], lower);
    }
  }
  OCTAVO_INLINE f32x16 value(int c, const Digits& digits) const {
    i32x16 sum;  // of heads up to kMaxByteHead it fits; what leads there may wrap
    const auto offset = static_cast<uint32_t>(digits.offset);
    OCTAVO_EACH sum.v[i] = (ivec)(((uvec)high[c][i] << kDigitBits) + ((uvec)low[c][i] - offset));
    return to_float(sum) * broadcast(digits.scale);
  }
};

// scores[m][token] = q[m] . k for M query vectors and C chunks. `digits` are the high ones of the first vector, the low
// ones `low_stride` further, the next vector `stride` further. The rest as score_chunks.
template <int M, int C, bool kAhead>
OCTAVO_INLINE void score_bytes(const int8_t* digits, int64_t stride, int64_t low_stride, const Digits* q, int head_size,
                               const Chunk<uint8_t>* chunks, int64_t piece, const Target<uint8_t>* ahead,
                               float* scores) {
  DigitTile<C> sum[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sum[m].clear();
  const uint8_t* keys[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) keys[c] = chunks[c].keys;
  constexpr int parts = kAhead ? C : 1;
  const int steps = head_size / 4;
  for (int part = 0, step = 0; part < parts; ++part) {
    const uint8_t* asked = ahead[part].elements;
    if (kAhead) prefetch_l2(ahead[part].scales);
    for (const int end = steps * (part + 1) / parts; step < end; ++step, asked += 64 * C) {
      if (kAhead) prefetch_elements(asked, 64 * C);
      uvec k[C][kParts];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        OCTAVO_EACH k[c][i] = shift_bytes(load_part(keys[c] + step * 4 * piece + 4 * kWidth * i));
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m].add(k, digits + m * stride + 4 * step, low_stride);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const f32x16 scale = load(chunks[c].scales);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      store(scores + m * kScoreStride + chunks[c].begin, sum[m].value(c, q[m]) * scale);
    }
  }
}

// acc[m][16 c + lane] = sum over the tokens of `some` of weight(m, t) * v, for M query vectors and C vectors of columns
// from `column` on. Digits are [M][2][kSpan]. While chunk i is read, ahead[i] is asked for.
template <int M, int C, bool kAhead>
OCTAVO_INLINE void mix_bytes(const int8_t* digits, const Digits* weights, const Chunk<uint8_t>* chunks, int num_chunks,
                             Span some, int head_size, int column, const Target<uint8_t>* ahead, float* acc,
                             int acc_stride) {
  DigitTile<C> sum[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sum[m].clear();
  for (int i = 0; i < num_chunks; ++i) {
    const Chunk<uint8_t>& chunk = chunks[i];
    const int begin = chunk.begin > some.begin ? chunk.begin : some.begin / 4 * 4;
    const int end = chunk.end < some.end ? chunk.end : some.end;
    const int64_t skipped = int64_t{begin - chunk.begin} * head_size + 4 * column;
    const uint8_t *v = chunk.values + skipped, *asked = ahead[i].elements + skipped;
    if (kAhead) prefetch_l2(ahead[i].scales);
    for (int t = begin; t < end; t += 4, v += 4 * head_size, asked += 4 * head_size) {
      if (kAhead) prefetch_elements(asked, 64 * C);
      uvec values[C][kParts];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        OCTAVO_EACH values[c][i] = shift_bytes(load_part(v + 64 * c + 4 * kWidth * i));
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m].add(values, digits + m * 2 * kSpan + t, kSpan);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      store(acc + m * acc_stride + column + 16 * c, sum[m].value(c, weights[m]));
    }
  }
}

// What a run on int8 keys and values keeps beside what every run does.
struct Int8Run {
  Digits queries[kItemVectors];  // whose digits take the place of the queries, the high ones first
  Digits weights[kByteVectors];  // of one span
  alignas(64) int8_t weight_digits[kByteVectors][2][kSpan];
  float value_scales[kScoreStride];  // of one span
  const Chunk<uint8_t>* chunks;      // of its values
  int num_chunks;
  Chunk<uint8_t> regrouped_chunk;

  // Takes up the values of a span from token `first` on; what lies before may have left the window, and its block may be
  // anything. Scales lie side by side from now on; those of chunks that end early are overwritten by the next, or not
  // used. Where a block does not hold values in groups of four tokens, so do they, in `regrouped`, and one chunk stands
  // for all.
  void load_values(const Chunk<uint8_t>* list, int count, int first, const KVStore& kv, uint8_t* regrouped) {
    chunks = list;
    num_chunks = count;
    if (count == 0) return;
    const int begin = list[0].begin;  // a multiple of 16
    int seen = 0;
    while (seen < count && list[seen].end <= first) ++seen;
    for (int i = seen; i < count; ++i) store(value_scales + list[i].begin, load(list[i].scales + kv.block_size));
    if (kv_value_group(kv.block_size) == 4) return;
    for (int i = seen; i < count; ++i) {
      for (int t = list[i].begin; t < list[i].end; ++t) {
        const uint8_t* from = list[i].values + int64_t{t - list[i].begin} * kv.head_size;
        uint8_t* to = regrouped + int64_t{t - begin} / 4 * 4 * kv.head_size + (t - begin) % 4;
        for (int d = 0; d < kv.head_size; ++d) to[4 * d] = from[d];
      }
    }
    regrouped_chunk = {nullptr, regrouped, nullptr, begin, list[count - 1].end};
    chunks = &regrouped_chunk;
    num_chunks = 1;
  }

  // to_weights() for the M vectors of a tile. Their maxima and sums go to `top`, `stride` apart. Calls ask(m, t) for each
  // 16 tokens from t on that vector m sees some of.
  template <int M, class Ask>
  OCTAVO_INLINE void weigh(float* scores, const Span* visible, Span some, float softcap, float* top, int stride,
                           const Ask& ask) {
    Quantizer by;
    for (int m = 0; m < M; ++m, scores += kScoreStride, top += stride) {
      const Span& seen = visible[m];
      const bool is_same = m > 0 && seen.begin == visible[m - 1].begin && seen.end == visible[m - 1].end;
      if (!is_same) by = quantizer_of_visible(value_scales, seen);
      auto& digits = weight_digits[m];
      weights[m] = to_weights(scores, value_scales, by, seen, some, softcap, digits[0], digits[1], top, top + 1,
                              [&](int t) __attribute__((always_inline)) { ask(m, t); });
    }
  }

  // mix_bytes over all columns.
  template <int M, bool kAhead>
  OCTAVO_INLINE void mix(Span some, int head_size, const Target<uint8_t>* ahead, float* acc, int acc_stride) {
    for (int column = 0; column < head_size; column += 16 * kByteChunks) {
      const int left = (head_size - column + 15) / 16;
      with_constant<kByteChunks>(left < kByteChunks ? left : kByteChunks, [&](auto n) {
        mix_bytes<M, n.value, kAhead>(weight_digits[0][0], weights, chunks, num_chunks, some, head_size, column, ahead, acc,
                                      acc_stride);
      });
    }
  }
};

template <class T>
struct ExtraOf {
  struct type {};
};
template <>
struct ExtraOf<uint8_t> {
  using type = Int8Run;
};
