// Stores keys (transposed) and values of the step's rows in their blocks.
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

// One run: `count` rows from `row` on, all in one block from `slot` on, for one kv head. `head` is its K.
template <class T>
OCTAVO_INLINE void write_run(const View& k, const View& v, int64_t row, int count, int kv_head, int head_size,
                             int block_size, int slot, T* head) {
  T* values = head + int64_t{block_size} * head_size + int64_t{slot} * head_size;
  const int column = kv_head * head_size;
  for (int i = 0; i < count; ++i) convert(v.data + (row + i) * v.ld + column, head_size, values + i * head_size);
  for (int d = 0; d < head_size; d += 16) {
    const int lanes = head_size - d < 16 ? head_size - d : 16;
    for (int i = 0; i < count; ++i) {
      T key[16];
      convert(k.data + (row + i) * k.ld + column + d, lanes, key);
      for (int j = 0; j < lanes; ++j) head[int64_t{d + j} * block_size + slot + i] = key[j];
    }
  }
}

// Rows [begin, end) of one kv head; `seq` is the sequence of row `begin`.
template <class T>
OCTAVO_INLINE void write_head(const View& k, const View& v, const KVStore& kv, const Batch& b, int kv_head, int64_t begin,
                              int64_t end, int seq) {
  for (int64_t row = begin; row < end;) {
    while (b.query_starts[seq + 1] <= row) ++seq;
    const int32_t* table = b.block_table + b.table_rows[seq] * b.max_blocks;
    const int block = b.positions[row] / kv.block_size, slot = b.positions[row] % kv.block_size;
    int64_t run_end = row + kv.block_size - slot;
    if (run_end > b.query_starts[seq + 1]) run_end = b.query_starts[seq + 1];
    if (run_end > end) run_end = end;
    char* head = static_cast<char*>(kv.data) + table[block] * kv.block_bytes +
                 int64_t{2} * kv_head * kv.block_size * kv.head_size * static_cast<int>(sizeof(T));
    write_run(k, v, row, static_cast<int>(run_end - row), kv_head, kv.head_size, kv.block_size, slot,
              reinterpret_cast<T*>(head));
    row = run_end;
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
    if (kv.type == KVType::f16) {
      write_head<uint16_t>(k, v, kv, b, h, begin, end, seq);
    } else {
      write_head<float>(k, v, kv, b, h, begin, end, seq);
    }
  }
}
