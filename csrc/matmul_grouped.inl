// Weights as a quantised file stores them, a scale for every 16 or 32 along K, times int8 activations in those groups.
//
//     y[r][n] = sum over groups g, ascending, of a_scale[r][g] * (scale[n][g] * I + low[n][g] * sum of q over g)
//     I = the integer sum of q * code over g; without `low` codes count from 2^(bits - 1)
//
// I is exact, and so is low * sum; the rest are two fused multiply-adds a group, the same in every tile.
// The codes are unpacked in registers, once for all rows of a tile.

// acc + four k of the codes times the same k of N rows. `q` points at the first row's four.
template <int N>
OCTAVO_INLINE void add_four(uvec w0, uvec w1, const int8_t* q, int64_t stride, ivec (&acc)[N][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
    int32_t four;
    std::memcpy(&four, q + r * stride, 4);
    acc[r][0] = dot4_part(acc[r][0], w0, four);
    acc[r][1] = dot4_part(acc[r][1], w1, four);
  }
}

// Codes of four k from their lower bits and, Rest at a time, from `above` whose `Begin`th bits of each byte they are.
template <int Rest, int Begin>
OCTAVO_INLINE uvec join_code(uvec lower, uvec above) {
  lower &= 0x0f0f0f0fu;
  if constexpr (Rest > 0) lower |= above << (4 - Begin) & (Rest == 1 ? 0x10101010u : 0x30303030u);
  return lower;
}

// The integer sums of N rows and two registers of columns over one group. Layout of `codes`: pack.h.
template <int Bits, int N>
OCTAVO_INLINE void sum_group(const uint8_t* codes, const int8_t* q, int64_t stride, Ahead& ahead, ivec (&acc)[N][2]) {
  constexpr int kGroup = code_group(Bits), kRest = Bits == 8 ? 0 : Bits - 4;
  uvec above0{}, above1{};
  if constexpr (kRest > 0) {
    ahead.prefetch_step();
    above0 = load_part(codes + kGroup / 2 * kPanel);
    above1 = load_part(codes + kGroup / 2 * kPanel + 4 * kWidth);
  }
#pragma GCC unroll 1
  for (int i = 0; i < kGroup / (Bits == 8 ? 4 : 8); ++i) {
    ahead.prefetch_step();
    const uvec w0 = load_part(codes), w1 = load_part(codes + 4 * kWidth);
    codes += 4 * kPanel;
    if constexpr (Bits == 8) {
      add_four<N>(shift_bytes(w0), shift_bytes(w1), q + 4 * i, stride, acc);
    } else {
      add_four<N>(join_code<kRest, 0>(w0, above0), join_code<kRest, 0>(w1, above1), q + 8 * i, stride, acc);
      add_four<N>(join_code<kRest, kRest>(w0 >> 4, above0), join_code<kRest, kRest>(w1 >> 4, above1), q + 8 * i + 4,
                  stride, acc);
      above0 >>= 2 * kRest;
      above1 >>= 2 * kRest;
    }
  }
}

// The sums of N rows times the slice of a panel that begins at `column`.
template <int Bits, bool HasLow, int N>
OCTAVO_INLINE void slice_grouped(const uint8_t* block, int column, const QuantRows& a, int row, int groups, Ahead ahead,
                                 KVAhead* kv, fvec (&out)[N][2]) {
  constexpr int kGroup = code_group(Bits), kStart = (Bits == 8 ? kByteShift : 0) - (1 << (Bits - 1));
  const int64_t stride = int64_t{groups} * kGroup;
  const int8_t* q = a.q + row * stride;
  const float* a_scale = a.scale + row;
  const int32_t* q_sum = a.sum + row;
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) out[r][0] = out[r][1] = fvec{};
  for (int g = 0; g < groups; ++g) {
    if (g % 2 == 0) ask_ahead(kv);
    ivec acc[N][2];
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      acc[r][0] = acc[r][1] = HasLow ? ivec{} : broadcast_part(kStart * q_sum[r]);
    }
    sum_group<Bits, N>(block + 4 * column, q, stride, ahead, acc);
    HasLow ? ahead.prefetch_step() : ahead.prefetch_half_step();
    const auto* halves = reinterpret_cast<const uint16_t*>(block + grouped_code_bytes(Bits)) + column;
    const fvec scale0 = load_half_part(halves), scale1 = load_half_part(halves + kWidth);
    fvec low0{}, low1{};
    if constexpr (HasLow) {
      low0 = load_half_part(halves + kPanel);
      low1 = load_half_part(halves + kPanel + kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const fvec factor = broadcast_part(a_scale[r]);
      fvec t0, t1;
      if constexpr (HasLow) {
        const fvec q_total = broadcast_part(static_cast<float>(q_sum[r]));
        t0 = fma_part(to_float_part(acc[r][0]), scale0, low0 * q_total);
        t1 = fma_part(to_float_part(acc[r][1]), scale1, low1 * q_total);
      } else {
        t0 = to_float_part(acc[r][0]) * scale0;
        t1 = to_float_part(acc[r][1]) * scale1;
      }
      out[r][0] = fma_part(t0, factor, out[r][0]);
      out[r][1] = fma_part(t1, factor, out[r][1]);
    }
    block += grouped_block_bytes(Bits, HasLow);
    q += kGroup;
    a_scale += a.stride;
    q_sum += a.stride;
  }
}

template <int Bits, bool HasLow = false>
inline void multiply_bits(const MatrixGrouped& m, const QuantRows& a, int rows, const Epilogue& e, Worker w) {
  constexpr int kGroup = code_group(Bits), kBlockBytes = grouped_block_bytes(Bits, HasLow);
  const int groups = m.k / kGroup;
  const int64_t panel_bytes = int64_t{groups} * kBlockBytes;
  const Cell cell = cell_of(num_panels(m.n, e.act), rows, most_rows(m.k, e), w, panels_of_a_group(e));
  for_each_tile(cell, [&](auto n, int row, int panel, int part, int parts) {
    const uint8_t* data = m.data + panel * panel_bytes;
    const Ahead ahead = ahead_of(data, panel_bytes, 4 * kPanel, n.count, part, parts, 0);
    f32x16 sum[n.count][2];
    for_each_slice(sum, [&](int column, auto& out) {
      slice_grouped<Bits, HasLow, n.count>(data, column, a, row, groups, ahead,
                                           parts >= kAheadTiles ? w.ahead : nullptr, out);
    });
    finish_tile<n.count>(sum, m.n, row, panel, e);
  }, [&](int panel, int row, int count) { quantize_panels(e, m.n, cell, panel, row, count); });
}

static __attribute__((noinline)) void multiply_grouped(const MatrixGrouped& m, const QuantRows& a, int rows,
                                                       const Epilogue& e, Worker w) {
  switch (m.bits) {
    case 4: return m.has_low ? multiply_bits<4, true>(m, a, rows, e, w) : multiply_bits<4>(m, a, rows, e, w);
    case 5: return m.has_low ? multiply_bits<5, true>(m, a, rows, e, w) : multiply_bits<5>(m, a, rows, e, w);
    case 6: return multiply_bits<6>(m, a, rows, e, w);
    default: return multiply_bits<8>(m, a, rows, e, w);
  }
}

inline void matmul_grouped(const MatrixGrouped& m, const QuantRows& a, int rows, const Epilogue& e, Worker w) {
  with_held(e, [&](const Epilogue& mine) { multiply_grouped(m, a, rows, mine, w); });
}
