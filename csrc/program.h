// A model compiled to a list of kernel calls over planned memory.
//
// Python records each operation once (backends/native_plan.py decides where every array lies in the arena and where
// barriers are needed); forward() then runs the list on all workers of the pool without allocating. The list has two
// parts: the forward pass over the step's tokens, which ends when the cache is written, and what leads from there to
// the logits of chosen rows.
// Recording checks every place and size, forward() and logits() check every index: no argument can make a kernel
// touch memory outside the arena, the parameters or the cache.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "kv_cache.h"
#include "pack.h"
#include "strands.h"
#include "thread_pool.h"

namespace octavo {

// A float32 vector: a norm weight or a bias.
struct VectorParameter {
  using Sizes = std::array<int, 1>;  // size
  AlignedBuffer data;
  int size;

  explicit VectorParameter(const Sizes& sizes);  // undefined values; throws std::invalid_argument, as the next does
  Sizes sizes() const { return {size}; }
  std::array<const AlignedBuffer*, 1> buffers() const { return {&data}; }
};

// An embedding table [vocab][width], float32 or float16.
struct TableParameter {
  using Sizes = std::array<int, 3>;  // vocab, width, is_half
  AlignedBuffer data;
  int64_t vocab;
  int width;
  bool is_half;

  explicit TableParameter(const Sizes& sizes);
  Sizes sizes() const { return {static_cast<int>(vocab), width, is_half}; }
  std::array<const AlignedBuffer*, 1> buffers() const { return {&data}; }
};

struct RopeParameter {
  AlignedBuffer frequencies;
  int half;  // frequencies, half a head
  float scale;
};

// An array [rows][width] in the arena; `offset` and `stride` count floats. Rows are the part's maximum. Results that are
// quantised in the same pass may be at -1: then they are not stored in any other form.
struct Slot {
  int64_t offset, stride;
  int width;
};

// Where the quantised form of an array lies, and in groups of how many.
struct QuantSlot {
  int64_t offset;
  int group;
};

// Which layer of the cache an instruction reads or writes.
struct CacheLayer {
  int group, storage;
  int num_kv_heads, head_size;
};

// The same of a state-space layer: floats of the convolution's and the scan's part of its state.
struct StateLayer {
  int group, storage;
  int64_t conv_values, ssm_values;
};

// The parameters of a scan. The vectors must outlive it.
struct ScanParameter {
  const VectorParameter *decay, *skip, *dt_bias;
  int head_size, num_groups, state_size;
  float dt_min, dt_max;
};

struct ScanSlots {
  Slot x, dt, b, c;
};

struct ProgramLimits {
  int64_t arena_floats;
  int max_tokens, max_seqs, max_logit_rows;
  int64_t max_blocks_per_seq;
  int num_groups, block_size;
};

struct TableView {
  const int32_t* data;  // [rows][max_blocks]
  int64_t rows, max_blocks;
};

// The inputs of one step (StepInputs in backends/ops.py), of checked sizes and unchecked values.
struct StepArrays {
  int num_tokens, num_seqs;
  const int32_t *tokens, *positions, *query_starts, *seq_lens, *table_rows;
  std::vector<TableView> tables;  // one per group
};

// Which rows a part of the program runs over and where their blocks are, in memory of its own.
struct HeldBatches {
  std::vector<int32_t> positions, query_starts, table_rows;
  std::vector<Batch> groups;  // one per group
};

// Floats of the arena that the quantised form of [rows][k] in groups of `group` takes.
int64_t quant_floats(int rows, int k, int group);

class Program {
 public:
  Program(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, std::shared_ptr<KVCache> cache,
          ProgramLimits limits);

  // ---- recording. Parameters must outlive the program. All throw std::invalid_argument.
  void embed(const TableParameter& table, Slot out);
  void embed_grouped(const PackedGrouped& table, Slot out);
  void scale(Slot x, float factor, Slot out);
  void add(Slot x, Slot y, Slot out);
  void softcap(Slot x, float cap, Slot out);
  // Where `quantized` is given, here and below: the result is quantised as well, in the same pass.
  void rms_norm(Slot x, const VectorParameter& weight, float eps, Slot out, const QuantSlot* quantized);
  void head_norm(Slot x, const VectorParameter& weight, float eps);
  void rope_table(const RopeParameter& rope, Slot out);
  void rope(Slot x, Slot table, int head_size);
  void quantize(Slot x, int64_t quant_offset, int group);
  void matmul_i8(const PackedI8& matrix, int64_t quant_offset, Slot out, const VectorParameter* bias,
                 const Slot* residual, Act act, const QuantSlot* quantized);
  void matmul_grouped(const PackedGrouped& matrix, int64_t quant_offset, Slot out, const VectorParameter* bias,
                      const Slot* residual, Act act, const QuantSlot* quantized);
  void matmul_f32(const PackedF32& matrix, Slot x, Slot out, const VectorParameter* bias, const Slot* residual,
                  Act act);
  // Where a table is given, k is rotated first, in place.
  void write_kv(Slot k, const Slot* rope_table, Slot v, CacheLayer layer);
  void paged_attention(Slot q, CacheLayer layer, float scale, int window, float softcap, Slot out,
                       const QuantSlot* quantized);
  void conv1d(Slot x, const VectorParameter& weight, const VectorParameter* bias, StateLayer layer, Slot out);
  void ssm_scan(const ScanSlots& in, const ScanParameter& scan, StateLayer layer, Slot out);
  void gated_rms_norm(Slot x, Slot gate, const VectorParameter& weight, float eps, int group_size, Slot out);
  // What follows must not start before all workers have ended what precedes.
  void barrier();
  // Ends the forward part.
  void begin_logits();
  // In the logits part: the chosen rows of an array of the forward part.
  void gather(Slot x, Slot out);
  void end(Slot logits);

