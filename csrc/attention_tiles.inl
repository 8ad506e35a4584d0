// The inner loops of paged attention: one tile of query vectors against one span of tokens.
//
// A span is kSpan token positions at an absolute multiple of kSpan. Whatever the tile, block size or worker, for
// one query vector and one span
//     score(t)  is one chain of fused multiply-adds of k(t) and the query, which is multiplied with the scale first, over
//               d, ascending (tokens in the lanes)
//     m         is the exact maximum of the visible scores
//     l         adds p(t) = e^(score(t) - m) in lane t mod 16, t ascending, then in the tree of reduce_add
//     acc(d)    is one chain of fused multiply-adds p(t) * v(t, d) over visible t, ascending
// where keys and values are float32 or float16; attention_int8.inl has the others. Tokens a query may not see never
// enter an operation: their scores are replaced, their values not read.

constexpr int kSpan = 256;
constexpr int kScoreStride = kSpan + 16;  // a chunk near the end of the span stores past it
constexpr int kTileVectors = kRegisters >= 32 ? 6 : 3;
constexpr int kTileChunks = kRegisters * 3 / 4 / (kTileVectors * kParts);  // the sums fill three registers of four

// Tokens [begin, end) of a span, counted from its start.
struct Span {
  int begin, end;
};

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Calls body(Constant<n>{}), 1 <= n <= N.
template <int N, class Body>
OCTAVO_INLINE void with_constant(int n, const Body& body) {
  if constexpr (N == 1) {
    body(Constant<1>{});
  } else {
    if (n == N) return body(Constant<N>{});
    with_constant<N - 1>(n, body);
  }
}

OCTAVO_INLINE f32x16 load_stored(const float* p) { return load(p); }
OCTAVO_INLINE f32x16 load_stored(const uint16_t* p) { return load_half(p); }

// Whether keys and values are int8 (stored plus 128), which count scales, one a token.
template <class T>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<uint8_t> = true;

// The blocks of one sequence, as one kv head sees them.
template <class T>
struct HeadBlocks {
  const int32_t* table;  // [max_blocks]
  const char* base;      // of block 0, at this head's keys
  int64_t block_bytes;
  int block_size, head_size;

  const T* keys(int block) const { return reinterpret_cast<const T*>(base + table[block] * block_bytes); }
};

// Up to 16 tokens that lie side by side in one block.
template <class T>
struct Chunk {
  const T* keys;    // of the first token at d = 0; the next d, of int8 the next four, is a piece further
  const T* values;  // of the first token; the next token, of int8 the next four, is so many head_size further
  const float* scales;  // of the first token's key; its value's is block_size further. Null without scales
  int begin, end;   // tokens of the span
};

// The chunks of tokens [begin, end) of the span that starts at position `origin`.
template <class T>
OCTAVO_INLINE int list_chunks(const HeadBlocks<T>& blocks, int origin, int begin, int end, Chunk<T>* chunks) {
  int count = 0;
  const int piece = kv_piece(blocks.block_size);
  int block = (origin + begin) / blocks.block_size, slot = (origin + begin) % blocks.block_size;
  for (int token = begin; token < end;) {
    const T* keys = blocks.keys(block);
    const int left = blocks.block_size - slot;
    const int size = left < 16 ? left : 16;
    const float* scales = kIsScaled<T> ? reinterpret_cast<const float*>(keys) - 2 * blocks.block_size + slot : nullptr;
    const T* values = keys + int64_t{blocks.block_size + slot} * blocks.head_size;
    const int within = slot % piece * (kIsScaled<T> ? 4 : 1);
    chunks[count++] = {keys + int64_t{slot - slot % piece} * blocks.head_size + within, values, scales, token,
                       token + size < end ? token + size : end};
    token += size;
    slot += size;
    if (slot == blocks.block_size) {
      ++block;
      slot = 0;
    }
  }
  return count;
}

// Memory to ask for while something else is computed: the keys or the values of one chunk, 16 * D elements side by side
// whatever the block size, and their scales.
template <class T>
struct Target {
  const T* elements;
  const float* scales;
};

// Asks for `count` elements, or for the first line of fewer.
template <class T>
OCTAVO_INLINE void prefetch_elements(const T* elements, int count) {
  constexpr int line = 64 / sizeof(T);
#pragma GCC unroll 8
  for (int i = 0; i < count; i += line) prefetch_l2(elements + i);
}

