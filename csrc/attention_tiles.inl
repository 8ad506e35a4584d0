// The inner loops of paged attention: one tile of query vectors against one span of tokens.
//
// A span is kSpan token positions at an absolute multiple of kSpan. Whatever the tile, block size or worker, for
// one query vector and one span
//     score(t)  is one chain of fused multiply-adds over d, ascending (tokens in the lanes)
//     m         is the exact maximum of the visible scores
//     l         adds p(t) = e^(score(t) - m) in lane t mod 16, t ascending, then in the tree of reduce_add
//     acc(d)    is one chain of fused multiply-adds p(t) * v(t, d) over visible t, ascending
// Tokens a query may not see never enter an operation: their scores are replaced, their values not read.

constexpr int kSpan = 256;
constexpr int kScoreStride = kSpan + 16;  // a chunk near the end of the span stores past it
constexpr int kTileVectors = kVectors >= 32 ? 6 : 3;
constexpr int kTileChunks = kVectors >= 32 ? 4 : kVectors >= 8 ? 2 : 1;

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

// The blocks of one sequence, as one kv head sees them.
template <class T>
struct HeadBlocks {
  const int32_t* table;  // [max_blocks]
  const char* base;      // of block 0, at this head
  int64_t block_bytes;
  int block_size, head_size;

  const T* keys(int block) const {  // [D][B]
    return reinterpret_cast<const T*>(base + table[block] * block_bytes);
  }
  const T* values(int block) const {  // [B][D]
    return keys(block) + int64_t{block_size} * head_size;
  }
};

// Up to 16 tokens that lie side by side in one block.
template <class T>
struct Chunk {
  const T* keys;  // of the first token at d = 0; the next d is block_size further
  int token;      // relative to the span
};

// The chunks of tokens [begin, end) of the span that starts at position `origin`.
template <class T>
OCTAVO_INLINE int list_chunks(const HeadBlocks<T>& blocks, int origin, int begin, int end, Chunk<T>* chunks) {
  int count = 0;
  int token = begin;
  int block = (origin + begin) / blocks.block_size, slot = (origin + begin) % blocks.block_size;
  while (token < end) {
    chunks[count++] = {blocks.keys(block) + slot, token};
    const int left = blocks.block_size - slot;
    token += left < 16 ? left : 16;
    slot += 16;
    if (left <= 16) {
      ++block;
      slot = 0;
    }
  }
  return count;
}

// scores[m][token of chunk c + lane] = q[m] . k for M query vectors and C chunks. q is [D][M].
// A chunk shorter than 16 tokens spoils the scores behind it, which the next chunk then writes.
template <int M, int C, class T>
OCTAVO_INLINE void score_chunks(const float* q, int head_size, const Chunk<T>* chunks, int64_t block_size, float* scores) {
  f32x16 sum[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[m][c] = zero();
  }
  const T* keys[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) keys[c] = chunks[c].keys;
  for (int d = 0; d < head_size; ++d) {
    f32x16 k[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) k[c] = load_stored(keys[c] + d * block_size);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const f32x16 query = broadcast(q[d * M + m]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[m][c] = fma(query, k[c], sum[m][c]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + m * kScoreStride + chunks[c].token, sum[m][c]);
  }
}

// Replaces the visible scores [begin, end) of one query vector by p, and the other lanes they share vectors with
// by 0. Sets the maximum and the sum.
OCTAVO_INLINE void softmax_span(float* scores, int begin, int end, float scale, float softcap, float* m, float* l) {
  const int first = begin / 16 * 16;
  f32x16 top = broadcast(-INFINITY);
  for (int t = first; t < end; t += 16) {
    f32x16 x = load(scores + t) * broadcast(scale);
    if (softcap != 0.0f) x = broadcast(softcap) * tanh(x / broadcast(softcap));
    if (t < begin || t + 16 > end) {
      const f32x16 hidden = broadcast(-INFINITY);
      x = select_less(iota(), broadcast(end - t), x, hidden);
      x = select_less(iota(), broadcast(begin - t), hidden, x);
    }
    store(scores + t, x);
    top = max(top, x);
  }
  *m = reduce_max(top);
  f32x16 sum = zero();
  for (int t = first; t < end; t += 16) {
    const f32x16 p = exp(load(scores + t) - broadcast(*m));
    store(scores + t, p);
    sum = sum + p;
  }
  *l = reduce_add(sum);
}

// acc[m][16 c + lane] += sum over tokens [begin, end) of p[m] * v, for M query vectors and C vectors of columns.
// `values` columns start at `column`; reading past D at the last chunk meets the next token's row, and is ignored.
template <int M, int C, class T>
OCTAVO_INLINE void mix_values(const float* p, const HeadBlocks<T>& blocks, int origin, int begin, int end, int column,
                              float* acc, int acc_stride) {
  f32x16 sum[M][C];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[m][c] = load(acc + m * acc_stride + column + 16 * c);
  }
  int block = (origin + begin) / blocks.block_size, slot = (origin + begin) % blocks.block_size;
  for (int t = begin; t < end; ++block, slot = 0) {
    const int run_end = t + blocks.block_size - slot < end ? t + blocks.block_size - slot : end;
    const T* v = blocks.values(block) + int64_t{slot} * blocks.head_size + column;
    for (; t < run_end; ++t, v += blocks.head_size) {
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
template <int M, class T>
OCTAVO_INLINE void mix_all_columns(const float* p, const HeadBlocks<T>& blocks, int origin, int begin, int end, float* acc,
                                   int acc_stride) {
  if (begin >= end) return;
  int column = 0;
  for (; column + 16 * kTileChunks <= blocks.head_size; column += 16 * kTileChunks) {
    mix_values<M, kTileChunks>(p, blocks, origin, begin, end, column, acc, acc_stride);
  }
  for (; column < blocks.head_size; column += 16) {
    mix_values<M, 1>(p, blocks, origin, begin, end, column, acc, acc_stride);
  }
}
