// Python's view of the matrix kernels: packed matrices, and one product at a time for tests and measurements.
// The engine does not come through here; it runs the same kernels from a program (bindings_program.cpp).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "bind_buffers.h"
#include "check.h"
#include "pack.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace {

using namespace octavo;
using check::AnyArray;
using NewArray = nb::ndarray<nb::numpy, float, nb::c_contig>;

constexpr int kMaxWorkers = 1024;

NewArray new_array(AlignedBuffer buffer, int rows, int columns) {
  auto kept = std::make_unique<AlignedBuffer>(std::move(buffer));
  float* data = kept->as<float>();
  const nb::capsule owner(kept.get(), [](void* p) noexcept { delete static_cast<AlignedBuffer*>(p); });
  kept.release();
  return NewArray(data, {static_cast<size_t>(rows), static_cast<size_t>(columns)}, owner);
}

AlignedBuffer floats(int rows, int columns) {
  return AlignedBuffer(static_cast<size_t>(rows) * static_cast<size_t>(columns) * sizeof(float));
}

const Kernels& kernels_named(const std::optional<std::string>& isa) {
  const Kernels* table = kernels(isa ? isa->c_str() : nullptr);
  if (!table) throw std::invalid_argument("isa '" + *isa + "' is not available here; see available_isas()");
  return *table;
}

Weights weights_of(const AnyArray& weight, const std::optional<AnyArray>& up) {
  const int n = check::dimension(weight, 0, "weight"), k = check::dimension(weight, 1, "weight");
  return {check::array<float>(weight, "weight", {n, k}), up ? check::array<float>(*up, "up", {n, k}) : nullptr, n, k};
}

// The codes, scales and lowest values of one grouped matrix; as a tuple, what a gated pair's second is given as.
using GroupedArrays = std::tuple<AnyArray, AnyArray, std::optional<AnyArray>>;

GroupedWeights::Part part_of(const GroupedArrays& arrays, int n, int k, int bits) {
  const auto& [codes, scale, low] = arrays;
  const int groups = k / code_group(bits);
  return {check::array<uint8_t>(codes, "codes", {n, k}), check::array<uint16_t>(scale, "scale", {n, groups}),
          low ? check::array<uint16_t>(*low, "low", {n, groups}) : nullptr};
}

// Quantised rows with their memory.
struct OwnedQuantRows {
  AlignedBuffer q, scale, sum;

  int64_t stride, row_bytes;
  int group;

  OwnedQuantRows(int rows, int k, int group) : stride(quant_stride(rows)), group(group) {
    const size_t groups = static_cast<size_t>((int64_t{k} + group - 1) / group);
    row_bytes = static_cast<int64_t>(groups) * group;
    q = AlignedBuffer(static_cast<size_t>(rows * row_bytes));
    scale = AlignedBuffer(groups * static_cast<size_t>(stride) * sizeof(float));
    sum = AlignedBuffer(groups * static_cast<size_t>(stride) * sizeof(int32_t));
  }
  QuantRows view() const { return {q.as<int8_t>(), scale.as<float>(), sum.as<int32_t>(), stride, group, row_bytes}; }
};

// A product that can be computed again and again: `x` in the form the matrix multiplies, and the kernel call.
template <class Packed>
struct QuantProduct {
  const Kernels& k;
  View x;
  int rows;
  OwnedQuantRows quantized;

  QuantProduct(const Kernels& kernels, const Packed& m, const View& x, int rows)
      : k(kernels), x(x), rows(rows), quantized(rows, x.width, group_of(m)) {}
  static int group_of(const PackedI8&) { return kQuantGroup; }
  static int group_of(const PackedGrouped& m) { return code_group(m.matrix().bits); }
  void prepare(Worker w) const { k.quantize_rows(x, rows, quantized.view(), w); }
  void multiply(const Packed& m, const Epilogue& e, Worker w) const {
    if constexpr (std::is_same_v<Packed, PackedI8>) {
      k.matmul_i8(m.matrix(), quantized.view(), rows, e, w);
    } else {
      k.matmul_grouped(m.matrix(), quantized.view(), rows, e, w);
    }
  }
};

