// The recording half of Program: every place and size is checked here, once.
#include "program.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

std::string text(int64_t value) { return std::to_string(value); }

// Where a thread's share is not cut into parts: makes `w` the share, for the first of its parts; false for the others.
bool is_whole(Worker* w) {
  const bool is_first = w->id % kPieces == 0;
  w->id /= kPieces;
  w->count /= kPieces;
  return is_first;
}

std::string matmul_name(const char* type, int k, int n) {
  return std::string("matmul ") + type + " " + text(k) + "x" + text(n);
}

}  // namespace

VectorParameter::VectorParameter(const Sizes& sizes) : size(sizes[0]) {
  require(size > 0, "a vector of " + text(size) + " values cannot be");
  data = AlignedBuffer(sizeof(float) * static_cast<size_t>(size));
}

TableParameter::TableParameter(const Sizes& sizes) : vocab(sizes[0]), width(sizes[1]), is_half(sizes[2] != 0) {
  require(vocab > 0 && width > 0 && (sizes[2] & ~1) == 0, "a table of " + text(vocab) + " by " + text(width) + " cannot be");
  data = AlignedBuffer((is_half ? sizeof(uint16_t) : sizeof(float)) * static_cast<size_t>(vocab * width));
}

Program::Program(std::shared_ptr<ThreadPool> pool, const Kernels* kernels, std::shared_ptr<KVCache> cache,
                 ProgramLimits limits)
    : pool_(std::move(pool)), kernels_(kernels), cache_(std::move(cache)), limits_(limits), vocab_(INT64_MAX) {
  require(limits.arena_floats > 0 && limits.max_tokens > 0 && limits.max_seqs > 0 && limits.max_logit_rows > 0 &&
              limits.max_blocks_per_seq > 0 && limits.num_groups > 0 && limits.block_size > 0,
          "every limit of a program must be positive");
  arena_ = AlignedBuffer(static_cast<size_t>(limits.arena_floats) * sizeof(float));
  group_windows_.assign(static_cast<size_t>(limits.num_groups), 0);
  is_state_.assign(static_cast<size_t>(limits.num_groups), false);
  is_divided_.reset(new std::atomic<bool>[static_cast<size_t>(pool_->num_threads())] {});
}

// ---- places and sizes -----------------------------------------------------------------------------------------

void Program::append(std::string name, Run run) {
  recorded().segments.back().instructions.push_back({std::move(name), std::move(run)});
}

View Program::view(Slot slot, const char* name) const { return view(slot, name, max_rows()); }

View Program::view(Slot slot, const char* name, int rows) const {
  const bool is_inside = slot.offset >= 0 && slot.width > 0 && slot.stride >= slot.width &&
                         slot.stride <= limits_.arena_floats / rows &&
                         slot.offset <= limits_.arena_floats - (rows - 1) * slot.stride - slot.width;
  require(is_inside, std::string(name) + " at float " + text(slot.offset) + ", width " + text(slot.width) + ", stride " +
                         text(slot.stride) + " does not fit the arena of " + text(limits_.arena_floats) + " floats");
  return {arena_.as<float>() + slot.offset, slot.stride, slot.width};
}

View Program::result(Slot out, const QuantSlot* quantized) const {
  return quantized && out.offset == -1 && out.width > 0 ? View{nullptr, 0, out.width} : view(out, "out");
}

int64_t quant_floats(int rows, int k, int group) {
  require(group == 16 || group == 32 || group == kQuantGroup, "activations are quantised in groups of 16, 32 or 64");
  const int64_t groups = round_up(k, group) / group;
  return round_up(rows * groups * group / 4, 16) + 2 * groups * quant_stride(rows);
}

