// The kernels of one instruction set, as a table of plain functions.
//
// Every kernel is single program, multiple data: it is called with the same arguments once for each `Worker`, of which
// there are more than threads (thread_pool.h); it computes that worker's share and returns without a barrier. Program
// (program.h) puts the barriers between kernels. No kernel allocates, throws or touches Python.
//
// The promise: the value of a row depends on that row alone, bitwise; not on `rows`, the worker count, the
// block size or the block ids. Each sum runs in one order that its own length fixes, with the same
// operations (fused multiply-add or not) in every tile shape and every tail.
//
// The same sources (*.inl, through kernels.cpp) are compiled once per instruction set behind simd.h; kernels() picks
// one at run time. Shape letters as in backends/ops.py.
#pragma once
#include <cstdint>

namespace octavo {

struct KVAhead;

constexpr int kPieces = 4;  // parts that a thread's share of the work is cut into

struct Worker {
  int id;     // 0 <= id < count; in products kPieces that follow one another are a thread's
  int count;  // of workers
  KVAhead* ahead = nullptr;  // what to ask for while a product is computed
};

constexpr int kQuantGroup = 64;  // activations are quantised in groups of this many values along K
constexpr int kPanel = 32;       // output columns stored together by the packing (pack.h)

// Weights int8 per output channel, packed; see matmul_int8.inl for the layout.
struct MatrixI8 {
  int n, k;              // out, in (k as given; storage is padded)
  const uint8_t* data;   // w + 128
  const float* scale;    // [n padded]
};

// Weights in groups along K, packed in blocks of one group and one panel; see pack.h for the layout.
struct MatrixGrouped {
  int n, k;      // k is a multiple of the group
  int bits;      // of a code: 4, 5, 6 or 8
  bool has_low;  // whether a group has a lowest value (4 and 5 bits only)
  const uint8_t* data;
};

// Weights along K that share a scale, by the bits of their codes; their activations are quantised in the same groups.
static constexpr int code_group(int bits) { return bits == 6 ? 16 : 32; }

static constexpr int grouped_code_bytes(int bits) { return kPanel * code_group(bits) * bits / 8; }

// Codes, then a half of scale per column, then perhaps a half of the lowest value per column.
static constexpr int grouped_block_bytes(int bits, bool has_low) {
  return grouped_code_bytes(bits) + kPanel * (has_low ? 4 : 2);
}

// Number `at` of the codes of a group; `lanes` is where its column begins in the block.
static inline int grouped_code(const uint8_t* lanes, int at, int bits) {
  const int run = at / 4;
  lanes += at % 4;
  if (bits == 8) return lanes[run * 4 * kPanel];
  const int lower = lanes[run / 2 * 4 * kPanel] >> (run % 2 * 4) & 15;
  if (bits == 4) return lower;
  return lower | (lanes[code_group(bits) / 2 * kPanel] >> (run * (bits - 4)) & ((1 << (bits - 4)) - 1)) << 4;
}

// Weights float32, packed; see matmul_f32.inl for the layout.
struct MatrixF32 {
  int n, k;
  const float* data;
};

// Quantised activations: q [rows][k padded to `group`], scale and sum per group. These lie by group, so that workers
// who make different groups of the same rows do not write to the same lines.
struct QuantRows {
  int8_t* q = nullptr;     // null: none are wanted
  float* scale = nullptr;  // [groups][stride]
  int32_t* sum = nullptr;  // [groups][stride], sum of q over the group (corrects the weights' offset of 128)
  int64_t stride = 0;      // at least the rows
  int group = 0;           // values: kQuantGroup, or the code_group of the weights
  int64_t row_bytes = 0;   // k padded
};

// A stride for that many rows: whole cache lines, and not a power of two of them, which would share a set of the cache.
static constexpr int64_t quant_stride(int64_t rows) { return (rows + 15) / 16 * 16 + 16; }

enum class Act : int { none = 0, silu = 1, gelu_tanh = 2 };

// What happens to a finished output tile. With `act` != none the matrix holds gate and up interleaved
// and the output is act(gate) * up, n/2 columns wide; it can be quantised as well, by the worker that has just made it.
struct Epilogue {
  float* y;               // [rows][ldy]; null where only the quantised form is wanted
  int64_t ldy;            // floats between rows
  const float* bias;      // [n] or null
  const float* residual;  // [rows][ldr] added to the output, or null (may alias y)
  int64_t ldr;
  Act act;
  QuantRows quantized{};
  float* held = nullptr;  // the kernel's own: where outputs that are not stored wait to be quantised
};

// float32 [rows][width] with a row stride: a view of (columns of) a buffer. A result that is quantised as it is made may
// have no data and a stride of 0: then it is not stored in any other form.
struct View {
  float* data;
  int64_t ld;
  int width;
};

// A block table batch: which rows belong to which sequence and where its blocks are.
struct Batch {
  int num_tokens;               // T
  int num_seqs;                 // S
  const int32_t* positions;     // [T]
  const int32_t* query_starts;  // [S+1]
  const int32_t* table_rows;    // [S]
  const int32_t* block_table;   // [rows][max_blocks] of the layer's group
  int64_t max_blocks;
};

enum class KVType : int { f32 = 0, f16 = 1, i8 = 2 };

constexpr int kMaxByteHead = 512;  // head size up to which attention's sums over int8 fit 32 bits

// One storage array. Block b starts at data + b * block_bytes; in it lie the kv heads, one after another:
//     | K, transposed in pieces [B/P][D][P] | V [B][D] |
// or, of int8,
//     | scales of K [B], of V [B], float32 | K [B/P][D/4][P][4] | V [B/G][D][G] |
// where P = kv_piece(B), G = kv_value_group(B), and D is a multiple of 8. K and V are elements of `type`, int8 plus 128:
// four of them, of as many dimensions or tokens, meet four digits in one dot product (attention_int8.inl). 64 bytes past
// the array may be read (never used).
struct KVStore {
  void* data;
  KVType type;
  int64_t block_bytes;
  int num_kv_heads, head_size, block_size;
};

// int8 tokens whose values lie together: four, if blocks hold whole groups of them.
static constexpr int kv_value_group(int block_size) { return block_size % 4 == 0 ? 4 : 1; }

// Tokens of a piece of keys. 16 wherever that divides a block: keys are then read alike whatever the block size.
static constexpr int kv_piece(int block_size) { return block_size % 16 == 0 ? 16 : block_size; }

// Bytes of the scales of one kv head in a block, and of the whole head.
static constexpr int64_t kv_scale_bytes(KVType type, int block_size) {
  return type == KVType::i8 ? int64_t{8} * block_size : 0;
}
static constexpr int64_t kv_head_bytes(KVType type, int head_size, int block_size) {
  const int64_t element = type == KVType::i8 ? 1 : type == KVType::f16 ? 2 : 4;
  return 2 * element * head_size * block_size + kv_scale_bytes(type, block_size);
}

// The first token that a query at `position` sees; window 0: none.
static constexpr int first_visible(int position, int window) {
  return window > 0 && position >= window ? position - window + 1 : 0;
}

// What one worker asks for of the keys and values that the next attention will read (kv_ahead.inl), while products of
// many rows keep the processor busy and leave the memory idle.
struct KVAhead {
  KVStore kv{};
  const Batch* batch = nullptr;
  int window = 0;
  int seq = 0, end_seq = 0;                             // sequences yet to come
  const int32_t *block = nullptr, *end_block = nullptr;  // of the present one's table
  int64_t offset = 0;                                   // bytes asked for of the present block
  int64_t budget = 0;                                   // bytes left to ask for
};
constexpr int64_t kAheadBytes = int64_t{8} << 20;  // of all workers together: they must stay in the cache till then

struct Attention {
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  int num_heads;
  QuantRows quantized{};  // of the output, in groups that divide a head; or none
};

// One part of a state-space layer's state in one storage array. Block b of the array starts at data + b * block_bytes;
// the part, float32 whatever the cache's type, starts `begin` bytes further on: the last inputs [taps - 1][channels]
// of the convolution, or the state [heads][state_size][head_size] of the scan.
struct StateStore {
  char* data;
  int64_t block_bytes, begin;
  int block_size;  // tokens
};

struct ScanHeads {
  int num_heads, head_size, num_groups, state_size;
  const float *decay, *skip, *dt_bias;  // [num_heads]
  float dt_min, dt_max;
};

struct ScanInputs {
  View x;     // [rows][num_heads * head_size]
  View dt;    // [rows][num_heads]
  View b, c;  // [rows][num_groups * state_size]
};

struct Kernels {
  const char* isa;
  // matmul_int8.inl, matmul_grouped.inl, matmul_f32.inl
  void (*quantize_rows)(const View& x, int rows, const QuantRows& out, Worker w);
  void (*matmul_i8)(const MatrixI8& m, const QuantRows& a, int rows, const Epilogue& e, Worker w);
  void (*matmul_grouped)(const MatrixGrouped& m, const QuantRows& a, int rows, const Epilogue& e, Worker w);
  void (*matmul_f32)(const MatrixF32& m, const View& a, int rows, const Epilogue& e, Worker w);
  // norm_rope.inl
  void (*rms_norm)(const View& x, const float* weight, float eps, int rows, const View& y, const QuantRows& quantized,
                   Worker w);
  // The same, and y in its quantised form as well.
  void (*head_norm)(const View& x, const float* weight, float eps, int head_size, int rows, Worker w);
  // out [rows][2 * half]: cos, then sin, of position * frequency, each times `scale`. Once a step.
  void (*rope_table)(const float* frequencies, int half, float scale, const int32_t* positions, int rows,
                     const View& out, Worker w);
  void (*rope)(const View& x, const View& table, int head_size, int rows, Worker w);
  // elementwise.inl
  void (*add)(const View& x, const View& y, int rows, const View& out, Worker w);
  void (*scale)(const View& x, float factor, int rows, const View& out, Worker w);
  void (*softcap)(const View& x, float cap, int rows, const View& out, Worker w);
  // argmax.inl. Partial results [w.count][rows]; after a barrier one worker joins them into the first [rows].
  void (*argmax)(const View& x, int rows, float* values, int32_t* indices, Worker w);
  void (*join_argmax)(int rows, int workers, float* values, int32_t* indices);
  // softmax_blocks.inl
  void (*softmax_blocks)(const View& x, int rows, int block, const float* peaks, const float* temperatures,
                         double* sums, float* maxima, Worker w);
  void (*embed_f32)(const View& table, const int32_t* tokens, int rows, const View& out, Worker w);
  void (*embed_f16)(const uint16_t* table, int width, const int32_t* tokens, int rows, const View& out, Worker w);
  void (*embed_grouped)(const MatrixGrouped& table, const int32_t* tokens, int rows, const View& out, Worker w);
  // write_kv.inl, paged_attention.inl
  void (*write_kv)(const View& k, const View& v, const KVStore& kv, const Batch& b, Worker w);
  int64_t (*attention_scratch_bytes)(int workers, int head_size, int64_t max_len);
  // True (to every worker alike) if a sequence was divided among workers: then merge_attention must follow,
  // after a barrier, with the same arguments.
  bool (*paged_attention)(const View& q, const KVStore& kv, const Batch& b, const Attention& a,
                          const View& out, void* scratch, Worker w);
  void (*merge_attention)(const View& q, const KVStore& kv, const Batch& b, const Attention& a,
                          const View& out, void* scratch, Worker w);
  // ssm.inl. weight [taps][channels], bias may be null.
  void (*conv1d)(const View& x, const float* weight, const float* bias, int taps, const StateStore& state,
                 const Batch& b, const View& out, Worker w);
  void (*ssm_scan)(const ScanInputs& in, const ScanHeads& p, const StateStore& state, const Batch& b, const View& out,
                   Worker w);
  void (*gated_rms_norm)(const View& x, const View& gate, const float* weight, float eps, int group_size, int rows,
                         const View& y, Worker w);
};

// The tables of this build that the processor runs, best first, null at the end.
const Kernels* const* available_kernels();

// The one of a name ("avx512_vnni", "avx512", "avx2", "neon_dotprod", "neon", "portable"), or null where there is none.
// kernels(nullptr) is the best.
const Kernels* kernels(const char* isa);

}  // namespace octavo
