// State-space layers: the causal convolution, the selective scan and the gated norm (numpy_ssm.py specifies them).
//
// A sequence's state lies in one block. A step reads the block of its last token before and writes the block of its
// last token; they may be the same memory, so every worker reads its columns of the state before it writes them.
// Tokens follow one another in the same arithmetic wherever a step begins, and a sum of the scan stays in its lane.

constexpr int kStateCost = 8;    // loading and storing a state costs about as much as this many tokens
constexpr int kScanTokens = 16;  // tokens whose time steps are worked out together, one to a lane
constexpr int kScanVectors = kVectors >= 32 ? 4 : 1;  // columns of a tile of the scan, in vectors
constexpr int kScanColumns = 16 * kScanVectors;
constexpr int kConvColumns = 128;

// The state of one sequence: `before` is null where it is zero.
struct StatePlace {
  const float* before;
  float* after;
};

OCTAVO_INLINE StatePlace place_of(const StateStore& state, const Batch& b, int seq) {
  const int32_t* table = b.block_table + b.table_rows[seq] * b.max_blocks;
  const int start = b.positions[b.query_starts[seq]], last = b.positions[b.query_starts[seq + 1] - 1];
  const auto at = [&](int position) {
    return reinterpret_cast<float*>(state.data + table[position / state.block_size] * state.block_bytes + state.begin);
  };
  return {start > 0 ? at(start - 1) : nullptr, at(last)};
}

// Calls body(part, seq) for this worker's share of `parts` equal parts of every sequence that has rows. What is
// shared is the cost: a long sequence beside short ones is one part to some worker, not all parts to one.
template <class Body>
OCTAVO_INLINE void each_part(int parts, const Batch& b, Worker w, const Body& body) {
  const int64_t part_cost = b.num_tokens + int64_t{kStateCost} * b.num_seqs;
  const Range mine = range_of(parts * part_cost, w);
  for (int64_t part = mine.begin / part_cost; part * part_cost < mine.end; ++part) {
    for (int seq = 0; seq < b.num_seqs; ++seq) {
      const int64_t at = part * part_cost + b.query_starts[seq] + int64_t{kStateCost} * seq;
      const bool has_rows = b.query_starts[seq] < b.query_starts[seq + 1];
      if (has_rows && at >= mine.begin && at < mine.end) body(static_cast<int>(part), seq);
    }
  }
}

// ---- convolution ----------------------------------------------------------------------------------------------

// 16 or fewer channels of one sequence of `count` rows, from `column` on. Row i of the state is input i - (taps - 1).
OCTAVO_INLINE void conv_columns(const View& x, const float* weight, const float* bias, int taps, StatePlace state,
                                int64_t row, int count, int column, const View& out) {
  const int lanes = x.width - column < 16 ? x.width - column : 16, history = taps - 1;
  const f32x16 start = bias ? load_lanes(bias + column, lanes) : zero();
  const auto input = [&](int index) {
    if (index >= 0) return load_lanes(x.data + (row + index) * x.ld + column, lanes);
    if (!state.before) return zero();
    return load_lanes(state.before + int64_t{history + index} * x.width + column, lanes);
  };
  for (int t = 0; t < count; ++t) {
    f32x16 sum = start;
    for (int k = 0; k < taps; ++k) {
      sum = fma(load_lanes(weight + int64_t{k} * x.width + column, lanes), input(t - history + k), sum);
    }
    store_lanes(out.data + (row + t) * out.ld + column, lanes, sum * sigmoid(sum));
  }
  // Ascending: where the state is shifted in place, a row is read before it is overwritten.
  for (int i = 0; i < history; ++i) {
    store_lanes(state.after + int64_t{i} * x.width + column, lanes, input(count - history + i));
  }
}

