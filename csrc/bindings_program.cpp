// Python classes of the compiled program: parameters, KV cache, thread pool and Program itself.
// Arrays are checked here (check.h); places, sizes and indices by the classes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "bind_buffers.h"
#include "check.h"
#include "program.h"

namespace nb = nanobind;
using namespace octavo;
using check::AnyArray;
using check::kAny;

namespace {

void fill(AlignedBuffer& buffer, const void* data) { std::memcpy(buffer.as<void>(), data, buffer.bytes()); }

void bind_parameters(nb::module_& m) {
  nb::class_<VectorParameter> vector(m, "Vector");
  bind_buffers(vector);
  vector
      .def(
          "__init__",
          [](VectorParameter* self, const AnyArray& values) {
            const int size = check::dimension(values, 0, "values");
            const float* data = check::array<float>(values, "values", {size});
            new (self) VectorParameter({size});
            fill(self->data, data);
          },
          nb::arg("values"))
      .def_ro("size", &VectorParameter::size);
  nb::class_<TableParameter> table(m, "Table");
  bind_buffers(table);
  table.def_ro("width", &TableParameter::width);
  nb::class_<RopeParameter>(m, "Rope")
      .def(
          "__init__",
          [](RopeParameter* self, const AnyArray& frequencies, float scale) {
            const int half = check::dimension(frequencies, 0, "frequencies");
            const float* data = check::array<float>(frequencies, "frequencies", {half});
            new (self) RopeParameter{AlignedBuffer(sizeof(float) * static_cast<size_t>(half)), half, scale};
            fill(self->frequencies, data);
          },
          nb::arg("frequencies"), nb::arg("scale"))
      .def_ro("half", &RopeParameter::half);
}

void copy_blocks(KVCache& cache, const AnyArray& src, const AnyArray& dst) {
  const int count = check::dimension(src, 0, "src");
  const int32_t* from = check::array<int32_t>(src, "src", {count});
  const int32_t* to = check::array<int32_t>(dst, "dst", {count});
  nb::gil_scoped_release unlocked;
  cache.copy_blocks(from, to, count);
}

nb::object read_block(const KVCache& cache, int64_t block) {
  const auto bytes = static_cast<size_t>(cache.bytes_of_all_storages());
  nb::object out = nb::module_::import_("numpy").attr("empty")(bytes, "uint8");
  // Not ndarray<char>: where char is unsigned, int8 would be converted, and the copy written to.
  cache.read_block(block, reinterpret_cast<char*>(nb::cast<nb::ndarray<uint8_t, nb::device::cpu>>(out).data()));
  return out;
}

void write_block(KVCache& cache, int64_t block, const AnyArray& data) {
  cache.write_block(block, reinterpret_cast<const char*>(
                               check::array<uint8_t>(data, "data", {cache.bytes_of_all_storages()})));
}

KVType kv_type_of(const std::string& name) {
  if (name == "fp32") return KVType::f32;
  if (name == "fp16") return KVType::f16;
  if (name == "int8") return KVType::i8;
  throw std::invalid_argument("cache dtype '" + name + "' is unknown; use fp32, fp16 or int8");
}

// Seconds that a segment takes of whose parts one lasts `busy_us`, the others no time; every `joint_every`th is a joint one
// (0: none). Throws where a part ran before one that it must wait for, or not once.
double time_segments(ThreadPool& pool, int num_segments, int num_strands, int joint_every, double busy_us) {
  using Clock = std::chrono::steady_clock;
  if (num_segments < 1 || num_strands < 1 || pool.num_threads() % num_strands || joint_every < 0) {
    throw std::invalid_argument("a job has at least one segment, and as many strands as divide the threads evenly");
  }
  const int parts = pool.num_parts() / num_strands;
  std::vector<std::atomic<int>> ended(static_cast<size_t>(num_strands));
  std::atomic<bool> is_wrong{false};
  const auto is_joint = [=](int segment) { return joint_every > 0 && segment % joint_every == 0; };
  const auto run = [&](int strand, int segment, Worker w) {
    std::atomic<int>& own = ended[static_cast<size_t>(strand)];
    if (w.count != parts || own.load() / parts != segment) is_wrong = true;
    for (const std::atomic<int>& other : ended) {
      if (is_joint(segment) && other.load() < segment * parts) is_wrong = true;
    }
    const auto end = Clock::now() + std::chrono::duration<double, std::micro>(w.id == segment % parts ? busy_us : 0);
    while (Clock::now() < end) {
    }
    ++own;
  };
  const nb::gil_scoped_release released;
  const auto start = Clock::now();
  pool.run({num_segments, num_strands, run, is_joint});
  const std::chrono::duration<double> seconds = Clock::now() - start;
  for (const std::atomic<int>& own : ended) is_wrong = is_wrong || own != num_segments * parts;
  if (is_wrong) throw std::runtime_error("a part ran out of order");
  return seconds.count() / num_segments;
}

void bind_cache(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool").def_prop_ro("num_threads", &ThreadPool::num_threads);
  m.def("time_segments", &time_segments, nb::arg("pool"), nb::arg("num_segments"), nb::kw_only(),
        nb::arg("num_strands") = 1, nb::arg("joint_every") = 0, nb::arg("busy_us") = 0.0,
        "Seconds that a segment takes, one part of which lasts busy_us and the others no time.");
  m.def(
      "thread_pool",
      [](int num_threads) {
        if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("num_threads must be within [1, 1024]");
        return shared_pool(num_threads);
      },
      nb::arg("num_threads"), "The process's pool of that many threads.");
  nb::class_<KVCache>(m, "KVCache")
      .def(
          "__init__",
          [](KVCache* self, int num_storages, int64_t num_blocks, int64_t block_bytes, const std::string& dtype) {
            if (num_storages < 1 || num_blocks < 1 || num_blocks > INT32_MAX || block_bytes < 1 || block_bytes % 4) {
              throw std::invalid_argument(
                  "a cache needs at least one storage and one block, and 4 bytes a block or a multiple of that");
            }
            if (block_bytes > INT64_MAX / 2 / num_storages / num_blocks) throw std::bad_alloc();
            new (self) KVCache(num_storages, num_blocks, block_bytes, kv_type_of(dtype));
          },
          nb::arg("num_storages"), nb::arg("num_blocks"), nb::arg("block_bytes"), nb::arg("dtype"))
      .def("copy_blocks", &copy_blocks, nb::arg("src"), nb::arg("dst"))
      .def("read_block", &read_block, nb::arg("block_id"))
      .def("write_block", &write_block, nb::arg("block_id"), nb::arg("data"))
      .def("take_memory", &KVCache::take_memory, nb::call_guard<nb::gil_scoped_release>())
      .def("fill_block", &KVCache::fill_block, nb::arg("block_id"), nb::arg("value"));
}

// tokens, positions [T], query_starts [S+1], seq_lens, table_rows [S], one block table [rows, max_blocks] a group.
StepArrays step_arrays(const AnyArray& tokens, const AnyArray& positions, const AnyArray& query_starts,
                       const AnyArray& seq_lens, const AnyArray& table_rows, const std::vector<AnyArray>& block_tables) {
  StepArrays step{};
  step.num_tokens = check::dimension(tokens, 0, "tokens");
  step.num_seqs = check::dimension(seq_lens, 0, "seq_lens");
  step.tokens = check::array<int32_t>(tokens, "tokens", {step.num_tokens});
  step.positions = check::array<int32_t>(positions, "positions", {step.num_tokens});
  step.query_starts = check::array<int32_t>(query_starts, "query_starts", {step.num_seqs + int64_t{1}});
  step.seq_lens = check::array<int32_t>(seq_lens, "seq_lens", {step.num_seqs});
  step.table_rows = check::array<int32_t>(table_rows, "table_rows", {step.num_seqs});
  for (const AnyArray& table : block_tables) {
    const int rows = check::dimension(table, 0, "block_tables"), max_blocks = check::dimension(table, 1, "block_tables");
    step.tables.push_back({check::array<int32_t>(table, "block_tables", {rows, max_blocks}), rows, max_blocks});
  }
  return step;
}

void forward(Program& program, const AnyArray& tokens, const AnyArray& positions, const AnyArray& query_starts,
             const AnyArray& seq_lens, const AnyArray& table_rows, const std::vector<AnyArray>& block_tables) {
  const StepArrays step = step_arrays(tokens, positions, query_starts, seq_lens, table_rows, block_tables);
  nb::gil_scoped_release unlocked;
  program.forward(step);
}

// A view into the program's memory, valid until its next call.
using LogitsView = nb::ndarray<nb::numpy, const float>;

LogitsView logits_view(nb::handle self, const float* data, int num_rows) {
  const Slot slot = nb::cast<Program&>(self).logits_slot();
  return {data, {static_cast<size_t>(num_rows), static_cast<size_t>(slot.width)}, self, {slot.stride, 1}};
}

LogitsView logits(nb::handle self, const AnyArray& rows) {
  auto& program = nb::cast<Program&>(self);
  const int num_rows = check::dimension(rows, 0, "rows");
  const int32_t* data = check::array<int32_t>(rows, "rows", {num_rows});
  const float* result;
  {
    nb::gil_scoped_release unlocked;
    result = program.logits(data, num_rows);
  }
  return logits_view(self, result, num_rows);
}

template <class T>
nb::ndarray<nb::numpy, T> owned(std::unique_ptr<T[]> values, std::initializer_list<size_t> shape) {
  T* data = values.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return {data, shape, owner};
}

template <class T>
nb::ndarray<nb::numpy, T> copy_of(const T* values, size_t count) {
  std::unique_ptr<T[]> copy(new T[count]);
  std::copy(values, values + count, copy.get());
  return owned(std::move(copy), {count});
}

// Indices and values, [R] each, copies.
nb::tuple best(Program& program) {
  std::pair<const int32_t*, const float*> found;
  {
    nb::gil_scoped_release unlocked;
    found = program.best();
  }
  const auto rows = static_cast<size_t>(program.num_logit_rows());
  return nb::make_tuple(copy_of(found.first, rows), copy_of(found.second, rows));
}

// forward(), logits() and best().
nb::tuple run(nb::handle self, const AnyArray& tokens, const AnyArray& positions, const AnyArray& query_starts,
              const AnyArray& seq_lens, const AnyArray& table_rows, const std::vector<AnyArray>& block_tables,
              const AnyArray& rows) {
  auto& program = nb::cast<Program&>(self);
  const StepArrays step = step_arrays(tokens, positions, query_starts, seq_lens, table_rows, block_tables);
  const int num_rows = check::dimension(rows, 0, "rows");
  const int32_t* row = check::array<int32_t>(rows, "rows", {num_rows});
  const float* result;
  std::pair<const int32_t*, const float*> best;
  {
    nb::gil_scoped_release unlocked;
    program.forward(step);
    result = program.logits(row, num_rows);
    best = program.best();
  }
  const auto count = static_cast<size_t>(num_rows);
  return nb::make_tuple(logits_view(self, result, num_rows), copy_of(best.first, count), copy_of(best.second, count));
}

// Sums and maxima, [R][B] each.
nb::tuple softmax_blocks(Program& program, const AnyArray& scores, int block, const AnyArray& peaks,
                         const AnyArray& temperatures) {
  const int rows = check::dimension(scores, 0, "scores"), width = check::dimension(scores, 1, "scores");
  const auto [data, ld] = check::rows<float>(scores, "scores");
  const float* peak = check::array<float>(peaks, "peaks", {rows});
  const float* temperature = check::array<float>(temperatures, "temperatures", {rows});
  if (block < 1) throw nb::value_error("block must be at least 1");
  const auto blocks = static_cast<size_t>((width + block - 1) / block), size = blocks * static_cast<size_t>(rows);
  std::unique_ptr<double[]> sums(new double[size]());
  std::unique_ptr<float[]> maxima(new float[size]());
  {
    nb::gil_scoped_release unlocked;
    program.softmax_blocks({const_cast<float*>(data), ld, width}, rows, block, peak, temperature, sums.get(),
                           maxima.get());
  }
  const std::initializer_list<size_t> shape = {static_cast<size_t>(rows), blocks};
  return nb::make_tuple(owned(std::move(sums), shape), owned(std::move(maxima), shape));
}

Act act_of(const std::string& name) {
  if (name == "none") return Act::none;
  if (name == "silu") return Act::silu;
  if (name == "gelu_tanh") return Act::gelu_tanh;
  throw std::invalid_argument("activation '" + name + "' is unknown; use none, silu or gelu_tanh");
}

// The value, or null.
template <class T>
const T* pointer(const std::optional<T>& value) {
  return value ? &*value : nullptr;
}

template <class Packed>
auto matmul(void (Program::*method)(const Packed&, int64_t, Slot, const VectorParameter*, const Slot*, Act,
                                    const QuantSlot*)) {
  return [method](Program& p, const Packed& matrix, int64_t quant_offset, Slot out, const VectorParameter* bias,
                  const std::optional<Slot>& residual, const std::string& act,
                  const std::optional<QuantSlot>& quantized) {
    (p.*method)(matrix, quant_offset, out, bias, pointer(residual), act_of(act), pointer(quantized));
  };
}

void matmul_f32(Program& p, const PackedF32& matrix, Slot x, Slot out, const VectorParameter* bias,
                const std::optional<Slot>& residual, const std::string& act) {
  p.matmul_f32(matrix, x, out, bias, pointer(residual), act_of(act));
}

void rms_norm(Program& p, Slot x, const VectorParameter& weight, float eps, Slot out,
              const std::optional<QuantSlot>& quantized) {
  p.rms_norm(x, weight, eps, out, pointer(quantized));
}

void write_kv(Program& p, Slot k, const std::optional<Slot>& rope_table, Slot v, CacheLayer layer) {
  p.write_kv(k, pointer(rope_table), v, layer);
}

void paged_attention(Program& p, Slot q, CacheLayer layer, float scale, int window, float softcap, Slot out,
                     const std::optional<QuantSlot>& quantized) {
  p.paged_attention(q, layer, scale, window, softcap, out, pointer(quantized));
}

void construct(Program* self, std::shared_ptr<ThreadPool> pool, const std::optional<std::string>& isa,
               std::shared_ptr<KVCache> cache, const ProgramLimits& limits) {
  const Kernels* table = kernels(isa ? isa->c_str() : nullptr);
  if (!table) throw std::invalid_argument("this processor or build lacks the instruction set '" + *isa + "'");
  new (self) Program(std::move(pool), table, std::move(cache), limits);
}

void bind_values(nb::module_& m) {
  nb::class_<Slot>(m, "Slot").def(nb::init<int64_t, int64_t, int>(), nb::arg("offset"), nb::arg("stride"),
                                  nb::arg("width"));
  nb::class_<QuantSlot>(m, "QuantSlot").def(nb::init<int64_t, int>(), nb::arg("offset"), nb::arg("group"));
  nb::class_<CacheLayer>(m, "CacheLayer")
      .def(nb::init<int, int, int, int>(), nb::arg("group"), nb::arg("storage"), nb::arg("num_kv_heads"),
           nb::arg("head_size"));
  nb::class_<StateLayer>(m, "StateLayer")
      .def(nb::init<int, int, int64_t, int64_t>(), nb::arg("group"), nb::arg("storage"), nb::arg("conv_values"),
           nb::arg("ssm_values"));
  nb::class_<ScanParameter>(m, "Scan")
      .def(
          "__init__",
          [](ScanParameter* self, const VectorParameter& decay, const VectorParameter& skip, const VectorParameter& dt_bias,
             std::tuple<int, int, int> sizes, std::pair<float, float> dt_limits) {
            const auto [head_size, num_groups, state_size] = sizes;
            new (self) ScanParameter{&decay, &skip, &dt_bias, head_size, num_groups, state_size, dt_limits.first,
                                     dt_limits.second};
          },
          nb::arg("decay"), nb::arg("skip"), nb::arg("dt_bias"), nb::arg("sizes"), nb::arg("dt_limits"),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>());
  nb::class_<ScanSlots>(m, "ScanSlots")
      .def(nb::init<Slot, Slot, Slot, Slot>(), nb::arg("x"), nb::arg("dt"), nb::arg("b"), nb::arg("c"));
  nb::class_<ProgramLimits>(m, "ProgramLimits")
      .def(nb::init<int64_t, int, int, int, int64_t, int, int>(), nb::arg("arena_floats"), nb::arg("max_tokens"),
           nb::arg("max_seqs"), nb::arg("max_logit_rows"), nb::arg("max_blocks_per_seq"), nb::arg("num_groups"),
           nb::arg("block_size"));
}

}  // namespace

