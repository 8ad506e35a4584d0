// Stores keys (transposed) and values of the step's rows in their blocks, rounded to the cache's type.
// Workers share rows times kv heads; within a head, rows that follow one another in a block are written together.

OCTAVO_INLINE void convert(const float* from, int count, float* to) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * 4);
}
OCTAVO_INLINE void convert(const float* from, int count, uint16_t* to) {
  int i = 0;
  for (; i + 16 <= count; i += 16) store_half(to + i, load(from + i));
  if (i == count) return;
  uint16_t halves[16];
  store_half(halves, load_first(from + i, count - i));
  __builtin_memcpy(to + i, halves, static_cast<size_t>(count - i) * 2);
}

// Calls body(first, tokens, to) for parts of up to 16 of a run's `count` rows that lie in one piece of keys: the rows are
// [first, first + tokens), the first one's key at dimension d is to[d * kv_piece(block_size)]. Of int8 only roughly.
template <class T, class Body>
OCTAVO_INLINE void each_piece(T* head, int head_size, int block_size, int slot, int count, const Body& body) {
  const int piece = kv_piece(block_size);
  for (int first = 0; first < count;) {
    const int place = slot + first, within = place % piece;
    int tokens = count - first < 16 ? count - first : 16;
    if (tokens > piece - within) tokens = piece - within;
    body(first, tokens, head + int64_t{place - within} * head_size + within);
    first += tokens;
  }
}

// One run: `count` rows from `row` on, all in one block from `slot` on, for one kv head. `head` is its K. The second
// form is for int8: its scales lie before K, and integers of four dimensions, or of four tokens, lie together.
// Otherwise keys are transposed in parts of 16 x 16, so that lines are filled at once.
template <class T>
OCTAVO_INLINE void write_run(const View& k, const View& v, int64_t row, int count, int kv_head, int head_size,
                             int block_size, int slot, T* head) {
  T* values = head + int64_t{block_size} * head_size + int64_t{slot} * head_size;
  const int column = kv_head * head_size, piece = kv_piece(block_size);
  for (int i = 0; i < count; ++i) convert(v.data + (row + i) * v.ld + column, head_size, values + i * head_size);
  each_piece(head, head_size, block_size, slot, count, [&](int first, int tokens, T* to) {
    for (int d = 0; d < head_size; d += 16) {
      const int lanes = head_size - d < 16 ? head_size - d : 16;
      T keys[16][16];
      if (tokens == 1 && lanes == 16) {  // as in decoding
        convert(k.data + (row + first) * k.ld + column + d, 16, keys[0]);
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) to[int64_t{d + j} * piece] = keys[0][j];
        continue;
      }
      for (int i = 0; i < tokens; ++i) convert(k.data + (row + first + i) * k.ld + column + d, lanes, keys[i]);
      for (int j = 0; j < lanes; ++j) {
        for (int i = 0; i < tokens; ++i) to[int64_t{d + j} * piece + i] = keys[i][j];
      }
    }
  });
}

// The first `count` <= 16 values at x as integers plus 128; zeros plus 128 behind them.
OCTAVO_INLINE i32x16 quantize(const float* x, int count, Quantizer by) {
  return round_to_int(by.scaled(load_lanes(x, count))) + broadcast(128);
}

// Up to four tokens, from `place` on among the `group` that lie together. Other workers may write the others meanwhile.
OCTAVO_INLINE void write_values(const float* const* from, const Quantizer* by, int count, int place, int group,
                                int head_size, uint8_t* to) {
  for (int d = 0; d < head_size; d += 16) {
    const int lanes = head_size - d < 16 ? head_size - d : 16;
    if (count == 4 && lanes == 16) {
      i32x16 four = quantize(from[0] + d, 16, by[0]);
#pragma GCC unroll 3
      for (int i = 1; i < 4; ++i) four = four + (quantize(from[i] + d, 16, by[i]) << 8 * i);
      store(reinterpret_cast<int32_t*>(to + 4 * d), four);
      continue;
    }
    for (int i = 0; i < count; ++i) {
      int8_t integers[16];
      store_low_bytes(integers, quantize(from[i] + d, lanes, by[i]));
      for (int j = 0; j < lanes; ++j) to[group * (d + j) + place + i] = static_cast<uint8_t>(integers[j]);
    }
  }
}