static void conv1d(const View& x, const float* weight, const float* bias, int taps, const StateStore& state,
                   const Batch& b, const View& out, Worker w) {
  each_part((x.width + kConvColumns - 1) / kConvColumns, b, w, [&](int part, int seq) {
    const int begin = part * kConvColumns, end = begin + kConvColumns < x.width ? begin + kConvColumns : x.width;
    const int row = b.query_starts[seq], count = b.query_starts[seq + 1] - row;
    const StatePlace place = place_of(state, b, seq);
    for (int column = begin; column < end; column += 16) {
      conv_columns(x, weight, bias, taps, place, row, count, column, out);
    }
  });
}

// ---- scan -----------------------------------------------------------------------------------------------------

// log(1 + e^x) = max(x, 0) + log(1 + e), e = e^-|x|; the logarithm is 2 atanh(s), s = e / (2 + e) <= 1/3, as a series.
OCTAVO_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 e = exp(zero() - abs(x)), s = e / (e + broadcast(2.0f)), square = s * s;
  f32x16 p = broadcast(1.0f / 15);
  for (int odd = 13; odd > 0; odd -= 2) p = fma(p, square, broadcast(1.0f / static_cast<float>(odd)));
  return fma(p, s + s, select_less(zero(), x, x, zero()));
}

// Some tokens of one head, as the scan takes them: columns past the tile's are zero.
struct ScanTile {
  int count, columns;
  float decay[kScanTokens];
  float scaled[kScanTokens][kScanColumns];  // time step * x
  float sum[kScanTokens][kScanColumns];     // c @ state, so far
};

// Rows [row, row + tile.count), columns from `column` on, of head `head`.
OCTAVO_INLINE void begin_tile(const View& x, const View& dt, const ScanHeads& p, int64_t row, int head, int column,
                              ScanTile& tile) {
  float steps[kScanTokens] = {};
  for (int t = 0; t < tile.count; ++t) steps[t] = dt.data[(row + t) * dt.ld + head];
  f32x16 step = softplus(load(steps) + broadcast(p.dt_bias[head]));
  step = select_less(step, broadcast(p.dt_min), broadcast(p.dt_min), step);
  step = select_less(broadcast(p.dt_max), step, broadcast(p.dt_max), step);
  store(steps, step);
  store(tile.decay, exp(step * broadcast(p.decay[head])));
  for (int t = 0; t < tile.count; ++t) {
    for (int v = 0; v < kScanVectors; ++v) {
      const int left = tile.columns - 16 * v, lanes = left < 0 ? 0 : left < 16 ? left : 16;
      const f32x16 input = lanes ? load_lanes(x.data + (row + t) * x.ld + column + 16 * v, lanes) : zero();
      store(tile.scaled[t] + 16 * v, broadcast(steps[t]) * input);
      store(tile.sum[t] + 16 * v, zero());
    }
  }
}

// `Rows` rows of the state, from `before` (null: zero) to `after`, through the tokens of a tile, in registers.
// b and c point at the first row's value of the first token.
template <int Rows>
OCTAVO_INLINE void scan_rows(const float* before, float* after, int64_t row_size, const View& b, const View& c,
                             ScanTile& tile) {
  f32x16 state[Rows][kScanVectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kScanVectors; ++v) {
      const int left = tile.columns - 16 * v, lanes = left < 0 ? 0 : left < 16 ? left : 16;
      state[r][v] = before && lanes ? load_lanes(before + r * row_size + 16 * v, lanes) : zero();
    }
  }
  for (int t = 0; t < tile.count; ++t) {
    const float* bs = b.data + t * b.ld;
    const float* cs = c.data + t * c.ld;
    const f32x16 decay = broadcast(tile.decay[t]);
    f32x16 scaled[kScanVectors], sum[kScanVectors];
    for (int v = 0; v < kScanVectors; ++v) {
      scaled[v] = load(tile.scaled[t] + 16 * v);
      sum[v] = load(tile.sum[t] + 16 * v);
    }
    for (int r = 0; r < Rows; ++r) {
      for (int v = 0; v < kScanVectors; ++v) {
        state[r][v] = fma(broadcast(bs[r]), scaled[v], state[r][v] * decay);
        sum[v] = fma(broadcast(cs[r]), state[r][v], sum[v]);
      }
    }
    for (int v = 0; v < kScanVectors; ++v) store(tile.sum[t] + 16 * v, sum[v]);
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < kScanVectors; ++v) {
      const int left = tile.columns - 16 * v, lanes = left < 0 ? 0 : left < 16 ? left : 16;
      if (lanes) store_lanes(after + r * row_size + 16 * v, lanes, state[r][v]);
    }
  }
}