QuantRows Program::quant_rows(int64_t offset, int k, int group) const {
  require(k > 0 && offset >= 0 && offset % 16 == 0 && offset + quant_floats(max_rows(), k, group) <= limits_.arena_floats,
          "quantised rows at float " + text(offset) + " do not fit the arena of " + text(limits_.arena_floats) + " floats");
  const int64_t groups = round_up(k, group) / group;
  const int64_t stride = quant_stride(max_rows());
  float* base = arena_.as<float>() + offset;
  float* scale = base + round_up(max_rows() * groups * group / 4, 16);
  return {reinterpret_cast<int8_t*>(base), scale, reinterpret_cast<int32_t*>(scale + groups * stride), stride, group,
          groups * group};
}

QuantRows Program::quant_rows(const QuantSlot* slot, int k) const {
  return slot ? quant_rows(slot->offset, k, slot->group) : QuantRows{};
}

void Program::check_place(int group, int storage) const {
  require(group >= 0 && group < limits_.num_groups && storage >= 0 && storage < cache_->num_storages(),
          "group " + text(group) + ", storage " + text(storage) + " is not in a cache of " + text(limits_.num_groups) +
              " groups and " + text(cache_->num_storages()) + " storages");
}

KVStore Program::store(const CacheLayer& layer) const {
  check_place(layer.group, layer.storage);
  require(layer.num_kv_heads > 0 && layer.head_size > 0 &&
              layer.num_kv_heads * kv_head_bytes(cache_->type(), layer.head_size, limits_.block_size) <=
                  cache_->block_bytes(),
          text(layer.num_kv_heads) + " kv heads of " + text(layer.head_size) + " do not fit blocks of " +
              text(cache_->block_bytes()) + " bytes");
  return {cache_->storage(layer.storage), cache_->type(), cache_->block_bytes(),
          layer.num_kv_heads, layer.head_size, limits_.block_size};
}

Epilogue Program::epilogue(Slot out, int n, bool is_gated, const VectorParameter* bias, const Slot* residual,
                           Act act, const QuantSlot* quantized) const {
  require(is_gated == (act != Act::none), "a gated matrix needs an activation, a plain one must not have one");
  require(!is_gated || (!bias && !residual), "a gated product has neither bias nor residual");
  require(is_gated || !quantized, "only a gated product is quantised as it is made");
  const int width = is_gated ? n / 2 : n;
  require(out.width == width, "a product of width " + text(width) + " cannot go to an array of width " + text(out.width));
  require(!bias || bias->size == n, "a bias must have " + text(n) + " values");
  require(!residual || residual->width == n, "a residual must have width " + text(n));
  const View y = result(out, quantized);
  const View r = residual ? view(*residual, "residual") : View{};
  return {y.data, y.ld, bias ? bias->data.as<float>() : nullptr, r.data, r.ld, act,
          quant_rows(quantized, width)};
}

// ---- recording --------------------------------------------------------------------------------------------------

void Program::embed(const TableParameter& table, Slot out) {
  require(!is_recording_logits_, "embed() belongs to the forward part: logits have no token ids");
  require(out.width == table.width, "embed: out must have width " + text(table.width));
  const View to = view(out, "out");
  vocab_ = std::min(vocab_, table.vocab);
  const Kernels* k = kernels_;
  if (table.is_half) {
    append("embed", [k, data = table.data.as<uint16_t>(), width = table.width, to](const Step& s, Worker w) {
      k->embed_f16(data, width, s.tokens, s.rows, s.of(to), w);
    });
  } else {
    const View from{table.data.as<float>(), table.width, table.width};
    append("embed", [k, from, to](const Step& s, Worker w) { k->embed_f32(from, s.tokens, s.rows, s.of(to), w); });
  }
}

void Program::embed_grouped(const PackedGrouped& table, Slot out) {
  const MatrixGrouped m = table.matrix();
  require(!is_recording_logits_, "embed() belongs to the forward part: logits have no token ids");
  require(!table.is_gated() && out.width == m.k, "embed: out must have width " + text(m.k) + ", the table one matrix");
  vocab_ = std::min<int64_t>(vocab_, m.n);
  append("embed", [k = kernels_, m, to = view(out, "out")](const Step& s, Worker w) {
    k->embed_grouped(m, s.tokens, s.rows, s.of(to), w);
  });
}

