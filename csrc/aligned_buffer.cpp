// Memory for weights and working buffers (aligned_buffer.h).
#include "aligned_buffer.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>

namespace octavo {
namespace {

constexpr size_t kCacheLine = 64;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSlab = 32 * kHugePage;  // the system gives pages as they are used: only its last one is part waste
constexpr size_t kSmallestInSlab = size_t{64} << 10, kLargestInSlab = 4 * kHugePage;

std::shared_ptr<void> allocate(size_t bytes) {
  void* memory = nullptr;
  const size_t alignment = bytes >= kHugePage ? kHugePage : kCacheLine;
  if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (alignment == kHugePage) madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);  // a wish: may fail
#endif
  return {memory, std::free};
}

struct Slab {
  std::shared_ptr<void> memory = allocate(kSlab);
  size_t used = 0;
};

std::mutex slab_mutex;

// A piece of the slab in use; a new slab where it does not fit. The piece cut last is given back when it goes.
std::shared_ptr<void> carve(size_t bytes) {
  static std::weak_ptr<Slab> current;  // weak: the slab goes with its last buffer
  std::unique_lock<std::mutex> lock(slab_mutex);
  std::shared_ptr<Slab> slab = current.lock();
  if (!slab || slab->used + bytes > kSlab) current = slab = std::make_shared<Slab>();
  const size_t start = slab->used;
  slab->used += bytes;
  lock.unlock();
  return {static_cast<char*>(slab->memory.get()) + start, [slab, start, bytes](void*) {
            const std::lock_guard<std::mutex> lock(slab_mutex);
            if (slab->used == start + bytes) slab->used = start;
          }};
}

}  // namespace

AlignedBuffer::AlignedBuffer(size_t bytes) : bytes_(bytes) {
  const size_t size = bytes ? (bytes + kCacheLine - 1) / kCacheLine * kCacheLine : kCacheLine;
  memory_ = size >= kSmallestInSlab && size < kLargestInSlab ? carve(size) : allocate(size);
}

}  // namespace octavo