struct Float32Product {
  const Kernels& k;
  View x;
  int rows;

  Float32Product(const Kernels& kernels, const PackedF32&, const View& x, int rows) : k(kernels), x(x), rows(rows) {}
  void prepare(Worker) const {}
  void multiply(const PackedF32& m, const Epilogue& e, Worker w) const { k.matmul_f32(m.matrix(), x, rows, e, w); }
};

Act act_of(const std::optional<std::string>& name, bool is_gated) {
  if (!name) {
    if (is_gated) throw std::invalid_argument("a gated matrix needs act: 'silu' or 'gelu_tanh'");
    return Act::none;
  }
  if (!is_gated) throw std::invalid_argument("act '" + *name + "' needs a gated matrix (pack weight and up)");
  if (*name == "silu") return Act::silu;
  if (*name == "gelu_tanh") return Act::gelu_tanh;
  throw std::invalid_argument("act '" + *name + "' is unknown; use 'silu' or 'gelu_tanh'");
}

template <class Packed, class Product>
NewArray matmul(const Packed& matrix, const AnyArray& x, const std::optional<AnyArray>& bias,
                const std::optional<AnyArray>& residual, const std::optional<std::string>& act,
                const std::optional<std::string>& isa, int num_workers) {
  const int n = matrix.matrix().n, k = matrix.matrix().k, rows = check::dimension(x, 0, "x");
  const int width = matrix.is_gated() ? n / 2 : n;
  const View view{const_cast<float*>(check::array<float>(x, "x", {rows, k})), k, k};
  const float* bias_data = bias ? check::array<float>(*bias, "bias", {n}) : nullptr;
  const float* residual_data = residual ? check::array<float>(*residual, "residual", {rows, width}) : nullptr;
  const Act activation = act_of(act, matrix.is_gated());
  if (activation != Act::none && (bias || residual)) throw std::invalid_argument("act excludes bias and residual");
  if (num_workers < 1 || num_workers > kMaxWorkers) throw std::invalid_argument("num_workers must be within [1, 1024]");

  const Product product(kernels_named(isa), matrix, view, rows);
  AlignedBuffer out = floats(rows, width);
  const Epilogue e{out.as<float>(), width, bias_data, residual_data, width, activation};
  {
    const nb::gil_scoped_release released;  // workers take turns on this thread: their shares are independent
    for (int id = 0; id < num_workers; ++id) product.prepare({id, num_workers});
    for (int id = 0; id < num_workers; ++id) product.multiply(matrix, e, {id, num_workers});
  }
  return new_array(std::move(out), rows, width);
}

// Seconds one product takes when `matrices` (of one shape) are multiplied in turn: more of them than the caches
// hold, and weights come from memory. The best of `rounds`.
template <class Packed, class Product>
double time_matmul(const std::vector<const Packed*>& matrices, int rows, ThreadPool& pool, int rounds,
                   const std::optional<std::string>& isa) {
  if (matrices.empty() || rows < 1 || rounds < 1) {
    throw std::invalid_argument("matrices must not be empty, rows and rounds at least 1");
  }
  const int n = matrices[0]->matrix().n, k = matrices[0]->matrix().k;
  for (const Packed* m : matrices) {
    const bool is_equal = m->matrix().n == n && m->matrix().k == k && m->is_gated() == matrices[0]->is_gated();
    if (!is_equal) throw std::invalid_argument("all matrices must have the same shape");
  }
  const int width = matrices[0]->is_gated() ? n / 2 : n;
  AlignedBuffer x = floats(rows, k), y = floats(rows, width);
  for (int64_t i = 0; i < int64_t{rows} * k; ++i) x.as<float>()[i] = static_cast<float>(i % 251) - 125.0f;
  const Product product(kernels_named(isa), *matrices[0], {x.as<float>(), k, k}, rows);
  const Epilogue e{y.as<float>(), width, nullptr, nullptr, 0, matrices[0]->is_gated() ? Act::silu : Act::none};
  const ThreadPool::Job job{static_cast<int>(matrices.size()), 1, [&](int, int i, Worker w) {
                              product.multiply(*matrices[static_cast<size_t>(i)], e, w);
                            }, {}};
  const nb::gil_scoped_release released;
  product.prepare({0, 1});
  double best = std::numeric_limits<double>::infinity();
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(job);
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best / static_cast<double>(matrices.size());
}