// y = c @ state + skip * x.
OCTAVO_INLINE void end_tile(const View& x, float skip, int64_t row, int column, const ScanTile& tile, const View& out) {
  for (int t = 0; t < tile.count; ++t) {
    for (int v = 0; 16 * v < tile.columns; ++v) {
      const int lanes = tile.columns - 16 * v < 16 ? tile.columns - 16 * v : 16, at = column + 16 * v;
      const f32x16 input = load_lanes(x.data + (row + t) * x.ld + at, lanes);
      store_lanes(out.data + (row + t) * out.ld + at, lanes, fma(broadcast(skip), input, load(tile.sum[t] + 16 * v)));
    }
  }
}

static void ssm_scan(const ScanInputs& in, const ScanHeads& p, const StateStore& state, const Batch& batch,
                     const View& out, Worker w) {
  const int tiles = (p.head_size + kScanColumns - 1) / kScanColumns;  // of one head
  each_part(p.num_heads * tiles, batch, w, [&](int part, int seq) {
    const int head = part / tiles, first = part % tiles * kScanColumns, column = head * p.head_size + first;
    const int64_t group_column = int64_t{head / (p.num_heads / p.num_groups)} * p.state_size;
    const int64_t offset = int64_t{head} * p.state_size * p.head_size + first;
    StatePlace place = place_of(state, batch, seq);
    if (place.before) place.before += offset;
    place.after += offset;
    ScanTile tile;
    tile.columns = p.head_size - first < kScanColumns ? p.head_size - first : kScanColumns;
    for (int64_t row = batch.query_starts[seq]; row < batch.query_starts[seq + 1]; row += kScanTokens) {
      const int64_t left = batch.query_starts[seq + 1] - row;
      tile.count = left < kScanTokens ? static_cast<int>(left) : kScanTokens;
      begin_tile(in.x, in.dt, p, row, head, column, tile);
      View b{in.b.data + row * in.b.ld + group_column, in.b.ld, p.state_size};
      View c{in.c.data + row * in.c.ld + group_column, in.c.ld, p.state_size};
      for (int z = 0; z < p.state_size;) {
        const float* before = place.before ? place.before + int64_t{z} * p.head_size : nullptr;
        float* after = place.after + int64_t{z} * p.head_size;
        const int rows = z + 4 <= p.state_size ? 4 : 1;
        if (rows == 4) {
          scan_rows<4>(before, after, p.head_size, b, c, tile);
        } else {
          scan_rows<1>(before, after, p.head_size, b, c, tile);
        }
        z += rows;
        b.data += rows;
        c.data += rows;
      }
      end_tile(in.x, p.skip[head], row, column, tile, out);
      place.before = place.after;
    }
  });
}

// ---- gated norm -----------------------------------------------------------------------------------------------

static void gated_rms_norm(const View& x, const View& gate, const float* weight, float eps, int group_size, int rows,
                           const View& y, Worker w) {
  const int groups = x.width / group_size;
  const Range mine = range_of(int64_t{rows} * groups, w);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) {
    const int64_t row = unit / groups, column = unit % groups * group_size;
    float* to = y.data + row * y.ld + column;
    for (int i = 0; i < group_size; i += 16) {
      const int lanes = group_size - i < 16 ? group_size - i : 16;
      const f32x16 g = load_lanes(gate.data + row * gate.ld + column + i, lanes);
      const f32x16 value = load_lanes(x.data + row * x.ld + column + i, lanes);
      store_lanes(to + i, lanes, value * (g * sigmoid(g)));
    }
    norm_row(to, weight + column, eps, group_size, to);
  }
}
