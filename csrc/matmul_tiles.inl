// What the two matrix kernels share: who computes which tile, and what happens to a finished tile.
//
// A tile is a few rows by one panel. It is computed in slices of two machine registers of columns, so that its
// sums fill the register file of each instruction set. Tiles and slices only choose which outputs are computed
// together; an output's own chain of operations is the same in all of them.

constexpr int kTileRows = kRegisters >= 32 ? 8 : 6;
constexpr int64_t kRowBlockBytes = 384 << 10;  // activations that stay in L2 while all panels pass over them

// The part of a product that one worker computes: half-open ranges.
struct Cell {
  int panel_begin, panel_end;
  int row_begin, row_end;
  int block_rows;  // at most
};

OCTAVO_INLINE int split_point(int count, int part, int parts) {
  return static_cast<int>(int64_t{count} * part / parts);
}

// The same, but where there are units enough the parts of each of several threads get smaller: who is done first waits
// for another's last one only.
OCTAVO_INLINE int falling_split_point(int count, int part, int parts) {
  constexpr int kSixteenths[kPieces] = {0, 6, 11, 14};
  if (parts == kPieces || parts % kPieces || count < 2 * parts) return split_point(count, part, parts);
  const int64_t sixteenths = 16 * (part / kPieces) + kSixteenths[part % kPieces], all = 16 * (parts / kPieces);
  return static_cast<int>((count * sixteenths + all / 2) / all);
}

// Outputs of a gated product that are not stored: one group of a block of rows, [kHeldRows][kQuantGroup]. All of them
// would take more of the second cache than all else that a step's rows need.
constexpr int kHeldRows = 256;

// Calls body(e) with memory for such outputs, where there are any.
template <class Body>
OCTAVO_INLINE void with_held(Epilogue e, const Body& body) {
  if (e.y) return body(e);
  alignas(64) float held[kHeldRows * kQuantGroup];
  e.held = held;
  body(e);
}

// Where the output of a gated product lies until it is quantised, and if it is stored, ever after.
OCTAVO_INLINE float* place_of(const Epilogue& e, int64_t row, int column) {
  return e.y ? e.y + row * e.ldy + column : e.held + row % kHeldRows * kQuantGroup + column % kQuantGroup;
}

// The most rows of a block: their activations stay in L2 while all panels of a cell pass over them, and what is held of
// them has its place.
inline int most_rows(int64_t row_bytes, const Epilogue& e) {
  const int64_t fitting = kRowBlockBytes / row_bytes;
  return static_cast<int>(fitting < kTileRows ? kTileRows : e.y || fitting < kHeldRows ? fitting : kHeldRows);
}

OCTAVO_INLINE int num_row_blocks(int rows, int most) { return (rows + most - 1) / most; }

// Cuts panels x rows into a grid of at most w.count cells. Rows are split only as far as a cell's do not fit in L2, so
// that each weight is read by few workers; where there are fewer panels than workers, such that the largest cell is
// smallest. Cells of the same panels follow one another: a thread has them in turn. Bundles of panels stay whole.
inline Cell cell_of(int all_panels, int rows, int block_rows, Worker w, int bundle = 1) {
  const int panels = (all_panels + bundle - 1) / bundle, row_tiles = (rows + kTileRows - 1) / kTileRows;
  int least = num_row_blocks(rows, block_rows);
  least = least < 1 ? 1 : least < w.count ? least : w.count;
  while (w.count % least) ++least;  // no worker is left without a cell
  const int most = panels >= w.count / least || row_tiles < least ? least : row_tiles < w.count ? row_tiles : w.count;
  int best_rows = 1, best_panels = 1;
  int64_t best_cost = INT64_MAX;
  for (int row_parts = least; row_parts <= most; ++row_parts) {
    const int panel_parts = w.count / row_parts < panels ? w.count / row_parts : panels;
    const int64_t cost = int64_t{(panels + panel_parts - 1) / panel_parts} * ((rows + row_parts - 1) / row_parts);
    if (cost < best_cost) {
      best_rows = row_parts;
      best_panels = panel_parts;
      best_cost = cost;
    }
  }
  const int p = w.id / best_rows, r = w.id % best_rows;
  if (p >= best_panels) return {0, 0, 0, 0, block_rows};
  const auto panel_of = [&](int part) {
    return bundle * (best_panels == w.count ? falling_split_point : split_point)(panels, part, best_panels);
  };
  const int end = panel_of(p + 1);
  return {panel_of(p), end < all_panels ? end : all_panels, split_point(rows, r, best_rows),
          split_point(rows, r + 1, best_rows), block_rows};
}

template <int N>
struct Rows {
  static constexpr int count = N;
};

// Calls body(Rows<n>{}) with the run-time n, 1 <= n <= kTileRows.
template <int N = kTileRows, typename Body>
OCTAVO_INLINE void with_rows(int n, const Body& body) {
  if constexpr (N == 1) {
    body(Rows<1>{});
  } else {
    if (n == N) return body(Rows<N>{});
    with_rows<N - 1>(n, body);
  }
}

