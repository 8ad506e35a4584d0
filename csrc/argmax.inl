// The index of the largest value of each row, the lowest of equals; of a row with NaN, the first NaN's. As numpy's argmax.

OCTAVO_INLINE bool is_above(float x, float best) { return x > best || (x != x && best == best); }

// Of columns [begin, end) of one row.
OCTAVO_INLINE void argmax_row(const float* x, int begin, int end, float* value, int32_t* index) {
  f32x16 best = broadcast(-INFINITY), poison = zero();
  i32x16 place = broadcast(begin);
  int i = begin;
  for (; i + 16 <= end; i += 16) {
    const f32x16 values = load(x + i);
    poison = poison + (values - values);  // NaN where the value is NaN or infinite
    place = select_less(best, values, broadcast(i), place);
    best = max(values, best);
  }
  *value = -INFINITY;
  *index = begin;
  if (reduce_add(poison) != 0.0f) {  // rare: look at each
    i = begin;
  } else {
    float values[16];
    int32_t places[16];
    store(values, best);
    store(places, place);
    for (int lane = 0; lane < 16; ++lane) {
      const int32_t at = places[lane] + lane;
      if (values[lane] > *value || (values[lane] == *value && values[lane] > -INFINITY && at < *index)) {
        *value = values[lane];
        *index = at;
      }
    }
  }
  for (; i < end; ++i) {
    if (is_above(x[i], *value)) {
      *value = x[i];
      *index = i;
    }
  }
}

// Worker w's share of the columns of every row: values and indices [w.count][rows]. join_argmax joins them.
static void argmax(const View& x, int rows, float* values, int32_t* indices, Worker w) {
  const Range columns = range_of(x.width, w);
  for (int64_t row = 0; row < rows; ++row) {
    argmax_row(x.data + row * x.ld, static_cast<int>(columns.begin), static_cast<int>(columns.end),
               values + w.id * int64_t{rows} + row, indices + w.id * int64_t{rows} + row);
  }
}

// Row by row the best of all workers' shares, into the first worker's.
static void join_argmax(int rows, int workers, float* values, int32_t* indices) {
  for (int64_t i = rows; i < int64_t{rows} * workers; ++i) {
    const int64_t row = i % rows;
    if (is_above(values[i], values[row])) {
      values[row] = values[i];
      indices[row] = indices[i];
    }
  }
}
