// What this processor can do at best: int8 multiply-adds from registers, float32 multiply-adds from registers,
// and reads from memory, in order and in pieces, on a number of threads; and how long two threads take to pass a cache
// line from one to the other. limits.py compiles it, as a library, for the machine it runs on.
// x86-64 with AVX2 or better.
#include <immintrin.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
#define FMA(n) "vfmadd231ps %%zmm15, %%zmm15, %%zmm" #n "\n"
#define REGISTERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
constexpr int kBytes = 64;
#else
#define FMA(n) "vfmadd231ps %%ymm15, %%ymm15, %%ymm" #n "\n"
#define REGISTERS "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11"
constexpr int kBytes = 32;
#endif
#if defined(__AVX512VNNI__)
#define DOT(n) "vpdpbusd %%zmm15, %%zmm15, %%zmm" #n "\n"
constexpr int kBytesPerDot = 64;
#else
#define DOT(n) "vpmaddwd %%ymm15, %%ymm15, %%ymm" #n "\n"  // two 16-bit products a lane: half the bytes
constexpr int kBytesPerDot = 16;
#endif
#define TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)

constexpr long kLoops = 1'000'000;
constexpr size_t kMemoryBytes = size_t{256} << 20;

void dot_loop(int) {
  for (long i = 0; i < kLoops; ++i) asm volatile(TWELVE(DOT)::: REGISTERS);
}
void fma_loop(int) {
  for (long i = 0; i < kLoops; ++i) asm volatile(TWELVE(FMA)::: REGISTERS);
}

// Seconds of the fastest of some runs of body(thread) on all threads.
template <typename Body>
double best_seconds(int threads, const Body& body, int runs = 8) {
  double best = 1e9;
  for (int run = 0; run < runs; ++run) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> all;
    for (int id = 0; id < threads; ++id) all.emplace_back(body, id);
    for (std::thread& t : all) t.join();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

const char* new_memory() {
  void* memory = nullptr;
  if (posix_memalign(&memory, size_t{2} << 20, kMemoryBytes) != 0) std::abort();
  madvise(memory, kMemoryBytes, MADV_HUGEPAGE);
  std::memset(memory, 1, kMemoryBytes);
  return static_cast<const char*>(memory);
}

// What is read, taken from the system once.
const char* memory() {
  static const char* const taken = new_memory();
  return taken;
}

// Reads share number `id` of `bytes`.
template <bool kPrefetch>
void read_all(int id, size_t bytes) {
  const char* p = memory() + id * bytes;
  __m256i sum = _mm256_setzero_si256();
  for (size_t i = 0; i < bytes; i += 64) {
    if (kPrefetch) _mm_prefetch(p + i + 4096, _MM_HINT_T0);
    sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i)));
  }
  asm volatile("" ::"x"(sum));
}

// Reads the pieces of `bytes` with the numbers [begin, end), and meanwhile asks for the one `ahead` places further.
void read_pieces(const int* begin, const int* end, size_t bytes, int ahead) {
  __m256i sum = _mm256_setzero_si256();
  for (const int* piece = begin; piece < end; ++piece) {
    const char* p = memory() + *piece * bytes;
    const char* asked = piece + ahead < end ? memory() + piece[ahead] * bytes : p;
    for (size_t i = 0; i < bytes; i += 64) {
      _mm_prefetch(asked + i, _MM_HINT_T1);
      sum = _mm256_xor_si256(sum, _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i)));
    }
  }
  asm volatile("" ::"x"(sum));
}

// What `threads` threads do at once: int8 GOP/s, float32 GFLOP/s, GB/s read.
extern "C" void probe(int threads, double* int8_gops, double* float32_gflops, double* read_gb_s) {
  memory();
  const size_t share = kMemoryBytes / threads / 256 * 256;
  // Which of the two is faster depends on the processor's own prefetching.
  const double read = std::min(best_seconds(threads, [&](int id) { read_all<false>(id, share); }),
                               best_seconds(threads, [&](int id) { read_all<true>(id, share); }));
  *int8_gops = threads * kLoops * 12.0 * 2 * kBytesPerDot / best_seconds(threads, dot_loop) / 1e9;
  *float32_gflops = threads * kLoops * 12.0 * 2 * (kBytes / 4) / best_seconds(threads, fma_loop) / 1e9;
  *read_gb_s = static_cast<double>(share) * threads / read / 1e9;
}

// GB/s that `threads` threads read in pieces of `bytes`, a multiple of 64, that lie in random order: all that a kernel
// which finds blocks by a table could read, if it had nothing to compute. Of several distances ahead the best.
extern "C" double scattered_gb_s(int threads, size_t bytes) {
  memory();
  const size_t share = kMemoryBytes / bytes / threads;
  std::vector<int> pieces(share * threads);
  std::iota(pieces.begin(), pieces.end(), 0);
  std::shuffle(pieces.begin(), pieces.end(), std::mt19937(0));
  double best = 1e9;
  for (const int ahead : {1, 4, 16}) {
    const auto read = [&](int id) {
      read_pieces(pieces.data() + id * share, pieces.data() + (id + 1) * share, bytes, ahead);
    };
    best = std::min(best, best_seconds(threads, read, 2));
  }
  return static_cast<double>(pieces.size() * bytes) / best / 1e9;
}

// The core that thread `id` of two runs on from now on: the first or the second of those this process may use.
void pin(int id) {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && id-- == 0) CPU_SET(cpu, &one);
  }
  sched_setaffinity(0, sizeof one, &one);
}

// Nanoseconds one way, the best of eight rounds: some 40 where two cores share a cache, 100 to 200 where they do not.
extern "C" double handover_ns() {
  constexpr int kTurns = 20000;
  alignas(64) static std::atomic<int> turn;
  const double seconds = best_seconds(2, [](int id) {
    pin(id);
    if (id == 0) turn.store(0);
    for (int i = id; i < 2 * kTurns; i += 2) {
      while (turn.load(std::memory_order_acquire) != i) _mm_pause();
      turn.store(i + 1, std::memory_order_release);
    }
  });
  return seconds / (2 * kTurns) * 1e9;
}
