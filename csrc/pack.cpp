// Packing of weight matrices (layouts: pack.h). Runs once, at load; plain code, threads over panels.
#include "pack.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace octavo {
namespace {

constexpr int64_t kElementsPerThread = 1 << 18;  // below this a thread costs more than it saves

// A channel whose scale would be subnormal, and so imprecise, counts as zero.
constexpr float kTinyChannel = 127 * std::numeric_limits<float>::min();

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Which row of the source is a panel's column: of `first`, or of `second` in the upper half of a gated panel.
template <typename T>
struct Columns {
  T* first;
  T* second;  // null where not gated
  int n, k;

  int num_panels() const { return round_up(n, width()) / width(); }

  // Null where the panel is padded.
  T* row(int panel, int column) const {
    const bool is_second = column >= width();
    const int64_t index = int64_t{panel} * width() + (is_second ? column - width() : column);
    return index < n ? (is_second ? second : first) + index * k : nullptr;
  }

 private:
  int width() const { return second ? kPanel / 2 : kPanel; }
};

std::array<int, 3> sizes_of(const Weights& w) {
  if (w.n < 1 || w.k < 1) {
    throw std::invalid_argument("a weight matrix of " + std::to_string(w.n) + " by " + std::to_string(w.k) +
                                " is empty; both sizes must be at least 1");
  }
  return {w.up ? 2 * w.n : w.n, w.k, w.up != nullptr};
}

Columns<float> unpacked_columns(float* out, int n, int k, bool is_gated) {
  if (!is_gated) return {out, nullptr, n, k};
  return {out, out + int64_t{n / 2} * k, n / 2, k};
}

// The panels of a matrix of that size; throws where there is none such.
int64_t checked_panels(int n, int k, int is_gated) {
  const int width = is_gated ? kPanel / 2 : kPanel, rows = is_gated ? n / 2 : n;
  if (rows < 1 || k < 1 || is_gated < 0 || is_gated > 1 || (is_gated && n % 2) || n > INT_MAX - kPanel ||
      k > INT_MAX - kPanel) {
    throw std::invalid_argument("a packed matrix of " + std::to_string(n) + " by " + std::to_string(k) +
                                " (gated: " + std::to_string(is_gated) + ") cannot be");
  }
  return (int64_t{rows} + width - 1) / width;
}

// Calls body(panel) for every panel, in parallel. A thread that cannot be started leaves its work to the others.
template <typename Body>
void for_each_panel(int panels, int k, int num_threads, const Body& body) {
  const int64_t useful = int64_t{panels} * kPanel * k / kElementsPerThread;
  std::atomic<int> next{0};
  auto run = [&] {
    for (int panel = next++; panel < panels; panel = next++) body(panel);
  };
  std::vector<std::thread> others;
  try {
    for (int64_t i = 1; i < std::min<int64_t>(useful, num_threads); ++i) others.emplace_back(run);
  } catch (const std::system_error&) {
  }
  run();
  for (std::thread& other : others) other.join();
}

// max|x|, or infinity where a value is NaN or infinite. Compares bit patterns, which order as |x| does.
float absmax(const float* x, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  largest = std::min(largest, 0x7f800000u);
  float result;
  std::memcpy(&result, &largest, sizeof result);
  return result;
}

[[noreturn]] void throw_not_finite(const Weights& w) {
  for (const float* matrix : {w.rows, w.up}) {
    for (int n = 0; matrix && n < w.n; ++n) {
      if (std::isfinite(absmax(matrix + int64_t{n} * w.k, w.k))) continue;
      const std::string which = !w.up ? "" : matrix == w.up ? " of up" : " of gate";
      throw std::invalid_argument("weight row " + std::to_string(n) + which + " (of " + std::to_string(w.n) +
                                  ") holds NaN or infinity; the file is damaged or was converted with overflow");
    }
  }
  throw std::logic_error("every weight is finite");
}

// One column of an int8 panel: w[i] / scale + 128, four to a lane, lanes kPanel apart.
void quantize_column(const float* w, int k, float inverse_scale, uint8_t* out) {
  constexpr int kBatch = 256;
  uint8_t quantized[kBatch];
  for (int start = 0; start < k; start += kBatch) {
    const int count = std::min(kBatch, k - start);
    for (int i = 0; i < count; ++i) {
      // Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
      const float shifted = w[start + i] * inverse_scale + 12582912.0f;
      uint32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      quantized[i] = static_cast<uint8_t>(bits + 128);
    }
    std::fill(quantized + count, quantized + round_up(count, 4), uint8_t{128});
    for (int i = 0; i < count; i += 4) std::memcpy(out + int64_t{start + i} * kPanel, quantized + i, 4);
  }
}

using Part = GroupedWeights::Part;

// One column of the codes of a grouped panel; its blocks are `block_bytes` apart.
void place_codes(const uint8_t* codes, int k, int bits, int block_bytes, uint8_t* out) {
  const int group = code_group(bits);
  for (int i = 0; i < k; ++i) {
    const int at = i % group, run = at / 4;
    uint8_t* lanes = out + int64_t{i / group} * block_bytes + at % 4;
    if (bits == 8) {
      lanes[run * 4 * kPanel] = codes[i];
      continue;
    }
    lanes[run / 2 * 4 * kPanel] |= static_cast<uint8_t>((codes[i] & 15) << (run % 2 * 4));
    if (bits > 4) lanes[group / 2 * kPanel] |= static_cast<uint8_t>(codes[i] >> 4 << (run * (bits - 4)));
  }
}

float half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  const float size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(1.0f * fraction, -24);
  return half & 0x8000 ? -size : size;
}

