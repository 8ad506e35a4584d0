// RMS norms and the rotary embedding. A row's sum of squares runs in 16 lanes (lane i holds columns i, i + 16, …)
// that are added in the tree of reduce_add, so it depends on the row's width only.

// 1 / sqrt(mean(x^2) + eps) over `width` columns.
OCTAVO_INLINE f32x16 norm_factor(const float* x, float eps, int width) {
  f32x16 squares[2] = {zero(), zero()};
  int i = 0;
  for (; i + 32 <= width; i += 32) {
    const f32x16 a = load(x + i), b = load(x + i + 16);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  for (; i < width; i += 16) {
    const f32x16 a = load_first(x + i, width - i < 16 ? width - i : 16);
    squares[0] = fma(a, a, squares[0]);
  }
  const float mean = reduce_add(squares[0] + squares[1]) / static_cast<float>(width);
  return broadcast(1.0f / __builtin_sqrtf(mean + eps));
}

// y = x * factor * weight over `width` columns; y may be x.
OCTAVO_INLINE void scale_row(const float* x, const float* weight, f32x16 factor, int width, float* y) {
  int i;
  for (i = 0; i + 16 <= width; i += 16) store(y + i, load(x + i) * factor * load(weight + i));
  if (i < width) {
    const int lanes = width - i;
    store_first(y + i, lanes, load_first(x + i, lanes) * factor * load_first(weight + i, lanes));
  }
}

OCTAVO_INLINE void norm_row(const float* x, const float* weight, float eps, int width, float* y) {
  scale_row(x, weight, norm_factor(x, eps, width), width, y);
}

static void rms_norm(const View& x, const float* weight, float eps, int rows, const View& y, const QuantRows& quantized,
                     Worker w) {
  const Range mine = range_of(rows, w);
  if (!quantized.q) {
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      norm_row(x.data + row * x.ld, weight, eps, x.width, y.data + row * y.ld);
    }
    return;
  }
  with_group(quantized.group, [&](auto group) {
    float held[group.size];
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      const float* from = x.data + row * x.ld;
      const f32x16 factor = norm_factor(from, eps, x.width);
      for (int g = 0, i = 0; i < x.width; ++g, i += group.size) {
        float* to = y.data ? y.data + row * y.ld + i : held;
        scale_row(from + i, weight + i, factor, x.width - i < group.size ? x.width - i : group.size, to);
        quantize_group_of<group.size>(to, x.width, row, g, quantized);
      }
    }
  });
}

static void head_norm(const View& x, const float* weight, float eps, int head_size, int rows, Worker w) {
  const int heads = x.width / head_size;
  const Range mine = range_of(int64_t{rows} * heads, w);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    float* head = x.data + unit / heads * x.ld + unit % heads * head_size;
    norm_row(head, weight, eps, head_size, head);
  }
}

// The angle is computed in double: at position 131072 a float angle would be off by up to 0.008 rad.
static void rope_table(const float* frequencies, int half, float scale, const int32_t* positions, int rows,
                       const View& out, Worker w) {
  const Range mine = range_of(int64_t{rows} * half, w);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / half, i = unit % half;
    const double angle = static_cast<double>(positions[row]) * static_cast<double>(frequencies[i]);
    float* to = out.data + row * out.ld;
    to[i] = static_cast<float>(__builtin_cos(angle) * static_cast<double>(scale));
    to[half + i] = static_cast<float>(__builtin_sin(angle) * static_cast<double>(scale));
  }
}

// Rotates `count` pairs (x[i], x[half + i]): full vectors only where count is 16.
OCTAVO_INLINE void rotate(float* x, const float* cos_sin, int half, int count) {
  const bool is_full = count == 16;
  const f32x16 a = is_full ? load(x) : load_first(x, count);
  const f32x16 b = is_full ? load(x + half) : load_first(x + half, count);
  const f32x16 c = is_full ? load(cos_sin) : load_first(cos_sin, count);
  const f32x16 s = is_full ? load(cos_sin + half) : load_first(cos_sin + half, count);
  const f32x16 low = a * c - b * s, high = b * c + a * s;
  if (is_full) {
    store(x, low);
    store(x + half, high);
  } else {
    store_first(x, count, low);
    store_first(x + half, count, high);
  }
}

// The first table.width columns of each head are rotated.
static void rope(const View& x, const View& table, int head_size, int rows, Worker w) {
  const int heads = x.width / head_size, half = table.width / 2;
  const Range mine = range_of(int64_t{rows} * heads, w);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / heads;
    float* head = x.data + row * x.ld + unit % heads * head_size;
    const float* cos_sin = table.data + row * table.ld;
    for (int i = 0; i < half; i += 16) rotate(head + i, cos_sin + i, half, half - i < 16 ? half - i : 16);
  }
}
