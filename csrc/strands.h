// How the rows of a step are divided among threads.
//
// Where there are rows enough, each thread takes some of them through all layers: a strand. What a row makes then stays in
// the cache of the core that needs it next, and threads do not wait for one another, except before attention where a
// strand reads keys and values that another has just written. Few rows go side by side instead, each thread with some
// of the weights, so that these are read from memory once. No division shows in a result.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "kernels.h"

namespace octavo {

// What a row costs, in multiplications of a product.
class RowCost {
 public:
  void add_product(int k, int n) { products_ += int64_t{k} * n; }
  // `width`: columns of all query heads; window as in Attention.
  void add_attention(int window, int width) { per_token_[window] += kAttentionCost * 2 * width; }
  int64_t at(int position) const;

 private:
  // Measured in prompts of 512 tokens, with what lies between the products counted as theirs. 6 in decoding, where it
  // matters less: rows are alike.
  static constexpr int64_t kAttentionCost = 3;

  int64_t products_ = 0;
  std::map<int, int64_t> per_token_;  // by window: for each token that the row sees
};

// Rows [begin, end) of a step, and their batch of each group. The first row may be amid a sequence.
struct Strand {
  int begin = 0, end = 0;
  std::vector<int32_t> query_starts;  // counted from `begin`
  std::vector<Batch> groups;
};

class Strands {
 public:
  // Divides the rows of `groups`, which must outlive the division, by the largest divisor of num_threads that leaves a
  // strand some rows. Not at all where strands would not be about equal.
  void divide(const std::vector<Batch>& groups, const RowCost& cost, int num_threads);
  // All rows in one strand.
  void keep_whole(const std::vector<Batch>& groups) { cut(groups, {0, groups.front().num_tokens}); }

  int size() const { return static_cast<int>(strands_.size()); }
  const Strand& operator[](int i) const { return strands_[static_cast<size_t>(i)]; }

  // Whether one reads keys or values that another writes in this step, as where a sequence is in two. `windows`: of each
  // group the farthest look back.
  bool must_join(const std::vector<int>& windows, int block_size, int64_t num_blocks);

 private:
  void cut(const std::vector<Batch>& groups, const std::vector<int>& bounds);
  template <class Body>
  void each_block(const std::vector<int>& windows, int block_size, const Body& body) const;

  std::vector<Strand> strands_;
  std::vector<int64_t> costs_;     // of each row
  std::vector<uint16_t> writers_;  // of each block of the cache: 1 + the strand that writes it, or 0; between calls all 0
};

}  // namespace octavo