// Calls body(Rows<n>{}, row, panel, part, parts), n <= kTileRows, for every tile of the cell. Rows are taken
// in blocks that stay in L2; within a block each panel meets the row tiles (number `part` of `parts`) in turn, and
// then after(panel, row, count) is called for the rows of the block.
template <typename Body, typename After>
OCTAVO_INLINE void for_each_tile(const Cell& cell, const Body& body, const After& after) {
  const int rows = cell.row_end - cell.row_begin;
  const int blocks = num_row_blocks(rows, cell.block_rows);
  for (int b = 0; b < blocks; ++b) {
    const int begin = cell.row_begin + split_point(rows, b, blocks);
    const int count = cell.row_begin + split_point(rows, b + 1, blocks) - begin;
    const int tiles = (count + kTileRows - 1) / kTileRows;
    for (int panel = cell.panel_begin; panel < cell.panel_end; ++panel) {
      for (int t = 0; t < tiles; ++t) {
        // Even heights, the taller ones first: mixed heights would be mispredicted branches.
        const int row = t * (count / tiles) + (t < count % tiles ? t : count % tiles);
        with_rows(count / tiles + (t < count % tiles), [&](auto n) { body(n, begin + row, panel, t, tiles); });
      }
      after(panel, begin, count);
    }
  }
}

// Calls body(column, sums) for every slice of a panel, `column` being its first, and puts the sums together.
template <int N, typename Body>
OCTAVO_INLINE void for_each_slice(f32x16 (&sum)[N][2], const Body& body) {
#pragma GCC unroll 1
  for (int slice = 0; slice < kParts; ++slice) {
    fvec part[N][2];
    body(slice * 2 * kWidth, part);
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      sum[r][2 * slice / kParts].v[2 * slice % kParts] = part[r][0];
      sum[r][(2 * slice + 1) / kParts].v[(2 * slice + 1) % kParts] = part[r][1];
    }
  }
}

// What a tile prefetches while it computes, `step` bytes further at each of its steps. The only row tile of a
// panel reads memory as fast as it comes, so it looks a short way ahead, or with few rows leaves it to the processor;
// several row tiles have the time to fetch the next panel between them.
struct Ahead {
  const char* address;
  int64_t step;  // 128 of the only row tile, or 0: it asks for what it has; 64 of each of two

  OCTAVO_INLINE void prefetch_step() {
    prefetch_l1(address);
    prefetch_l1(address + 64);
    address += step;
  }
  OCTAVO_INLINE void prefetch_half_step() {
    prefetch_l1(address);
    address += step / 2;
  }
  // For products that wait for the memory at one or two row tiles: requests for the first cache wait for one of its few
  // free entries, those for the second do not.
  OCTAVO_INLINE void prefetch_step_where_free() {
    step >= 64 ? prefetch_l2(address) : prefetch_l1(address);
    if (step > 64) prefetch_l2(address + 64);
    address += step;
  }
};

constexpr int kFewRows = 3;  // read memory so fast that the processor by itself looks far enough ahead

// `near`: how far ahead the only row tile of few rows looks, in bytes; 0: it asks for nothing.
OCTAVO_INLINE Ahead ahead_of(const void* panel, int64_t panel_bytes, int64_t step_bytes, int rows, int part, int parts,
                             int64_t near) {
  const auto* begin = static_cast<const char*>(panel);
  if (parts > 1) return {begin + panel_bytes + panel_bytes * part / parts, step_bytes / parts};
  if (rows > kFewRows) return {begin + 8192, step_bytes};
  return {begin + near, near ? step_bytes : 0};
}

inline int num_panels(int n, Act act) {
  return act == Act::none ? (n + kPanel - 1) / kPanel : (n / 2 + kPanel / 2 - 1) / (kPanel / 2);
}

// silu(x) = x s(x) and gelu_tanh(x) = x s(2u), u = sqrt(2/pi) (x + 0.044715 x^3), s(t) = 1 / (1 + e^-t).
OCTAVO_INLINE f32x16 activate(Act act, f32x16 x) {
  f32x16 t = x;
  if (act == Act::gelu_tanh) t = broadcast(1.5957691216057308f) * fma(broadcast(0.044715f) * x * x, x, x);
  return x / (broadcast(1.0f) + exp(zero() - t));
}

// Writes the finished sums of rows [row, row + N) and one panel. Unrolled, so that the sums stay in registers.
template <int N>
OCTAVO_INLINE void finish_tile(const f32x16 (&sum)[N][2], int n, int row, int panel, const Epilogue& e) {
  if (e.act != Act::none) {
    const int column = panel * (kPanel / 2);
    const int count = n / 2 - column < 16 ? n / 2 - column : 16;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      store_first(place_of(e, row + r, column), count, activate(e.act, sum[r][0]) * sum[r][1]);
    }
    return;
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const int column = panel * kPanel + half * 16;
    const int count = n - column < 0 ? 0 : n - column < 16 ? n - column : 16;
#pragma GCC unroll 8
    for (int r = 0; r < N; ++r) {
      f32x16 y = sum[r][half];
      if (e.bias) y = y + load_first(e.bias + column, count);
      if (e.residual) y = y + load_first(e.residual + (row + r) * e.ldr + column, count);
      store_first(e.y + (row + r) * e.ldy + column, count, y);
    }
  }
}
