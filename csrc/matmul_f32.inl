// float32 weights times float32 activations.
//
//     y[r][n] = one chain of fused multiply-adds over k, ascending
//
// Panels are [K][kPanel] (pack.h). The chain is the same in every tile, so a row's result is its own.

// The sums of N rows times one slice of a panel.
template <int N>
OCTAVO_INLINE void slice_f32(const float* slice, const float* x, int64_t ldx, int k, Ahead ahead, fvec (&out)[N][2]) {
  fvec sum[N][2];
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) sum[r][0] = sum[r][1] = fvec{};
#pragma GCC unroll 1
  for (int i = 0; i < k; ++i) {
    ahead.prefetch_step();
    const fvec w0 = load_part(slice), w1 = load_part(slice + kWidth);
    slice += kPanel;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      const fvec s = broadcast_part(x[r * ldx + i]);
      sum[r][0] = fma_part(s, w0, sum[r][0]);
      sum[r][1] = fma_part(s, w1, sum[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < N; ++r) {
    out[r][0] = sum[r][0];
    out[r][1] = sum[r][1];
  }
}

inline void matmul_f32(const MatrixF32& m, const View& a, int rows, const Epilogue& e, Worker w) {
  const int64_t panel_bytes = int64_t{m.k} * kPanel * 4;
  const Cell cell = cell_of(num_panels(m.n, e.act), rows, most_rows(int64_t{m.k} * 4, e), w);
  for_each_tile(cell, [&](auto n, int row, int panel, int part, int parts) {
    const float* data = m.data + panel * panel_bytes / 4;
    const Ahead ahead = ahead_of(data, panel_bytes, 4 * kPanel, n.count, part, parts, 0);
    f32x16 sum[n.count][2];
    for_each_slice(sum, [&](int column, auto& out) {
      slice_f32<n.count>(data + column, a.data + row * a.ld, a.ld, m.k, ahead, out);
    });
    finish_tile<n.count>(sum, m.n, row, panel, e);
  }, [](int, int, int) {});
}
