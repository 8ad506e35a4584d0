// Packing of weight matrices into the panels the kernels stream.
//
// A panel holds kPanel output columns for all of K, contiguous in memory, so a kernel reads its share of a
// matrix as one sequential stream. Within a panel
//     float32:  [K][kPanel]
//     int8:     [K/4][kPanel][4]   four consecutive k of a column fill one 32-bit lane (a VNNI operand),
//               K padded to kQuantGroup, stored as w + 128
//     grouped:  a block for each group: codes, then float16 scale [kPanel], then perhaps float16 low [kPanel];
//               8-bit codes [8][kPanel][4] as above; of narrower ones the lower four bits [group/8][kPanel][4], each
//               byte with a code of one run of four k below and of the next above; then, of 5 and 6 bits, the rest
//               [kPanel][4], each byte with one or two bits of every run, the first lowest
// A gated pair (gate and up, both [F, K]) interleaves them: a panel holds kPanel/2 columns of gate, then the
// same columns of up, so that one tile has all it needs for act(gate) * up.
// Columns and k that do not exist are packed as zero weights.
// A packed matrix is its sizes() and its buffers(), the same bytes for every instruction set: so it can be kept in a
// file and read back into one that was made of sizes alone.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "aligned_buffer.h"
#include "kernels.h"

namespace octavo {

// A row-major float32 matrix [n, k] to be packed: one, or two of the same shape where `up` is set.
struct Weights {
  const float* rows;
  const float* up;  // null, or the second of a gated pair (then `rows` is gate)
  int n, k;
};

// Symmetric int8 per output channel: scale = max|w| / 127, rounded to nearest even.
class PackedI8 {
 public:
  using Sizes = std::array<int, 3>;  // n, k, is_gated
  // With room for the buffers, undefined. Throws std::invalid_argument on sizes that no matrix has; so do the others.
  explicit PackedI8(const Sizes& sizes);
  Sizes sizes() const { return {n_, k_, is_gated_}; }
  std::array<const AlignedBuffer*, 2> buffers() const { return {&data_, &scale_}; }
  // Throws std::invalid_argument on an empty matrix, NaN or infinity.
  PackedI8(const Weights& weights, int num_threads);

  MatrixI8 matrix() const { return {n_, k_, data_.as<uint8_t>(), scale_.as<float>()}; }
  bool is_gated() const { return is_gated_; }
  size_t bytes() const { return data_.bytes() + scale_.bytes(); }
  // The values the kernels compute with, [n, k]; of a gated pair gate's rows, then up's.
  void unpack(float* out) const;

 private:
  int n_, k_;
  bool is_gated_;
  AlignedBuffer data_, scale_;
};

// A row-major matrix [n, k] of codes in groups of code_group(bits) along k: scale * code + low, or, without `low`,
// scale * (code - 2^(bits - 1)). `up` holds the second of a gated pair and must be of the same kind.
struct GroupedWeights {
  struct Part {
    const uint8_t* codes;   // [n, k]
    const uint16_t* scale;  // [n, groups], float16
    const uint16_t* low;    // the same, or null; 4 or 5 bits only
  };
  Part rows, up;  // up.codes is null where not gated
  int n, k, bits;
};

// The codes as they are: nothing is rounded.
class PackedGrouped {
 public:
  using Sizes = std::array<int, 5>;  // n, k, is_gated, bits, has_low
  explicit PackedGrouped(const Sizes& sizes);
  Sizes sizes() const { return {n_, k_, is_gated_, bits_, has_low_}; }
  std::array<const AlignedBuffer*, 1> buffers() const { return {&data_}; }
  // Throws std::invalid_argument on an empty matrix, broken groups, codes beyond their bits, NaN or infinity.
  PackedGrouped(const GroupedWeights& weights, int num_threads);

  MatrixGrouped matrix() const { return {n_, k_, bits_, has_low_, data_.as<uint8_t>()}; }
  bool is_gated() const { return is_gated_; }
  size_t bytes() const { return data_.bytes(); }
  void unpack(float* out) const;  // as above

 private:
  int n_, k_, bits_;
  bool has_low_, is_gated_;
  AlignedBuffer data_;
};

class PackedF32 {
 public:
  using Sizes = std::array<int, 3>;  // n, k, is_gated
  explicit PackedF32(const Sizes& sizes);
  Sizes sizes() const { return {n_, k_, is_gated_}; }
  std::array<const AlignedBuffer*, 1> buffers() const { return {&data_}; }
  // Throws std::invalid_argument on an empty matrix, NaN or infinity.
  PackedF32(const Weights& weights, int num_threads);

  MatrixF32 matrix() const { return {n_, k_, data_.as<float>()}; }
  bool is_gated() const { return is_gated_; }
  size_t bytes() const { return data_.bytes(); }
  void unpack(float* out) const;  // as above

 private:
  int n_, k_;
  bool is_gated_;
  AlignedBuffer data_;
};

}  // namespace octavo