void check_grouped(const Part& part, int n, int k, int bits) {
  const int64_t groups = int64_t{n} * (k / code_group(bits));
  const auto is_not_finite = [](uint16_t half) { return (half & 0x7c00) == 0x7c00; };
  for (const uint16_t* halves : {part.scale, part.low}) {
    if (halves && std::any_of(halves, halves + groups, is_not_finite)) {
      throw std::invalid_argument("a scale or lowest value of a weight group is NaN or infinity; the file is damaged");
    }
  }
  const auto is_wide = [bits](uint8_t code) { return code >> bits; };
  if (std::any_of(part.codes, part.codes + int64_t{n} * k, is_wide)) {
    throw std::invalid_argument("a code does not fit the " + std::to_string(bits) + " bits it should have");
  }
}

}  // namespace

PackedI8::PackedI8(const Sizes& sizes) : n_(sizes[0]), k_(sizes[1]), is_gated_(sizes[2] != 0) {
  const auto columns = static_cast<size_t>(checked_panels(n_, k_, sizes[2])) * kPanel;
  data_ = AlignedBuffer(columns * static_cast<size_t>(round_up(k_, kQuantGroup)));
  scale_ = AlignedBuffer(columns * sizeof(float));
}

PackedI8::PackedI8(const Weights& weights, int num_threads) : PackedI8(sizes_of(weights)) {
  const Columns<const float> columns{weights.rows, weights.up, weights.n, weights.k};
  const int panels = columns.num_panels();
  const int64_t panel_bytes = int64_t{round_up(k_, kQuantGroup)} * kPanel;
  std::atomic<bool> is_finite{true};
  for_each_panel(panels, k_, num_threads, [&](int panel) {
    uint8_t* data = data_.as<uint8_t>() + panel * panel_bytes;
    std::memset(data, 128, static_cast<size_t>(panel_bytes));
    for (int c = 0; c < kPanel; ++c) {
      const float* row = columns.row(panel, c);
      float largest = row ? absmax(row, k_) : 0.0f;
      if (!std::isfinite(largest)) is_finite = false;
      if (!std::isfinite(largest) || largest < kTinyChannel) largest = 0.0f;
      scale_.as<float>()[panel * kPanel + c] = largest / 127.0f;
      if (largest > 0.0f) quantize_column(row, k_, 127.0f / largest, data + 4 * c);
    }
  });
  if (!is_finite) throw_not_finite(weights);
}

void PackedI8::unpack(float* out) const {
  const Columns<float> columns = unpacked_columns(out, n_, k_, is_gated_);
  const int64_t panel_bytes = int64_t{round_up(k_, kQuantGroup)} * kPanel;
  for (int panel = 0; panel < columns.num_panels(); ++panel) {
    const uint8_t* data = data_.as<uint8_t>() + panel * panel_bytes;
    for (int c = 0; c < kPanel; ++c) {
      float* row = columns.row(panel, c);
      const float scale = scale_.as<float>()[panel * kPanel + c];
      for (int i = 0; row && i < k_; ++i) {
        row[i] = scale * static_cast<float>(data[(i / 4 * kPanel + c) * 4 + i % 4] - 128);
      }
    }
  }
}

PackedGrouped::PackedGrouped(const Sizes& sizes)
    : n_(sizes[0]), k_(sizes[1]), bits_(sizes[3]), has_low_(sizes[4] != 0), is_gated_(sizes[2] != 0) {
  if (bits_ < 4 || bits_ == 7 || bits_ > (has_low_ ? 5 : 8)) {
    throw std::invalid_argument("there is no kernel for codes of " + std::to_string(bits_) +
                                (has_low_ ? " bits with a lowest value; 4 and 5 have one" : " bits; 4, 5, 6, 8 have one"));
  }
  const int group = code_group(bits_);
  if (n_ < 1 || k_ < 1 || k_ % group) {
    throw std::invalid_argument("grouped weights of " + std::to_string(n_) + " by " + std::to_string(k_) +
                                ": both sizes must be at least 1, the second a multiple of " + std::to_string(group));
  }
  const auto panels = static_cast<size_t>(checked_panels(n_, k_, sizes[2]));
  data_ = AlignedBuffer(panels * static_cast<size_t>(k_ / group) *
                        static_cast<size_t>(grouped_block_bytes(bits_, has_low_)));
}

