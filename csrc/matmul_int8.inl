// int8 weights times int8 activations, and the quantisation of the activations.
//
//     y[r][n] = w_scale[n] * sum over groups g, ascending, of a_scale[r][g] * (integer sum of q * w over g)
//
// The integer sum is exact; the sum over groups is one chain of fused multiply-adds, the same in every tile.
// Weights are stored as w + 128 (pack.h), because x86's dot-product instruction wants one operand unsigned; an
// accumulator there starts at -128 * sum of q, which QuantRows carries.

// A group whose scale would be subnormal, and so imprecise, counts as zero.
constexpr float kTinyGroup = 127 * 1.17549435e-38f;

// The `count` values at x to q[Group]: x * (127 / max|x|) rounded to nearest even, scale = max|x| / 127.
// A group with a NaN or an infinity gets scale NaN and q = 0, so that the whole row, and no other, turns NaN.
template <int Group>
inline void quantize_group(const float* x, int count, int8_t* q, float* scale, int32_t* sum) {
  constexpr int kVecs = Group / 16;
  f32x16 values[kVecs];
  i32x16 largest_lanes = broadcast(int32_t{0});  // as integers, where NaN and infinity are above all that is finite
  for (int i = 0; i < kVecs; ++i) {
    const int rest = count - 16 * i;
    values[i] = rest >= 16 ? load(x + 16 * i) : rest > 0 ? load_first(x + 16 * i, rest) : zero();
    largest_lanes = max(largest_lanes, bits_of(abs(values[i])));
  }
  const float largest = float_of(reduce_max(largest_lanes));
  const bool is_finite = largest < INFINITY;
  const float inverse = is_finite && largest >= kTinyGroup ? 127.0f / largest : 0.0f;
  i32x16 sum_lanes = broadcast(int32_t{0});
  for (int i = 0; i < kVecs; ++i) {
    const i32x16 rounded = round_to_int((is_finite ? values[i] : zero()) * broadcast(inverse));
    sum_lanes = sum_lanes + rounded;
    store_low_bytes(q + 16 * i, rounded);
  }
  *scale = inverse != 0.0f ? largest / 127.0f : is_finite ? 0.0f : NAN;
  *sum = reduce_add(sum_lanes);
}

// Group g of row `row` of an array of `width` columns; its values are at x.
template <int Group>
OCTAVO_INLINE void quantize_group_of(const float* x, int width, int64_t row, int g, const QuantRows& out) {
  const int start = g * Group;
  quantize_group<Group>(x, width - start < Group ? width - start : Group, out.q + row * out.row_bytes + start,
                        out.scale + g * out.stride + row, out.sum + g * out.stride + row);
}

// Calls body(Group<n>{}) with the number of values in a group.
template <int N>
struct Group {
  static constexpr int size = N;
};

template <typename Body>
OCTAVO_INLINE void with_group(int group, const Body& body) {
  if (group == kQuantGroup) return body(Group<kQuantGroup>{});
  if (group == 32) return body(Group<32>{});
  body(Group<16>{});
}

template <int Group>
inline void quantize_rows_by(const View& x, int rows, const QuantRows& out, Worker w) {
  const int groups = (x.width + Group - 1) / Group;
  const Range units = range_of(int64_t{rows} * groups, w);
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t row = unit / groups, g = unit % groups;
    quantize_group_of<Group>(x.data + row * x.ld + g * Group, x.width, row, static_cast<int>(g), out);
  }
}

inline void quantize_rows(const View& x, int rows, const QuantRows& out, Worker w) {
  with_group(out.group, [&](auto group) { quantize_rows_by<group.size>(x, rows, out, w); });
}

// Panels of a gated product whose outputs are quantised together.
inline int panels_of_a_group(const Epilogue& e) { return e.quantized.q ? e.quantized.group / (kPanel / 2) : 1; }

// Once a group's panels are done (or the last there are): quantises the group in rows [row, row + count).
inline void quantize_panels(const Epilogue& e, int n, const Cell& cell, int panel, int row, int count) {
  if (!e.quantized.q || ((panel + 1) % panels_of_a_group(e) && panel + 1 < cell.panel_end)) return;
  with_group(e.quantized.group, [&](auto group) {
    const int g = panel * (kPanel / 2) / group.size;
    for (int64_t r = row; r < row + count; ++r) {
      quantize_group_of<group.size>(place_of(e, r, g * group.size), n / 2, r, g, e.quantized);
    }
  });
}