void bind_init(nb::class_<PackedGrouped>& packed) {
  packed.def_prop_ro("group", [](const PackedGrouped& p) { return code_group(p.matrix().bits); });
  packed.def(
      "__init__",
      [](PackedGrouped* self, const GroupedArrays& weight, const std::optional<GroupedArrays>& up, int bits,
         int num_threads) {
        const AnyArray& codes = std::get<0>(weight);
        const int n = check::dimension(codes, 0, "codes"), k = check::dimension(codes, 1, "codes");
        const GroupedWeights::Part second = up ? part_of(*up, n, k, bits) : GroupedWeights::Part{};
        new (self) PackedGrouped({part_of(weight, n, k, bits), second, n, k, bits}, num_threads);
      },
      nb::arg("weight"), nb::arg("up") = nb::none(), nb::kw_only(), nb::arg("bits"), nb::arg("num_threads") = 1);
}

template <class Packed>
void bind_init(nb::class_<Packed>& packed) {
  packed.def(
      "__init__",
      [](Packed* self, const AnyArray& weight, const std::optional<AnyArray>& up, int num_threads) {
        new (self) Packed(weights_of(weight, up), num_threads);
      },
      nb::arg("weight"), nb::arg("up") = nb::none(), nb::arg("num_threads") = 1);
}

template <class Packed, class Product>
void bind(nb::module_& m, const char* name) {
  nb::class_<Packed> packed(m, name);
  bind_init(packed);
  bind_buffers(packed);
  packed
      .def_prop_ro("n", [](const Packed& p) { return p.matrix().n; })
      .def_prop_ro("k", [](const Packed& p) { return p.matrix().k; })
      .def_prop_ro("is_gated", &Packed::is_gated)
      .def_prop_ro("nbytes", &Packed::bytes)
      .def(
          "unpack",
          [](const Packed& p) {
            AlignedBuffer out = floats(p.matrix().n, p.matrix().k);
            p.unpack(out.as<float>());
            return new_array(std::move(out), p.matrix().n, p.matrix().k);
          },
          "The weights the kernels compute with, float32 [n, k]; of a gated pair gate's rows, then up's.");
  m.def("matmul", &matmul<Packed, Product>, nb::arg("matrix"), nb::arg("x"), nb::kw_only(),
        nb::arg("bias") = nb::none(), nb::arg("residual") = nb::none(), nb::arg("act") = nb::none(),
        nb::arg("isa") = nb::none(), nb::arg("num_workers") = 1,
        "x [rows, k] times the matrix -> [rows, n], or act(gate) * up [rows, n/2].");
  m.def("time_matmul", &time_matmul<Packed, Product>, nb::arg("matrices"), nb::arg("rows"), nb::arg("pool"),
        nb::arg("rounds"), nb::arg("isa") = nb::none(), "Seconds a product takes, multiplying the matrices in turn.");
}

}  // namespace

void bind_matmul(nb::module_& m) {
  bind<PackedI8, QuantProduct<PackedI8>>(m, "PackedI8");
  bind<PackedGrouped, QuantProduct<PackedGrouped>>(m, "PackedGrouped");
  bind<PackedF32, Float32Product>(m, "PackedF32");
}