// scores[m][token] = q[m] . k for M query vectors, `q_stride` apart, and C chunks of pieces `piece` wide. Meanwhile
// ahead[0] to ahead[C - 1] are asked for, one after another. A chunk of fewer than 16 tokens spoils the scores behind
// it, which the next chunk then writes.
template <int M, int C, bool kAhead, class T>
OCTAVO_INLINE void score_chunks(const float* q, int q_stride, int head_size, const Chunk<T>* chunks, int64_t piece,
                                const Target<T>* ahead, float* scores) {
  f32x16 sum[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[m][c] = zero();
  }
  const T* keys[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) keys[c] = chunks[c].keys;
  for (int part = 0, d = 0; part < C; ++part) {
    const T* asked = ahead[part].elements;
    for (const int end = head_size * (part + 1) / C; d < end; ++d, asked += 16 * C) {
      if (kAhead) prefetch_elements(asked, 16 * C);
      f32x16 k[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) k[c] = load_stored(keys[c] + d * piece);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const f32x16 query = broadcast(q[m * q_stride + d]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[m][c] = fma(query, k[c], sum[m][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + m * kScoreStride + chunks[c].begin, sum[m][c]);
  }
}

// Whether all of 16 tokens from t on are visible.
OCTAVO_INLINE bool is_visible(int t, Span visible) { return visible.begin <= t && t + 16 <= visible.end; }

// x for the visible ones of 16 tokens from t on, `hidden` for the others.
OCTAVO_INLINE f32x16 select_visible(int t, Span visible, f32x16 x, f32x16 hidden) {
  if (is_visible(t, visible)) return x;
  x = select_less(iota(), broadcast(visible.end - t), x, hidden);
  return select_less(iota(), broadcast(visible.begin - t), hidden, x);
}

// Softmax of the visible scores of one query vector. Calls take(t, p) for each 16 tokens from t on that it sees some of;
// the p of the others is 0. Sets the maximum and the sum.
template <class Take>
OCTAVO_INLINE void softmax_span(float* scores, Span visible, float softcap, float* m, float* l, const Take& take) {
  const int end = visible.end, first = visible.begin / 16 * 16;
  f32x16 top = broadcast(-INFINITY);
  for (int t = first; t < end; t += 16) {
    f32x16 x = load(scores + t);
    if (softcap != 0.0f || !is_visible(t, visible)) {
      if (softcap != 0.0f) x = broadcast(softcap) * tanh(x / broadcast(softcap));
      x = select_visible(t, visible, x, broadcast(-INFINITY));
      store(scores + t, x);
    }
    top = max(top, x);
  }
  *m = reduce_max(top);
  f32x16 sum = zero();
  for (int t = first; t < end; t += 16) {
    const f32x16 p = exp_below(load(scores + t) - broadcast(*m));
    take(t, p);
    sum = sum + p;
  }
  *l = reduce_add(sum);
}

// acc[m][16 c + lane] += sum over tokens [begin, end) of p[m] * v, for M query vectors and C vectors of columns from
// `column` on. Reading past D at the last of them meets the next token's row, and is ignored.
// While chunk i is read, ahead[i] is asked for.
template <int M, int C, bool kAhead, class T>
OCTAVO_INLINE void mix_values(const float* p, const Chunk<T>* chunks, int num_chunks, Span tokens, int head_size,
                              int column, const Target<T>* ahead, float* acc, int acc_stride) {
  f32x16 sum[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[m][c] = load(acc + m * acc_stride + column + 16 * c);
  }
  for (int i = 0; i < num_chunks; ++i) {
    const Chunk<T>& chunk = chunks[i];
    const int begin = chunk.begin > tokens.begin ? chunk.begin : tokens.begin;
    const int end = chunk.end < tokens.end ? chunk.end : tokens.end;
    const int64_t skipped = int64_t{begin - chunk.begin} * head_size + column;
    const T *v = chunk.values + skipped, *asked = ahead[i].elements + skipped;
    for (int t = begin; t < end; ++t, v += head_size, asked += head_size) {
      if (kAhead) prefetch_elements(asked, 16 * C);
      f32x16 value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) value[c] = load_stored(v + 16 * c);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const f32x16 weight = broadcast(p[m * kScoreStride + t]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) sum[m][c] = fma(weight, value[c], sum[m][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(acc + m * acc_stride + column + 16 * c, sum[m][c]);
  }
}

// mix_values over all columns.
template <int M, bool kAhead, class T>
OCTAVO_INLINE void mix_all_columns(const float* p, const Chunk<T>* chunks, int num_chunks, Span tokens, int head_size,
                                   const Target<T>* ahead, float* acc, int acc_stride) {
  if (tokens.begin >= tokens.end) return;
  for (int column = 0; column < head_size; column += 16 * kTileChunks) {
    const int left = (head_size - column + 15) / 16;
    with_constant<kTileChunks>(left < kTileChunks ? left : kTileChunks, [&](auto n) {
      mix_values<M, n.value, kAhead>(p, chunks, num_chunks, tokens, head_size, column, ahead, acc, acc_stride);
    });
  }
}