PackedGrouped::PackedGrouped(const GroupedWeights& w, int num_threads)
    : PackedGrouped(Sizes{w.up.codes ? 2 * w.n : w.n, w.k, w.up.codes != nullptr, w.bits, w.rows.low != nullptr}) {
  if (is_gated_ && has_low_ != (w.up.low != nullptr)) {
    throw std::invalid_argument("both or none of gate and up must have lowest values");
  }
  check_grouped(w.rows, w.n, w.k, bits_);
  if (is_gated_) check_grouped(w.up, w.n, w.k, bits_);
  const int groups = k_ / code_group(bits_), block_bytes = grouped_block_bytes(bits_, has_low_);
  const Columns<const uint8_t> codes{w.rows.codes, w.up.codes, w.n, k_};
  const Columns<const uint16_t> scales{w.rows.scale, w.up.scale, w.n, groups}, lows{w.rows.low, w.up.low, w.n, groups};
  const int64_t panel_bytes = int64_t{groups} * block_bytes;
  for_each_panel(codes.num_panels(), k_, num_threads, [&](int panel) {
    uint8_t* data = data_.as<uint8_t>() + panel * panel_bytes;
    std::memset(data, 0, static_cast<size_t>(panel_bytes));  // scale 0: columns that do not exist are zero
    for (int c = 0; c < kPanel; ++c) {
      const uint8_t* row = codes.row(panel, c);
      if (!row) continue;
      place_codes(row, k_, bits_, block_bytes, data + 4 * c);
      for (int g = 0; g < groups; ++g) {
        auto* halves = reinterpret_cast<uint16_t*>(data + int64_t{g} * block_bytes + grouped_code_bytes(bits_));
        halves[c] = scales.row(panel, c)[g];
        if (has_low_) halves[kPanel + c] = lows.row(panel, c)[g];
      }
    }
  });
}

void PackedGrouped::unpack(float* out) const {
  const Columns<float> columns = unpacked_columns(out, n_, k_, is_gated_);
  const int group = code_group(bits_), block_bytes = grouped_block_bytes(bits_, has_low_), centre = 1 << (bits_ - 1);
  const int64_t panel_bytes = int64_t{k_ / group} * block_bytes;
  for (int panel = 0; panel < columns.num_panels(); ++panel) {
    const uint8_t* data = data_.as<uint8_t>() + panel * panel_bytes;
    for (int c = 0; c < kPanel; ++c) {
      float* row = columns.row(panel, c);
      for (int i = 0; row && i < k_; ++i) {
        const uint8_t* block = data + int64_t{i / group} * block_bytes;
        const int code = grouped_code(block + 4 * c, i % group, bits_);
        const auto* halves = reinterpret_cast<const uint16_t*>(block + grouped_code_bytes(bits_));
        const float scale = half_value(halves[c]);
        row[i] = has_low_ ? scale * static_cast<float>(code) + half_value(halves[kPanel + c])
                          : scale * static_cast<float>(code - centre);
      }
    }
  }
}

PackedF32::PackedF32(const Sizes& sizes) : n_(sizes[0]), k_(sizes[1]), is_gated_(sizes[2] != 0) {
  const auto columns = static_cast<size_t>(checked_panels(n_, k_, sizes[2])) * kPanel;
  data_ = AlignedBuffer(columns * static_cast<size_t>(k_) * sizeof(float));
}

PackedF32::PackedF32(const Weights& weights, int num_threads) : PackedF32(sizes_of(weights)) {
  const Columns<const float> columns{weights.rows, weights.up, weights.n, weights.k};
  const int panels = columns.num_panels();
  const int64_t panel_floats = int64_t{k_} * kPanel;
  std::atomic<bool> is_finite{true};
  for_each_panel(panels, k_, num_threads, [&](int panel) {
    float* data = data_.as<float>() + panel * panel_floats;
    for (int c = 0; c < kPanel; ++c) {
      const float* row = columns.row(panel, c);
      if (row && !std::isfinite(absmax(row, k_))) is_finite = false;
      for (int i = 0; i < k_; ++i) data[int64_t{i} * kPanel + c] = row ? row[i] : 0.0f;
    }
  });
  if (!is_finite) throw_not_finite(weights);
}

void PackedF32::unpack(float* out) const {
  const Columns<float> columns = unpacked_columns(out, n_, k_, is_gated_);
  const int64_t panel_floats = int64_t{k_} * kPanel;
  for (int panel = 0; panel < columns.num_panels(); ++panel) {
    const float* data = data_.as<float>() + panel * panel_floats;
    for (int c = 0; c < kPanel; ++c) {
      float* row = columns.row(panel, c);
      for (int i = 0; row && i < k_; ++i) row[i] = data[int64_t{i} * kPanel + c];
    }
  }
}

}  // namespace octavo
