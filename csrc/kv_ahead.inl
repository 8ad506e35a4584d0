// Prefetching of a layer's keys and values under the products before its attention.
//
// A product of many rows waits for its multiplications, attention for the memory: asked for in time, keys and values
// come while the memory has nothing else to do. Nothing here changes a result.

constexpr int kAheadLines = 16;  // cache lines asked for at a time
constexpr int kAheadTiles = 2;   // products of fewer row tiles wait for the memory themselves

// Asks for the next few lines; does nothing once there are no more.
OCTAVO_INLINE void ask_ahead(KVAhead* a) {
  if (!a || a->budget <= 0) return;
  if (a->offset >= a->kv.block_bytes) {
    a->offset = 0;
    ++a->block;
  }
  while (a->block == a->end_block) {
    if (a->seq == a->end_seq) {
      a->budget = 0;
      return;
    }
    const Batch& b = *a->batch;
    const int row = b.query_starts[a->seq], end = b.query_starts[a->seq + 1];
    const int32_t* table = b.block_table + b.table_rows[a->seq++] * b.max_blocks;
    if (row == end) continue;
    a->block = table + first_visible(b.positions[row], a->window) / a->kv.block_size;
    a->end_block = table + b.positions[end - 1] / a->kv.block_size + 1;
  }
  const char* lines = static_cast<const char*>(a->kv.data) + *a->block * a->kv.block_bytes + a->offset;
  for (int i = 0; i < kAheadLines; ++i) prefetch_l2(lines + 64 * i);
  a->offset += 64 * kAheadLines;
  a->budget -= 64 * kAheadLines;
}