void Program::scale(Slot x, float factor, Slot out) {
  require(x.width == out.width, "scale: both arrays must have the same width");
  append("scale", [k = kernels_, a = view(x, "x"), factor, to = view(out, "out")](const Step& s, Worker w) {
    k->scale(s.of(a), factor, s.rows, s.of(to), w);
  });
}

void Program::add(Slot x, Slot y, Slot out) {
  require(x.width == out.width && y.width == out.width, "add: all arrays must have the same width");
  append("add", [k = kernels_, a = view(x, "x"), b = view(y, "y"), to = view(out, "out")](const Step& s, Worker w) {
    k->add(s.of(a), s.of(b), s.rows, s.of(to), w);
  });
}

void Program::softcap(Slot x, float cap, Slot out) {
  require(x.width == out.width, "softcap: both arrays must have the same width");
  require(cap > 0, "softcap: the cap must be positive");
  append("softcap", [k = kernels_, a = view(x, "x"), cap, to = view(out, "out")](const Step& s, Worker w) {
    k->softcap(s.of(a), cap, s.rows, s.of(to), w);
  });
}

void Program::rms_norm(Slot x, const VectorParameter& weight, float eps, Slot out, const QuantSlot* quantized) {
  require(x.width == weight.size && out.width == weight.size, "rms_norm: x, weight and out must have the same width");
  append("rms_norm", [k = kernels_, a = view(x, "x"), p = weight.data.as<float>(), eps, to = result(out, quantized),
                      q = quant_rows(quantized, out.width)](const Step& s, Worker w) {
    k->rms_norm(s.of(a), p, eps, s.rows, s.of(to), s.of(q), w);
  });
}

void Program::head_norm(Slot x, const VectorParameter& weight, float eps) {
  require(weight.size > 0 && x.width % weight.size == 0, "head_norm: the width must be a multiple of the weight's");
  append("head_norm", [k = kernels_, a = view(x, "x"), p = weight.data.as<float>(), eps, size = weight.size](
             const Step& s, Worker w) { k->head_norm(s.of(a), p, eps, size, s.rows, w); });
}

void Program::rope_table(const RopeParameter& rope, Slot out) {
  require(!is_recording_logits_, "rope belongs to the forward part: logits have no positions");
  require(out.width == 2 * rope.half, "rope_table: out must have width " + text(2 * rope.half));
  append("rope_table",
         [k = kernels_, f = rope.frequencies.as<float>(), half = rope.half, scale = rope.scale, to = view(out, "out")](
             const Step& s, Worker w) { k->rope_table(f, half, scale, s.positions, s.rows, s.of(to), w); });
}

void Program::check_rope(Slot x, Slot table, int head_size) const {
  require(head_size > 0 && table.width % 2 == 0 && table.width <= head_size && x.width % head_size == 0,
          "rope: x must hold whole heads of " + text(head_size) + " columns, at least as wide as the table of frequencies");
}

void Program::rope(Slot x, Slot table, int head_size) {
  check_rope(x, table, head_size);
  append("rope", [k = kernels_, a = view(x, "x"), t = view(table, "table"), head_size](const Step& s, Worker w) {
    k->rope(s.of(a), s.of(t), head_size, s.rows, w);
  });
}

void Program::quantize(Slot x, int64_t quant_offset, int group) {
  append("quantize",
         [k = kernels_, a = view(x, "x"), q = quant_rows(quant_offset, x.width, group)](const Step& s, Worker w) {
    k->quantize_rows(s.of(a), s.rows, s.of(q), w);
  });
}

