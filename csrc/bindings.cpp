// The extension module octavo._native: parameters, program, cache (bindings_program.cpp), matrices
// (bindings_matmul.cpp) and which instruction set runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdlib>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "kernels.h"

namespace nb = nanobind;

void bind_matmul(nb::module_& m);
void bind_program(nb::module_& m);

namespace {

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const octavo::Kernels* const* table = octavo::available_kernels(); *table; ++table) {
    names.emplace_back((*table)->isa);
  }
  return names;
}

void release_free_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Octavo's CPU kernels. Used through octavo.backends.native.";
  m.def("isa", [] { return std::string(octavo::kernels(nullptr)->isa); }, "The best instruction set of this processor.");
  m.def("available_isas", &available_isas, "Instruction sets this processor and build can run, best first.");
  m.def("release_free_memory", &release_free_memory, "Give the allocator's free memory back to the system.");
  bind_matmul(m);
  bind_program(m);
}
