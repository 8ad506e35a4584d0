// What sampling asks of rows of scores, in blocks of columns: of each block the sum of exp((score - peak) / temperature)
// and the best score. A block is computed alone and in one order, so that neither other rows nor threads change a bit.

// Of the `count` scores at x.
OCTAVO_INLINE void softmax_block(const float* x, int count, float peak, float inverse, double* sum, float* best) {
  f32x16 sums = zero(), largest = broadcast(-INFINITY);
  for (int i = 0; i < count; i += 16) {
    const int rest = count - i;
    const f32x16 scores = rest < 16 ? load_first(x + i, rest, -INFINITY) : load(x + i);
    sums = sums + exp_below((scores - broadcast(peak)) * broadcast(inverse));
    largest = max(largest, scores);
  }
  *sum = reduce_add(sums);
  *best = reduce_max(largest);
}

// Worker w's share. Rows of temperature 0 are not wanted: what is there stays. sums and maxima: [rows][blocks].
static void softmax_blocks(const View& x, int rows, int block, const float* peaks, const float* temperatures,
                           double* sums, float* maxima, Worker w) {
  const int64_t blocks = (x.width + block - 1) / block;
  const Range units = range_of(rows * blocks, w);
  for (int64_t unit = units.begin; unit < units.end;) {
    const int64_t row = unit / blocks, end = units.end < (row + 1) * blocks ? units.end : (row + 1) * blocks;
    if (temperatures[row] != 0.0f) {
      const float inverse = 1.0f / temperatures[row];
      for (int64_t u = unit; u < end; ++u) {
        const int column = static_cast<int>(u - row * blocks) * block;
        const int count = x.width - column < block ? x.width - column : block;
        softmax_block(x.data + row * x.ld + column, count, peaks[row], inverse, sums + u, maxima + u);
      }
    }
    unit = end;
  }
}
