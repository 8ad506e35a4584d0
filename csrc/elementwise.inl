// Kernels that compute each element from the elements at its own place, and the embedding lookup.
// Workers share rows times column chunks, so that one wide row (the logits of one sequence) is shared too.

constexpr int kChunk = 1024;  // columns of one unit of work

// Calls body(row, column, lanes) for this worker's share of [rows][width] in vectors; lanes < 16 at a row's end.
template <class Body>
OCTAVO_INLINE void each_vector(int rows, int width, Worker w, const Body& body) {
  const int chunks = (width + kChunk - 1) / kChunk;
  const Range units = range_of(rows, chunks, w);
  for (int64_t u = units.begin; u < units.end; ++u) {
    const int64_t row = u / chunks;
    const int begin = static_cast<int>(u % chunks) * kChunk;
    const int end = begin + kChunk < width ? begin + kChunk : width;
    int column = begin;
    for (; column + 16 <= end; column += 16) body(row, column, 16);
    if (column < end) body(row, column, end - column);
  }
}

OCTAVO_INLINE f32x16 load_lanes(const float* p, int lanes) {
  return lanes == 16 ? load(p) : load_first(p, lanes);
}
OCTAVO_INLINE void store_lanes(float* p, int lanes, f32x16 x) {
  if (lanes == 16) {
    store(p, x);
  } else {
    store_first(p, lanes, x);
  }
}

static void add(const View& x, const View& y, int rows, const View& out, Worker w) {
  each_vector(rows, x.width, w, [&](int64_t row, int column, int lanes) {
    const f32x16 a = load_lanes(x.data + row * x.ld + column, lanes);
    const f32x16 b = load_lanes(y.data + row * y.ld + column, lanes);
    store_lanes(out.data + row * out.ld + column, lanes, a + b);
  });
}

static void scale(const View& x, float factor, int rows, const View& out, Worker w) {
  each_vector(rows, x.width, w, [&](int64_t row, int column, int lanes) {
    const f32x16 a = load_lanes(x.data + row * x.ld + column, lanes);
    store_lanes(out.data + row * out.ld + column, lanes, a * broadcast(factor));
  });
}

static void softcap(const View& x, float cap, int rows, const View& out, Worker w) {
  each_vector(rows, x.width, w, [&](int64_t row, int column, int lanes) {
    const f32x16 a = load_lanes(x.data + row * x.ld + column, lanes);
    store_lanes(out.data + row * out.ld + column, lanes, broadcast(cap) * tanh(a / broadcast(cap)));
  });
}

static void embed_f32(const View& table, const int32_t* tokens, int rows, const View& out, Worker w) {
  each_vector(rows, table.width, w, [&](int64_t row, int column, int lanes) {
    const float* from = table.data + tokens[row] * table.ld + column;
    store_lanes(out.data + row * out.ld + column, lanes, load_lanes(from, lanes));
  });
}

static void embed_f16(const uint16_t* table, int width, const int32_t* tokens, int rows, const View& out, Worker w) {
  each_vector(rows, width, w, [&](int64_t row, int column, int lanes) {
    const uint16_t* from = table + int64_t{tokens[row]} * width + column;
    uint16_t halves[16] = {};
    for (int i = 0; i < lanes; ++i) halves[i] = from[i];
    store_lanes(out.data + row * out.ld + column, lanes, load_half(halves));
  });
}