void bind_program(nb::module_& m) {
  bind_parameters(m);
  bind_cache(m);
  bind_values(m);
  using Keep = nb::keep_alive<1, 2>;  // the program keeps its parameters
  nb::class_<Program>(m, "Program")
      .def("__init__", &construct, nb::arg("pool"), nb::arg("isa").none(), nb::arg("cache"), nb::arg("limits"))
      .def("embed", &Program::embed, nb::arg("table"), nb::arg("out"), Keep())
      .def("embed", &Program::embed_grouped, nb::arg("table"), nb::arg("out"), Keep())
      .def("scale", &Program::scale, nb::arg("x"), nb::arg("factor"), nb::arg("out"))
      .def("add", &Program::add, nb::arg("x"), nb::arg("y"), nb::arg("out"))
      .def("softcap", &Program::softcap, nb::arg("x"), nb::arg("cap"), nb::arg("out"))
      .def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("out"),
           nb::arg("quantized").none(), nb::keep_alive<1, 3>())
      .def("head_norm", &Program::head_norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::keep_alive<1, 3>())
      .def("rope_table", &Program::rope_table, nb::arg("rope"), nb::arg("out"), Keep())
      .def("rope", &Program::rope, nb::arg("x"), nb::arg("table"), nb::arg("head_size"))
      .def("quantize", &Program::quantize, nb::arg("x"), nb::arg("quant_offset"), nb::arg("group"))
      .def("matmul_i8", matmul<PackedI8>(&Program::matmul_i8), nb::arg("matrix"), nb::arg("quant_offset"),
           nb::arg("out"), nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("act"),
           nb::arg("quantized").none(), Keep(), nb::keep_alive<1, 5>())
      .def("matmul_grouped", matmul<PackedGrouped>(&Program::matmul_grouped), nb::arg("matrix"),
           nb::arg("quant_offset"), nb::arg("out"), nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("act"),
           nb::arg("quantized").none(), Keep(), nb::keep_alive<1, 5>())
      .def("matmul_f32", &matmul_f32, nb::arg("matrix"), nb::arg("x"), nb::arg("out"),
           nb::arg("bias").none(), nb::arg("residual").none(), nb::arg("act"), Keep(), nb::keep_alive<1, 5>())
      .def("write_kv", &write_kv, nb::arg("k"), nb::arg("rope_table").none(), nb::arg("v"), nb::arg("layer"))
      .def("paged_attention", &paged_attention, nb::arg("q"), nb::arg("layer"), nb::arg("scale"), nb::arg("window"),
           nb::arg("softcap"), nb::arg("out"), nb::arg("quantized").none())
      .def("conv1d", &Program::conv1d, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none(), nb::arg("layer"),
           nb::arg("out"), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def("ssm_scan", &Program::ssm_scan, nb::arg("inputs"), nb::arg("scan"), nb::arg("layer"), nb::arg("out"),
           nb::keep_alive<1, 3>())
      .def("gated_rms_norm", &Program::gated_rms_norm, nb::arg("x"), nb::arg("gate"), nb::arg("weight"), nb::arg("eps"),
           nb::arg("group_size"), nb::arg("out"), nb::keep_alive<1, 4>())
      .def("barrier", &Program::barrier)
      .def("begin_logits", &Program::begin_logits)
      .def("gather", &Program::gather, nb::arg("x"), nb::arg("out"))
      .def("end", &Program::end, nb::arg("logits"))
      .def("forward", &forward, nb::arg("tokens"), nb::arg("positions"), nb::arg("query_starts"), nb::arg("seq_lens"),
           nb::arg("table_rows"), nb::arg("block_tables"))
      .def("logits", &logits, nb::arg("rows"))
      .def("best", &best)
      .def("run", &run, nb::arg("tokens"), nb::arg("positions"), nb::arg("query_starts"), nb::arg("seq_lens"),
           nb::arg("table_rows"), nb::arg("block_tables"), nb::arg("rows"))
      .def("softmax_blocks", &softmax_blocks, nb::arg("scores"), nb::arg("block"), nb::arg("peaks"),
           nb::arg("temperatures"))
      .def("division", &Program::division,
           "Rows (begin, end) of each strand of the last forward() or logits(); whether one read what another wrote.")
      .def("profile", &Program::profile);
  m.attr("PANEL") = kPanel;
  m.def("quant_floats", &quant_floats, nb::arg("rows"), nb::arg("k"), nb::arg("group"),
        "Arena floats that the quantised form of [rows][k] in groups takes.");
}