// The sums of N rows times one slice of a panel, scaled by the activations but not yet by the weights.
template <int N>
OCTAVO_INLINE void slice_i8(const uint8_t* slice, const QuantRows& a, int row, int groups, Ahead ahead, KVAhead* kv,
                            fvec (&out)[N][2]) {
  constexpr int kStart = kByteShift - 128;
  const int64_t stride = int64_t{groups} * kQuantGroup;
  const int8_t* q = a.q + row * stride;
  const float* scale = a.scale + row;
  const int32_t* q_sum = a.sum + row;
  fvec sum[N][2];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) sum[r][0] = sum[r][1] = fvec{};
  for (int g = 0; g < groups; ++g) {
    ask_ahead(kv);
    ivec acc[N][2];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) acc[r][0] = acc[r][1] = broadcast_part(kStart * q_sum[r]);
#pragma GCC unroll 1
    for (int i = 0; i < kQuantGroup / 4; ++i) {
      ahead.prefetch_step_where_free();
      const uvec w0 = shift_bytes(load_part(slice)), w1 = shift_bytes(load_part(slice + 4 * kWidth));
      slice += 4 * kPanel;
#pragma GCC unroll 8
      for (int r = 0; r < N; ++r) {
        int32_t four;
        std::memcpy(&four, q + r * stride + 4 * i, 4);
        acc[r][0] = dot4_part(acc[r][0], w0, four);
        acc[r][1] = dot4_part(acc[r][1], w1, four);
      }
    }
    q += kQuantGroup;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const fvec s = broadcast_part(scale[r]);
      sum[r][0] = fma_part(to_float_part(acc[r][0]), s, sum[r][0]);
      sum[r][1] = fma_part(to_float_part(acc[r][1]), s, sum[r][1]);
    }
    scale += a.stride;
    q_sum += a.stride;
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
    out[r][0] = sum[r][0];
    out[r][1] = sum[r][1];
  }
}

// The same by a call: what stands around it would decide which of its registers are spilled (7 rows: a third slower).
template <int N>
static __attribute__((noinline)) void call_slice_i8(const uint8_t* slice, const QuantRows& a, int row, int groups,
                                                    Ahead ahead, KVAhead* kv, fvec (&out)[N][2]) {
  slice_i8(slice, a, row, groups, ahead, kv, out);
}

static __attribute__((noinline)) void multiply_i8(const MatrixI8& m, const QuantRows& a, int rows, const Epilogue& e,
                                                  Worker w) {
  const int groups = (m.k + kQuantGroup - 1) / kQuantGroup;
  const int64_t panel_bytes = int64_t{groups} * kQuantGroup * kPanel;
  const Cell cell = cell_of(num_panels(m.n, e.act), rows, most_rows(int64_t{groups} * kQuantGroup, e), w,
                            panels_of_a_group(e));
  for_each_tile(cell, [&](auto n, int row, int panel, int part, int parts) {
    const uint8_t* data = m.data + panel * panel_bytes;
    const Ahead ahead = ahead_of(data, panel_bytes, 4 * kPanel, n.count, part, parts, 2048);
    f32x16 sum[n.count][2];
    for_each_slice(sum, [&](int column, auto& out) {
      KVAhead* kv = parts >= kAheadTiles ? w.ahead : nullptr;
      if constexpr (n.count == kTileRows) {  // all but a few tiles of a large product: the call would cost it 2 %
        slice_i8(data + 4 * column, a, row, groups, ahead, kv, out);
      } else {
        call_slice_i8(data + 4 * column, a, row, groups, ahead, kv, out);
      }
    });
#pragma GCC unroll 8
    for (int r = 0; r < n.count; ++r) {
      sum[r][0] = sum[r][0] * load(m.scale + panel * kPanel);
      sum[r][1] = sum[r][1] * load(m.scale + panel * kPanel + 16);
    }
    finish_tile<n.count>(sum, m.n, row, panel, e);
  }, [&](int panel, int row, int count) { quantize_panels(e, m.n, cell, panel, row, count); });
}

inline void matmul_i8(const MatrixI8& m, const QuantRows& a, int rows, const Epilogue& e, Worker w) {
  with_held(e, [&](const Epilogue& mine) { multiply_i8(m, a, rows, mine, w); });
}
