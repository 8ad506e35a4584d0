// float32 weights times float32 activations.
//
//     y[r][n] = one chain of fused multiply-adds over k, ascending
//
// Panels are [K][kPanel] (pack.h). The chain is the same in every tile, so a row's result is its own.

constexpr int kTileRowsF32 = kVectors >= 32 ? 8 : kVectors >= 8 ? 3 : 1;

// The sums of N rows times one panel.
template <int N>
OCTAVO_INLINE void tile_f32(const float* panel, const float* x, int64_t ldx, int k, Ahead ahead,
                            f32x16 (&sum)[N][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) sum[r][0] = sum[r][1] = zero();
#pragma GCC unroll 1
  for (int i = 0; i < k; ++i) {
    prefetch_l1(ahead.address);
    prefetch_l1(ahead.address + 64);
    ahead.address += ahead.step;
    const f32x16 w0 = load(panel), w1 = load(panel + 16);
    panel += kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const f32x16 s = broadcast(x[r * ldx + i]);
      sum[r][0] = fma(s, w0, sum[r][0]);
      sum[r][1] = fma(s, w1, sum[r][1]);
    }
  }
}

inline void matmul_f32(const MatrixF32& m, const View& a, int rows, const Epilogue& e, Worker w) {
  const int64_t panel_bytes = int64_t{m.k} * kPanel * 4;
  const Cell cell = cell_of(num_panels(m.n, e.act), rows, kTileRowsF32, w);
  for_each_tile<kTileRowsF32>(cell, int64_t{m.k} * 4, [&](auto n, int row, int panel, int part, int parts) {
    f32x16 sum[n.count][2];
    const float* data = m.data + panel * panel_bytes / 4;
    tile_f32<n.count>(data, a.data + row * a.ld, a.ld, m.k, ahead_of(data, panel_bytes, 4 * kPanel, part, parts), sum);
    finish_tile<n.count>(sum, m.n, row, panel, e);
  });
}
