// The running half of Program: checks of a step's values, then the list of kernels on every worker.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>

#include "program.h"

namespace octavo {
namespace {

std::string text(int64_t value) { return std::to_string(value); }

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

[[noreturn]] void fail(int seq, const std::string& message) { fail("sequence " + text(seq) + ": " + message); }

}  // namespace

void Program::check_sequence(const StepArrays& step, int seq) const {
  const int begin = step.query_starts[seq], end = step.query_starts[seq + 1];
  if (begin > end || end > step.num_tokens) fail(seq, "query_starts must not decrease and end at the number of tokens");
  const int64_t len = step.seq_lens[seq], max_len = limits_.max_blocks_per_seq * limits_.block_size;
  if (len < 0 || len > max_len) fail(seq, "length " + text(len) + " is not within [0, " + text(max_len) + "]");
  if (begin == end) return;
  const int first = step.positions[begin];
  if (first < 0 || int64_t{first} + end - begin > len) {
    fail(seq, "positions from " + text(first) + " on do not fit a sequence of " + text(len) + " tokens");
  }
  for (int row = begin + 1; row < end; ++row) {
    if (step.positions[row] != first + row - begin) fail(seq, "positions must be consecutive");
  }
  for (size_t g = 0; g < step.tables.size(); ++g) check_blocks(step, seq, g, first, first + end - begin);
}

// The blocks of one group that the tokens at positions [begin, end) write and look back to.
void Program::check_blocks(const StepArrays& step, int seq, size_t group, int begin, int end) const {
  const TableView& table = step.tables[group];
  const int64_t row = step.table_rows[seq];
  if (row < 0 || row >= table.rows) fail(seq, "table row " + text(row) + " is not one of the table's " + text(table.rows));
  const int64_t end_block = (end - 1) / limits_.block_size + 1;
  if (end_block > table.max_blocks) fail(seq, "its table of " + text(table.max_blocks) + " blocks is too short");
  const int32_t* blocks = table.data + row * table.max_blocks;
  if (is_state_[group]) {  // the block it reads and the one it writes; those between need not exist
    if (begin > 0) check_block(blocks, (begin - 1) / limits_.block_size, seq);
    check_block(blocks, end_block - 1, seq);
  }
  const int window = group_windows_[group];
  if (window == 0) return;
  const int first_needed = window == kUnlimited ? 0 : std::max(0, begin - window + 1);
  for (int64_t i = first_needed / limits_.block_size; i < end_block; ++i) check_block(blocks, i, seq);
}

void Program::check_block(const int32_t* blocks, int64_t index, int seq) const {
  if (blocks[index] >= 0 && blocks[index] < cache_->num_blocks()) return;
  fail(seq, "block " + text(index) + " of its table is " + text(blocks[index]) + ", which is not one of the cache's " +
                text(cache_->num_blocks()) + " blocks");
}

void Program::check_step(const StepArrays& step) const {
  if (step.num_tokens > limits_.max_tokens) {
    fail(text(step.num_tokens) + " tokens in a step planned for " + text(limits_.max_tokens));
  }
  if (step.num_seqs > limits_.max_seqs) {
    fail(text(step.num_seqs) + " sequences in a step planned for " + text(limits_.max_seqs));
  }
  if (static_cast<int>(step.tables.size()) != limits_.num_groups) {
    fail(text(static_cast<int64_t>(step.tables.size())) + " block tables for " + text(limits_.num_groups) + " groups");
  }
  for (const TableView& table : step.tables) {
    if (table.max_blocks > limits_.max_blocks_per_seq) {
      fail("a block table of " + text(table.max_blocks) + " columns in a program planned for " +
           text(limits_.max_blocks_per_seq));
    }
  }
  for (int t = 0; t < step.num_tokens; ++t) {
    if (step.tokens[t] < 0 || step.tokens[t] >= vocab_) {
      fail("token id " + text(step.tokens[t]) + " is not within the vocabulary of " + text(vocab_));
    }
  }
  if (step.query_starts[0] != 0) fail("query_starts must begin with 0, not " + text(step.query_starts[0]));
  for (int seq = 0; seq < step.num_seqs; ++seq) check_sequence(step, seq);
  if (step.query_starts[step.num_seqs] != step.num_tokens) {
    fail("query_starts must end with the number of tokens, " + text(step.num_tokens));
  }
}

QuantRows Program::Step::of(QuantRows x) const {
  if (!x.q) return x;
  x.q += first_row * x.row_bytes;
  x.scale += first_row;
  x.sum += first_row;
  return x;
}

Epilogue Program::Step::of(Epilogue e) const {
  e.y += first_row * e.ldy;
  if (e.residual) e.residual += first_row * e.ldr;
  e.quantized = of(e.quantized);
  return e;
}

Attention Program::Step::of(Attention a) const {
  a.quantized = of(a.quantized);
  return a;
}

void Program::look_ahead(size_t attention, const Step& step, Worker w) const {
  const AttentionLayer& next = attentions_[attention % attentions_.size()];
  const Batch& batch = step.batches[next.group];
  const int begin = batch.num_seqs * w.id / w.count, end = batch.num_seqs * (w.id + 1) / w.count;
  const int64_t budget = kAheadBytes / (w.count * step.num_strands);
  *w.ahead = {next.kv, &batch, next.window, begin, end, nullptr, nullptr, 0, budget};
}

void Program::execute(const Part& part, const int32_t* tokens, const std::vector<Batch>& groups) {
  using Clock = std::chrono::steady_clock;
  const auto seconds_since = [](Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const Clock::time_point begin = Clock::now();
  const bool has_states = std::find(is_state_.begin(), is_state_.end(), true) != is_state_.end();
  if (has_states) {  // they pass from row to row
    strands_.keep_whole(groups);
  } else {
    strands_.divide(groups, part.row_cost, pool_->num_threads());
  }
  const int num_strands = strands_.size();
  is_joint_ = &part == &forward_ && strands_.must_join(group_windows_, limits_.block_size, cache_->num_blocks());
  const bool looks_ahead = !attentions_.empty();
  aheads_.assign(static_cast<size_t>(pool_->num_parts()), {});  // those of the part before belong to its strands
  const auto run = [&](int number, int segment, Worker w) {
    const Strand& strand = strands_[number];
    const Step mine{strand.end - strand.begin, tokens + strand.begin, strand.groups.front().positions,
                    strand.groups.data(), strand.begin, number, num_strands};
    const auto worker = static_cast<size_t>(number * w.count + w.id);
    if (looks_ahead) w.ahead = &aheads_[worker];
    if (looks_ahead && segment == 0 && &part == &forward_) look_ahead(0, mine, w);
    for (const Instruction& instruction : part.segments[static_cast<size_t>(segment)].instructions) {
      if (!is_timed_) {
        instruction.run(mine, w);
        continue;
      }
      const Clock::time_point start = Clock::now();
      instruction.run(mine, w);
      seconds_[worker][&instruction] += seconds_since(start);
    }
  };
  const auto is_joint = [&](int segment) { return is_joint_ && part.segments[static_cast<size_t>(segment)].reads_cache; };
  pool_->run({static_cast<int>(part.segments.size()), num_strands, run, is_joint});
  all_seconds_ += seconds_since(begin) * pool_->num_threads();
}

std::pair<std::vector<std::pair<int, int>>, bool> Program::division() {
  std::lock_guard<std::mutex> lock(running_);
  std::vector<std::pair<int, int>> rows;
  for (int i = 0; i < strands_.size(); ++i) rows.emplace_back(strands_[i].begin, strands_[i].end);
  return {rows, is_joint_};
}

std::vector<std::pair<std::string, double>> Program::profile() {
  std::lock_guard<std::mutex> lock(running_);
  std::map<std::string, double> sums;
  double waiting = all_seconds_;
  for (const auto& seconds : seconds_) {
    for (const auto& [instruction, value] : seconds) {
      sums[instruction->name] += value;
      waiting -= value;
    }
  }
  if (is_timed_) sums["waiting"] = waiting;
  is_timed_ = true;
  all_seconds_ = 0;
  seconds_.assign(static_cast<size_t>(pool_->num_parts()), {});
  std::vector<std::pair<std::string, double>> sorted(sums.begin(), sums.end());
  std::sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  return sorted;
}

void Program::forward(const StepArrays& step) {
  std::lock_guard<std::mutex> lock(running_);
  check_step(step);
  hold(step);
  if (step.num_tokens == 0) return;
  execute(forward_, step.tokens, held_.groups);
}

// Keeps what the logits part needs of a checked step: the arrays may change before logits() is called.
void Program::hold(const StepArrays& step) {
  held_.positions.assign(step.positions, step.positions + step.num_tokens);
  held_.query_starts.assign(step.query_starts, step.query_starts + step.num_seqs + 1);
  held_.table_rows.resize(static_cast<size_t>(step.num_seqs));
  std::iota(held_.table_rows.begin(), held_.table_rows.end(), 0);
  const auto num_blocks = [&](int seq) {
    const int begin = step.query_starts[seq], end = step.query_starts[seq + 1];
    return begin < end ? step.positions[end - 1] / limits_.block_size + 1 : 0;
  };
  int64_t columns = 0;
  for (int seq = 0; seq < step.num_seqs; ++seq) columns = std::max<int64_t>(columns, num_blocks(seq));
  tables_.resize(step.tables.size());
  held_.groups.clear();
  for (size_t g = 0; g < tables_.size(); ++g) {
    const TableView& table = step.tables[g];
    tables_[g].resize(static_cast<size_t>(step.num_seqs * columns));
    for (int seq = 0; seq < step.num_seqs; ++seq) {
      const int32_t* blocks = table.data + step.table_rows[seq] * table.max_blocks;
      std::copy(blocks, blocks + num_blocks(seq), tables_[g].data() + seq * columns);
    }
    held_.groups.push_back({step.num_tokens, step.num_seqs, held_.positions.data(), held_.query_starts.data(),
                            held_.table_rows.data(), tables_[g].data(), columns});
  }
}

// Makes a batch of some rows of the last step. A row that does not follow the one before it in the same sequence counts
// as a sequence of its own.
void Program::choose(const int32_t* rows, int num_rows) {
  const std::vector<int32_t>& starts = held_.query_starts;
  chosen_.positions.clear();
  chosen_.query_starts.clear();
  chosen_.table_rows.clear();
  for (int i = 0; i < num_rows; ++i) {
    const auto seq = static_cast<int32_t>(std::upper_bound(starts.begin(), starts.end(), rows[i]) - starts.begin() - 1);
    if (i == 0 || seq != chosen_.table_rows.back() || rows[i] != rows[i - 1] + 1) {
      chosen_.query_starts.push_back(i);
      chosen_.table_rows.push_back(seq);
    }
    chosen_.positions.push_back(held_.positions[static_cast<size_t>(rows[i])]);
  }
  const auto num_seqs = static_cast<int>(chosen_.table_rows.size());
  chosen_.query_starts.push_back(num_rows);
  chosen_.groups = held_.groups;
  for (Batch& batch : chosen_.groups) {
    batch = {num_rows, num_seqs, chosen_.positions.data(), chosen_.query_starts.data(), chosen_.table_rows.data(),
             batch.block_table, batch.max_blocks};
  }
}

const float* Program::logits(const int32_t* rows, int num_rows) {
  std::lock_guard<std::mutex> lock(running_);
  if (logits_.width == 0) fail("the program has no logits part");
  if (num_rows > limits_.max_logit_rows) {
    fail(text(num_rows) + " logit rows in a program planned for " + text(limits_.max_logit_rows));
  }
  const auto num_tokens = static_cast<int>(held_.positions.size());
  for (int i = 0; i < num_rows; ++i) {
    if (rows[i] < 0 || rows[i] >= num_tokens) {
      fail("logit row " + text(rows[i]) + " is not one of the last step's " + text(num_tokens) + " tokens");
    }
  }
  num_logit_rows_ = num_rows;
  choose(rows, num_rows);
  if (num_rows > 0) execute(logits_part_, rows, chosen_.groups);
  return arena_.as<float>() + logits_.offset;
}

std::pair<const int32_t*, const float*> Program::best() {
  std::lock_guard<std::mutex> lock(running_);
  const int rows = num_logit_rows_, workers = pool_->num_parts();
  best_values_.resize(static_cast<size_t>(workers) * static_cast<size_t>(rows));
  best_.resize(best_values_.size());
  if (rows > 0) {
    const View x = view(logits_, "logits");
    pool_->run([&](Worker w) { kernels_->argmax(x, rows, best_values_.data(), best_.data(), w); });
    kernels_->join_argmax(rows, workers, best_values_.data(), best_.data());
  }
  return {best_.data(), best_values_.data()};
}

void Program::softmax_blocks(const View& x, int rows, int block, const float* peaks, const float* temperatures,
                             double* sums, float* maxima) {
  std::lock_guard<std::mutex> lock(running_);
  pool_->run([&](Worker w) { kernels_->softmax_blocks(x, rows, block, peaks, temperatures, sums, maxima, w); });
}

}  // namespace octavo