void Program::matmul_i8(const PackedI8& matrix, int64_t quant_offset, Slot out, const VectorParameter* bias,
                        const Slot* residual, Act act, const QuantSlot* quantized) {
  const MatrixI8 m = matrix.matrix();
  const Epilogue e = epilogue(out, m.n, matrix.is_gated(), bias, residual, act, quantized);
  recorded().row_cost.add_product(m.k, m.n);
  append(matmul_name("i8", m.k, m.n),
         [k = kernels_, m, q = quant_rows(quant_offset, m.k, kQuantGroup), e](const Step& s, Worker w) {
    k->matmul_i8(m, s.of(q), s.rows, s.of(e), w);
  });
}

void Program::matmul_grouped(const PackedGrouped& matrix, int64_t quant_offset, Slot out, const VectorParameter* bias,
                             const Slot* residual, Act act, const QuantSlot* quantized) {
  const MatrixGrouped m = matrix.matrix();
  const Epilogue e = epilogue(out, m.n, matrix.is_gated(), bias, residual, act, quantized);
  recorded().row_cost.add_product(m.k, m.n);
  append(matmul_name("grouped", m.k, m.n),
         [k = kernels_, m, q = quant_rows(quant_offset, m.k, code_group(m.bits)), e](const Step& s, Worker w) {
    k->matmul_grouped(m, s.of(q), s.rows, s.of(e), w);
  });
}

void Program::matmul_f32(const PackedF32& matrix, Slot x, Slot out, const VectorParameter* bias, const Slot* residual,
                         Act act) {
  const MatrixF32 m = matrix.matrix();
  require(x.width == m.k, "a matrix of " + text(m.k) + " columns cannot multiply rows of " + text(x.width));
  const Epilogue e = epilogue(out, m.n, matrix.is_gated(), bias, residual, act, nullptr);
  recorded().row_cost.add_product(m.k, m.n);
  append(matmul_name("f32", m.k, m.n),
         [k = kernels_, m, a = view(x, "x"), e](const Step& s, Worker w) {
           k->matmul_f32(m, s.of(a), s.rows, s.of(e), w);
         });
}

void Program::write_kv(Slot k, const Slot* rope_table, Slot v, CacheLayer layer) {
  require(!is_recording_logits_, "write_kv belongs to the forward part");
  const int width = layer.num_kv_heads * layer.head_size;
  require(k.width == width && v.width == width, "write_kv: k and v must have width " + text(width));
  const KVStore kv = store(layer);
  int& reach = group_windows_[static_cast<size_t>(layer.group)];
  reach = std::max(reach, 1);  // the blocks it writes
  if (rope_table) check_rope(k, *rope_table, kv.head_size);
  append("write_kv", [kernels = kernels_, keys = view(k, "k"), table = rope_table ? view(*rope_table, "table") : View{},
                      values = view(v, "v"), kv, g = layer.group](const Step& s, Worker w) {
    // Both cut rows and heads alike: a worker rotates what it then writes.
    if (table.data) kernels->rope(s.of(keys), s.of(table), kv.head_size, s.rows, w);
    kernels->write_kv(s.of(keys), s.of(values), kv, s.batches[g], w);
  });
}

