#include "strands.h"

#include <algorithm>
#include <numeric>

namespace octavo {
namespace {

// With fewer, products wait for the weights, which each thread reads all: a step of 4 rows a thread takes 30 % longer.
constexpr int kLeastRows = 8;
constexpr int kTolerance = 8;  // a strand may cost an equal share and an eighth

}  // namespace

int64_t RowCost::at(int position) const {
  int64_t sum = products_;
  for (const auto& [window, cost] : per_token_) sum += cost * (position + 1 - first_visible(position, window));
  return sum;
}

void Strands::divide(const std::vector<Batch>& groups, const RowCost& cost, int num_threads) {
  const Batch& all = groups.front();
  int count = std::max(1, std::min(all.num_tokens / kLeastRows, num_threads));
  while (num_threads % count) --count;
  if (count == 1) return keep_whole(groups);
  costs_.clear();
  for (int row = 0; row < all.num_tokens; ++row) costs_.push_back(cost.at(all.positions[row]));
  const int64_t total = std::accumulate(costs_.begin(), costs_.end(), int64_t{0});
  std::vector<int> bounds{0};
  int64_t sum = 0, strand_begin = 0;
  for (int row = 0; row < all.num_tokens; ++row) {
    const int64_t middle = sum + costs_[static_cast<size_t>(row)] / 2;
    if (middle * count >= total * static_cast<int64_t>(bounds.size())) {
      bounds.push_back(row);
      strand_begin = sum;
    }
    sum += costs_[static_cast<size_t>(row)];
    if ((sum - strand_begin) * count * kTolerance > total * (kTolerance + 1)) return keep_whole(groups);
  }
  bounds.push_back(all.num_tokens);
  static_cast<int>(bounds.size()) == count + 1 ? cut(groups, bounds) : keep_whole(groups);
}

void Strands::cut(const std::vector<Batch>& groups, const std::vector<int>& bounds) {
  const Batch& all = groups.front();
  strands_.resize(bounds.size() - 1);
  int seq = 0;
  for (size_t i = 0; i < strands_.size(); ++i) {
    Strand& strand = strands_[i];
    strand.begin = bounds[i];
    strand.end = bounds[i + 1];
    while (seq + 1 < all.num_seqs && all.query_starts[seq + 1] <= strand.begin) ++seq;
    int end_seq = seq;
    strand.query_starts.assign(1, 0);
    while (end_seq < all.num_seqs && all.query_starts[end_seq] < strand.end) {
      strand.query_starts.push_back(std::min(all.query_starts[++end_seq], strand.end) - strand.begin);
    }
    strand.groups.clear();
    for (const Batch& b : groups) {
      strand.groups.push_back({strand.end - strand.begin, end_seq - seq, b.positions + strand.begin,
                               strand.query_starts.data(), b.table_rows + seq, b.block_table, b.max_blocks});
    }
  }
}

// Calls body(strand, block id) for every block that holds a token which a row writes, or with windows sees.
template <class Body>
void Strands::each_block(const std::vector<int>& windows, int block_size, const Body& body) const {
  for (size_t i = 0; i < strands_.size(); ++i) {
    for (size_t g = 0; g < windows.size(); ++g) {
      const Batch& b = strands_[i].groups[g];
      for (int s = 0; s < b.num_seqs && windows[g] > 0; ++s) {
        if (b.query_starts[s] == b.query_starts[s + 1]) continue;
        const int first = b.positions[b.query_starts[s]], last = b.positions[b.query_starts[s + 1] - 1];
        const int32_t* blocks = b.block_table + b.table_rows[s] * b.max_blocks;
        for (int n = first_visible(first, windows[g]) / block_size; n <= last / block_size; ++n) {
          body(static_cast<uint16_t>(i + 1), static_cast<size_t>(blocks[n]));
        }
      }
    }
  }
}

bool Strands::must_join(const std::vector<int>& windows, int block_size, int64_t num_blocks) {
  if (strands_.size() == 1) return false;
  writers_.resize(static_cast<size_t>(num_blocks));
  std::vector<int> own(windows);  // a window of one token: those that are written
  for (int& window : own) window = std::min(window, 1);
  bool is_joint = false;
  each_block(own, block_size, [&](uint16_t strand, size_t block) {
    is_joint |= writers_[block] != 0 && writers_[block] != strand;
    writers_[block] = strand;
  });
  if (!is_joint) {
    each_block(windows, block_size, [&](uint16_t strand, size_t block) {
      is_joint |= writers_[block] != 0 && writers_[block] != strand;
    });
  }
  each_block(own, block_size, [&](uint16_t, size_t block) { writers_[block] = 0; });
  return is_joint;
}

}  // namespace octavo
