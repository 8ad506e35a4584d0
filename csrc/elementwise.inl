// Kernels that compute each element from the elements at its own place, and the embedding lookup.
// Workers share rows times column chunks, so that one wide row (the logits of one sequence) is shared too.

constexpr int kChunk = 1024;  // columns of one unit of work

// Calls body(row, column, lanes) for this worker's share of [rows][width] in vectors; lanes < 16 at a row's end.
template <class Body>
OCTAVO_INLINE void each_vector(int rows, int width, Worker w, const Body& body) {
  const int chunks = (width + kChunk - 1) / kChunk;
  const Range units = range_of(int64_t{rows} * chunks, w);
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

// Rows of a matrix that is packed for products, so that the table of tied embeddings takes no memory of its own.
static void embed_grouped(const MatrixGrouped& m, const int32_t* tokens, int rows, const View& out, Worker w) {
  const int group = code_group(m.bits), groups = m.k / group, centre = 1 << (m.bits - 1);
  const int64_t block_bytes = grouped_block_bytes(m.bits, m.has_low);
  const Range units = range_of(int64_t{rows} * groups, w);
  for (int64_t u = units.begin; u < units.end; ++u) {
    const int token = tokens[u / groups], column = token % kPanel, g = static_cast<int>(u % groups);
    const uint8_t* block = m.data + (int64_t{token / kPanel} * groups + g) * block_bytes;
    const auto* halves = reinterpret_cast<const uint16_t*>(block + grouped_code_bytes(m.bits)) + column;
    const float scale = half_to_float(halves[0]), low = m.has_low ? half_to_float(halves[kPanel]) : 0.0f;
    float* y = out.data + u / groups * out.ld + g * group;
    for (int i = 0; i < group; ++i) {
      const int code = grouped_code(block + 4 * column, i, m.bits);
      y[i] = m.has_low ? scale * static_cast<float>(code) + low : scale * static_cast<float>(code - centre);
    }
  }
}