OCTAVO_INLINE void write_run(const View& k, const View& v, int64_t row, int count, int kv_head, int head_size,
                             int block_size, int slot, uint8_t* head) {
  float* key_scales = reinterpret_cast<float*>(head) - 2 * block_size;
  float* value_scales = key_scales + block_size;
  const int column = kv_head * head_size, piece = kv_piece(block_size), group = kv_value_group(block_size);
  for (int i = 0; i < count; ++i) {
    const float* key = k.data + (row + i) * k.ld + column;
    const Quantizer by = quantizer_of(key, head_size, 127.0f);
    const int within = (slot + i) % piece;
    key_scales[slot + i] = by.scale;
    uint8_t* to = head + int64_t{slot + i - within} * head_size + 4 * within;
    for (int d = 0; d < head_size; d += 16) {
      int8_t integers[16];
      const int lanes = head_size - d < 16 ? head_size - d : 16;
      store_low_bytes(integers, quantize(key + d, lanes, by));
      for (int j = 0; j < lanes; j += 4) __builtin_memcpy(to + (d + j) * piece, integers + j, 4);
    }
  }
  for (int i = 0; i < count;) {
    const int place = (slot + i) % group, tokens = count - i < group - place ? count - i : group - place;
    const float* values[4];
    Quantizer by[4];
    for (int j = 0; j < tokens; ++j) {
      values[j] = v.data + (row + i + j) * v.ld + column;
      by[j] = quantizer_of(values[j], head_size, 127.0f);
      value_scales[slot + i + j] = by[j].scale;
    }
    write_values(values, by, tokens, place, group, head_size, head + int64_t{block_size + slot + i - place} * head_size);
    i += tokens;
  }
}

// Rows that follow one another in one block, from `row` on. `head` is K of the block and one kv head.
template <class T>
struct Run {
  int64_t row, end;
  int slot;
  T* head;
};

// The run that begins at `row` and ends before `end`; `seq` is moved to the row's sequence.
template <class T>
OCTAVO_INLINE Run<T> run_at(int64_t row, int64_t end, int kv_head, const KVStore& kv, const Batch& b, int* seq) {
  while (b.query_starts[*seq + 1] <= row) ++*seq;
  const int32_t* table = b.block_table + b.table_rows[*seq] * b.max_blocks;
  const int block = b.positions[row] / kv.block_size, slot = b.positions[row] % kv.block_size;
  int64_t run_end = row + kv.block_size - slot;
  if (run_end > b.query_starts[*seq + 1]) run_end = b.query_starts[*seq + 1];
  if (run_end > end) run_end = end;
  char* head = static_cast<char*>(kv.data) + table[block] * kv.block_bytes +
               kv_head * kv_head_bytes(kv.type, kv.head_size, kv.block_size) + kv_scale_bytes(kv.type, kv.block_size);
  return {row, run_end, slot, reinterpret_cast<T*>(head)};
}

// Asks for the lines of a run: stores wait for their lines one after another, requests do not.
template <class T>
OCTAVO_INLINE void prefetch_run(const Run<T>& run, const KVStore& kv) {
  const int64_t line = 64 / sizeof(T);
  const int count = static_cast<int>(run.end - run.row), piece = kv_piece(kv.block_size);
  each_piece(run.head, kv.head_size, kv.block_size, run.slot, count, [&](int, int, T* to) {
    for (int64_t i = 0; i < int64_t{kv.head_size} * piece; i += piece < line ? line : piece) prefetch_write(to + i);
  });
  const int group = sizeof(T) == 1 ? kv_value_group(kv.block_size) : 1;
  const int first = run.slot / group * group, end = (run.slot + count + group - 1) / group * group;
  const T* values = run.head + (int64_t{kv.block_size} + first) * kv.head_size;
  for (int64_t i = 0; i < int64_t{end - first} * kv.head_size; i += line) prefetch_write(values + i);
}

// Rows [begin, end) of one kv head; `seq` is the sequence of row `begin`.
template <class T>
OCTAVO_INLINE void write_head(const View& k, const View& v, const KVStore& kv, const Batch& b, int kv_head, int64_t begin,
                              int64_t end, int seq) {
  Run<T> next = run_at<T>(begin, end, kv_head, kv, b, &seq);
  prefetch_run(next, kv);
  while (next.row < end) {
    const Run<T> run = next;
    if (run.end < end) {
      next = run_at<T>(run.end, end, kv_head, kv, b, &seq);
      prefetch_run(next, kv);
    } else {
      next.row = end;
    }
    write_run(k, v, run.row, static_cast<int>(run.end - run.row), kv_head, kv.head_size, kv.block_size, run.slot,
              run.head);
  }
}

static void write_kv(const View& k, const View& v, const KVStore& kv, const Batch& b, Worker w) {
  const int heads = kv.num_kv_heads;
  const Range units = range_of(int64_t{b.num_tokens} * heads, w);  // unit = row * heads + head
  if (units.begin >= units.end) return;
  int seq = 0;
  while (b.query_starts[seq + 1] <= units.begin / heads) ++seq;
  for (int h = 0; h < heads; ++h) {
    const int64_t begin = (units.begin - h + heads - 1) / heads, end = (units.end - h + heads - 1) / heads;
    if (begin >= end) continue;
    if (kv.type == KVType::i8) {
      write_head<uint8_t>(k, v, kv, b, h, begin, end, seq);
    } else if (kv.type == KVType::f16) {
      write_head<uint16_t>(k, v, kv, b, h, begin, end, seq);
    } else {
      write_head<float>(k, v, kv, b, h, begin, end, seq);
    }
  }
}