void Program::paged_attention(Slot q, CacheLayer layer, float scale, int window, float softcap, Slot out,
                              const QuantSlot* quantized) {
  const KVStore kv = store(layer);
  require(layer.head_size % 8 == 0, "paged_attention: head size " + text(layer.head_size) + " is not a multiple of 8");
  require(kv.type != KVType::i8 || layer.head_size <= kMaxByteHead,
          "paged_attention: head size " + text(layer.head_size) + " is above " + text(kMaxByteHead) +
              ", the most for int8 keys and values; use --kv-cache-dtype fp16");
  require(q.width == out.width && q.width % (kv.num_kv_heads * kv.head_size) == 0,
          "paged_attention: q and out must have the same width, a multiple of " + text(kv.num_kv_heads * kv.head_size));
  require(window >= 0 && softcap >= 0, "paged_attention: window and softcap must not be negative");
  require(!quantized || (quantized->group > 0 && kv.head_size % quantized->group == 0),
          "paged_attention: the output is quantised in groups that divide a head of " + text(kv.head_size) + " columns");
  const int64_t max_len = limits_.max_blocks_per_seq * limits_.block_size;
  require(max_len < INT_MAX / 2, "sequences of " + text(max_len) + " tokens are too long; lower max_blocks_per_seq");
  const auto scratch_bytes =
      static_cast<size_t>(kernels_->attention_scratch_bytes(pool_->num_threads(), kv.head_size, max_len));
  if (scratch_bytes > scratch_.bytes()) scratch_ = AlignedBuffer(scratch_bytes);
  int& reach = group_windows_[static_cast<size_t>(layer.group)];
  reach = std::max(reach, window == 0 ? kUnlimited : window);
  const Attention a{scale, window, softcap, q.width / kv.head_size, quant_rows(quantized, out.width)};
  attentions_.push_back({kv, layer.group, window});
  recorded().row_cost.add_attention(window, q.width);
  append("paged_attention",
         [this, kv, following = attentions_.size(), a, from = view(q, "q"), to = result(out, quantized),
          g = layer.group](const Step& s, Worker w) {
    look_ahead(following, s, w);
    if (!is_whole(&w)) return;
    const bool is_divided =
        kernels_->paged_attention(s.of(from), kv, s.batches[g], s.of(a), s.of(to), scratch(s), w);
    is_divided_[static_cast<size_t>(s.strand)].store(is_divided, std::memory_order_relaxed);  // the same for all workers
  });
  recorded().segments.back().reads_cache = true;
  barrier();
  append("merge_attention", [this, kv, a, from = view(q, "q"), to = result(out, quantized), g = layer.group](
                                const Step& s, Worker w) {
    if (!is_divided_[static_cast<size_t>(s.strand)].load(std::memory_order_relaxed) || !is_whole(&w)) return;
    kernels_->merge_attention(s.of(from), kv, s.batches[g], s.of(a), s.of(to), scratch(s), w);
  });
}

// The memory that the attention of a strand has for itself: an equal share, since strands can be at different layers. It
// is enough for any: what the workers of all strands together need, all workers in one would.
void* Program::scratch(const Step& step) const {
  const size_t share = scratch_.bytes() / static_cast<size_t>(step.num_strands) / 64 * 64;
  return scratch_.as<char>() + share * static_cast<size_t>(step.strand);
}

// ---- recording: state-space layers --------------------------------------------------------------------------------

StateStore Program::state_store(const StateLayer& layer) {
  require(!is_recording_logits_, "a state-space layer belongs to the forward part");
  check_place(layer.group, layer.storage);
  const int64_t block_values = cache_->block_bytes() / 4;
  require(layer.conv_values >= 0 && layer.ssm_values > 0 && layer.conv_values <= block_values &&
              layer.ssm_values <= block_values - layer.conv_values && cache_->block_bytes() % 4 == 0,
          "a state of " + text(layer.conv_values) + " + " + text(layer.ssm_values) + " floats does not fit blocks of " +
              text(cache_->block_bytes()) + " bytes, or these are not whole floats");
  is_state_[static_cast<size_t>(layer.group)] = true;
  return {cache_->storage(layer.storage), cache_->block_bytes(), 0, limits_.block_size};
}

void Program::conv1d(Slot x, const VectorParameter& weight, const VectorParameter* bias, StateLayer layer, Slot out) {
  require(x.width > 0 && weight.size > 0 && weight.size % x.width == 0 && out.width == x.width,
          "conv1d: out must be as wide as x, and the weight a multiple of it");
  require(!bias || bias->size == x.width, "conv1d: a bias must have " + text(x.width) + " values");
  const int taps = weight.size / x.width;
  require(layer.conv_values == (taps - 1) * int64_t{x.width},
          "conv1d: " + text(taps) + " taps of " + text(x.width) + " channels do not keep " + text(layer.conv_values) +
              " floats");
  const float* offsets = bias ? bias->data.as<float>() : nullptr;
  append("conv1d",
         [k = kernels_, from = view(x, "x"), p = weight.data.as<float>(), offsets, taps, state = state_store(layer),
          to = view(out, "out"), g = layer.group](const Step& s, Worker w) {
    k->conv1d(s.of(from), p, offsets, taps, state, s.batches[g], s.of(to), w);
  });
}