  // ---- running. Throws std::invalid_argument before anything has run.
  void forward(const StepArrays& step);
  // [num_rows][stride of the logits slot], valid until the next call.
  const float* logits(const int32_t* rows, int num_rows);
  Slot logits_slot() const { return logits_; }
  // Of each row of the last logits() the index of the largest value, as numpy's argmax, and that value; valid until the
  // next call.
  std::pair<const int32_t*, const float*> best();
  // Of rows of scores [rows][x.width], in blocks of `block` columns, what softmax_blocks.inl says; [rows][blocks] each.
  void softmax_blocks(const View& x, int rows, int block, const float* peaks, const float* temperatures, double* sums,
                      float* maxima);
  int num_logit_rows() const { return num_logit_rows_; }
  // The rows [begin, end) of each strand of the last forward() or logits(), and whether one read what another wrote.
  std::pair<std::vector<std::pair<int, int>>, bool> division();
  // Seconds that all workers together spent in each kind of instruction since the last call, most first. The first
  // call turns the measuring on: two clock reads an instruction.
  std::vector<std::pair<std::string, double>> profile();

 private:
  // What an instruction sees of the step it runs in: the rows of its strand.
  struct Step {
    int rows;                  // of T, or of the logit rows
    const int32_t* tokens;     // [rows] token ids, or the rows to gather
    const int32_t* positions;  // [rows]
    const Batch* batches;      // one per group
    int first_row;
    int strand, num_strands;

    // The strand's rows of an array.
    View of(const View& x) const { return {x.data + first_row * x.ld, x.ld, x.width}; }
    QuantRows of(QuantRows x) const;
    Epilogue of(Epilogue e) const;
    Attention of(Attention a) const;
  };
  using Run = std::function<void(const Step&, Worker)>;
  struct Instruction {
    std::string name;
    Run run;
  };
  struct Segment {  // what stands between two barriers
    std::vector<Instruction> instructions;
    bool reads_cache = false;
  };
  struct Part {
    std::vector<Segment> segments{1};
    RowCost row_cost;
  };

  static constexpr int kUnlimited = INT32_MAX;

  Part& recorded() { return is_recording_logits_ ? logits_part_ : forward_; }
  void append(std::string name, Run run);
  int max_rows() const { return is_recording_logits_ ? limits_.max_logit_rows : limits_.max_tokens; }
  View view(Slot slot, const char* name) const;
  View view(Slot slot, const char* name, int rows) const;
  // The same of a result. Where it is quantised and the slot is at -1: no data.
  View result(Slot out, const QuantSlot* quantized) const;
  QuantRows quant_rows(int64_t offset, int k, int group) const;
  QuantRows quant_rows(const QuantSlot* slot, int k) const;  // none where there is no slot
  void check_rope(Slot x, Slot table, int head_size) const;
  void check_place(int group, int storage) const;
  KVStore store(const CacheLayer& layer) const;
  StateStore state_store(const StateLayer& layer);
  Epilogue epilogue(Slot out, int n, bool is_gated, const VectorParameter* bias, const Slot* residual, Act act,
                    const QuantSlot* quantized) const;
  void check_step(const StepArrays& step) const;
  void check_sequence(const StepArrays& step, int seq) const;
  void check_blocks(const StepArrays& step, int seq, size_t group, int begin, int end) const;
  void check_block(const int32_t* blocks, int64_t index, int seq) const;
  void hold(const StepArrays& step);
  void choose(const int32_t* rows, int num_rows);
  // `tokens`: of each row the token id, or the row to gather. `groups`: for each group a batch of the rows.
  void execute(const Part& part, const int32_t* tokens, const std::vector<Batch>& groups);
  void* scratch(const Step& step) const;
  // From here on workers ask for what the attention of that number will read.
  void look_ahead(size_t attention, const Step& step, Worker w) const;

  std::shared_ptr<ThreadPool> pool_;
  const Kernels* kernels_;
  std::shared_ptr<KVCache> cache_;
  ProgramLimits limits_;
  AlignedBuffer arena_, scratch_;
  Part forward_, logits_part_;
  bool is_recording_logits_ = false;
  int64_t vocab_;                   // the smallest table's: tokens must be below
  std::vector<int> group_windows_;  // the farthest look back of a group's layers, in tokens; 0: no keys and values
  std::vector<bool> is_state_;      // whether a group's blocks hold states
  Slot logits_{};
  HeldBatches held_, chosen_;                 // of the last forward(), of the last logits()
  std::vector<std::vector<int32_t>> tables_;  // of the last forward(), per group: a row for each of its sequences
  int num_logit_rows_ = 0;  // of the last logits()
  std::vector<float> best_values_;  // [workers][rows]; of all workers the first [rows]
  std::vector<int32_t> best_;       // the same
  struct AttentionLayer {
    KVStore kv;
    int group, window;
  };
  std::vector<AttentionLayer> attentions_;  // in the order they run
  std::vector<KVAhead> aheads_;          // of each worker
  std::unique_ptr<std::atomic<bool>[]> is_divided_;  // of each strand: whether its last attention divided a sequence
  Strands strands_;        // of the last part that ran
  bool is_joint_ = false;  // whether they waited for one another before attention
  bool is_timed_ = false;
  double all_seconds_ = 0;  // of all workers, waiting too
  std::vector<std::map<const Instruction*, double>> seconds_;  // of each worker
  std::mutex running_;
};

}  // namespace octavo
