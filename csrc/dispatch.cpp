// Which compiled copy of the kernels this processor runs.
//
// __builtin_cpu_supports asks the processor and the operating system (it reads XCR0), so an instruction set whose
// registers the system does not save counts as absent.
#include <cstring>

#include "kernels.h"

namespace octavo {
namespace portable {
extern const Kernels table;
}
#ifdef OCTAVO_HAS_avx2
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512_vnni {
extern const Kernels table;
}
#endif

namespace {

// Best first; null where the processor lacks it.
struct Choices {
  static constexpr int kCount = 4;
  const Kernels* table[kCount] = {nullptr, nullptr, nullptr, &portable::table};

  Choices() {
#ifdef OCTAVO_HAS_avx2
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) table[0] = &avx512_vnni::table;
    if (has_avx512) table[1] = &avx512::table;
    if (has_avx2) table[2] = &avx2::table;
#endif
  }

#ifdef OCTAVO_HAS_avx2
  // CPUID leaf 1, ECX bit 29. Older compilers do not know the name "f16c".
  static bool has_f16c() {
    unsigned eax = 1, ebx = 0, ecx = 0, edx = 0;
    __asm__("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
    return (ecx >> 29) & 1;
  }
#endif
};

}  // namespace

const Kernels* kernels(const char* isa) {
  static const Choices choices;
  for (const Kernels* table : choices.table) {
    if (table && (!isa || std::strcmp(isa, table->isa) == 0)) return table;
  }
  return nullptr;
}

}  // namespace octavo
