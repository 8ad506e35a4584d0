// Which compiled copy of the kernels this processor runs.
//
// __builtin_cpu_supports asks the processor and the operating system (it reads XCR0), so an instruction set whose
// registers the system does not save counts as absent. On aarch64 the system says it in getauxval().
#include <cstring>

#include "kernels.h"
#if defined(OCTAVO_HAS_neon)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace octavo {
#if defined(OCTAVO_HAS_neon)
namespace neon {
extern const Kernels table;
}
namespace neon_dotprod {
extern const Kernels table;
}
#else
namespace portable {
extern const Kernels table;
}
#endif
#if defined(OCTAVO_HAS_avx2)
namespace avx2 {
extern const Kernels table;
}
#if defined(OCTAVO_HAS_avx2_vnni)
namespace avx2_vnni {
extern const Kernels table;
}
#endif
namespace avx512 {
extern const Kernels table;
}
namespace avx512_vnni {
extern const Kernels table;
}
#endif

namespace {

// Best first, null at the end.
struct Choices {
  const Kernels* table[6] = {};

  Choices() {
    const Kernels** next = table;
#if defined(OCTAVO_HAS_avx2)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          (cpuid(1, 0).ecx >> 29 & 1);  // F16C
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) *next++ = &avx512_vnni::table;
#if defined(OCTAVO_HAS_avx2_vnni)
    if (has_avx2 && (cpuid(7, 1).eax >> 4 & 1)) *next++ = &avx2_vnni::table;
#endif
    if (has_avx512) *next++ = &avx512::table;
    if (has_avx2) *next++ = &avx2::table;
#endif
#if defined(OCTAVO_HAS_neon)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) *next++ = &neon_dotprod::table;
    *next = &neon::table;
#else
    *next = &portable::table;
#endif
  }

#if defined(OCTAVO_HAS_avx2)
  struct Registers {
    unsigned eax, ebx, ecx, edx;
  };
  // What older compilers do not know by name. Leaves beyond the processor's highest count as empty.
  static Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r = ask_cpuid(0, 0);
    if (leaf > r.eax || (leaf == 7 && subleaf > ask_cpuid(7, 0).eax)) return {};
    return ask_cpuid(leaf, subleaf);
  }
  static Registers ask_cpuid(unsigned leaf, unsigned subleaf) {
    Registers r{leaf, 0, subleaf, 0};
    __asm__("cpuid" : "+a"(r.eax), "=b"(r.ebx), "+c"(r.ecx), "=d"(r.edx));
    return r;
  }
#endif
};

}  // namespace

const Kernels* const* available_kernels() {
  static const Choices choices;
  return choices.table;
}

const Kernels* kernels(const char* isa) {
  for (const Kernels* const* table = available_kernels(); *table; ++table) {
    if (!isa || std::strcmp(isa, (*table)->isa) == 0) return *table;
  }
  return nullptr;
}

}  // namespace octavo