void Program::ssm_scan(const ScanSlots& in, const ScanParameter& scan, StateLayer layer, Slot out) {
  const int heads = scan.decay->size;
  require(heads > 0 && scan.skip->size == heads && scan.dt_bias->size == heads && in.dt.width == heads,
          "ssm_scan: dt and the vectors of a scan must have one value per head");
  require(scan.head_size > 0 && in.x.width == int64_t{heads} * scan.head_size && out.width == in.x.width,
          "ssm_scan: x and out must hold " + text(heads) + " heads of " + text(scan.head_size) + " columns");
  require(scan.num_groups > 0 && heads % scan.num_groups == 0 && scan.state_size > 0 &&
              in.b.width == int64_t{scan.num_groups} * scan.state_size && in.c.width == in.b.width,
          "ssm_scan: b and c must hold equal groups of heads with " + text(scan.state_size) + " columns each");
  require(layer.ssm_values == int64_t{in.x.width} * scan.state_size,
          "ssm_scan: the state of " + text(in.x.width) + " columns is not " + text(layer.ssm_values) + " floats");
  require(scan.dt_min >= 0 && scan.dt_min <= scan.dt_max, "ssm_scan: 0 <= dt_min <= dt_max must hold");
  const ScanHeads p{heads, scan.head_size, scan.num_groups, scan.state_size, scan.decay->data.as<float>(),
                    scan.skip->data.as<float>(), scan.dt_bias->data.as<float>(), scan.dt_min, scan.dt_max};
  const ScanInputs inputs{view(in.x, "x"), view(in.dt, "dt"), view(in.b, "b"), view(in.c, "c")};
  StateStore state = state_store(layer);
  state.begin = layer.conv_values * 4;
  append("ssm_scan", [k = kernels_, inputs, p, state, to = view(out, "out"), g = layer.group](const Step& s, Worker w) {
    const ScanInputs mine{s.of(inputs.x), s.of(inputs.dt), s.of(inputs.b), s.of(inputs.c)};
    k->ssm_scan(mine, p, state, s.batches[g], s.of(to), w);
  });
}

void Program::gated_rms_norm(Slot x, Slot gate, const VectorParameter& weight, float eps, int group_size, Slot out) {
  require(x.width == weight.size && gate.width == weight.size && out.width == weight.size,
          "gated_rms_norm: x, gate, weight and out must have the same width");
  require(group_size > 0 && x.width % group_size == 0, "gated_rms_norm: the width must be a multiple of the group's");
  append("gated_rms_norm",
         [k = kernels_, a = view(x, "x"), b = view(gate, "gate"), p = weight.data.as<float>(), eps, group_size,
          to = view(out, "out")](const Step& s, Worker w) {
    k->gated_rms_norm(s.of(a), s.of(b), p, eps, group_size, s.rows, s.of(to), w);
  });
}

void Program::barrier() { recorded().segments.emplace_back(); }

void Program::begin_logits() {
  require(!is_recording_logits_, "begin_logits() was called twice");
  is_recording_logits_ = true;
}

void Program::gather(Slot x, Slot out) {
  require(is_recording_logits_, "gather() needs begin_logits() first");
  require(x.width == out.width, "gather: both arrays must have the same width");
  append("gather", [k = kernels_, from = view(x, "x", limits_.max_tokens), to = view(out, "out")](const Step& s, Worker w) {
    k->embed_f32(from, s.tokens, s.rows, s.of(to), w);
  });
}

void Program::end(Slot logits) {
  require(is_recording_logits_, "end() needs begin_logits() first");
  view(logits, "logits");
  logits_ = logits;
}

}  // namespace octavo
