#include "kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

namespace octavo {
namespace {

#if defined(__linux__) && !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones refuse it
#endif

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kReadPastEnd = 64;  // kernels load whole vectors at the end of the last block

// The bits of `value` as float16, for the values fill_block is used with; others are refused there.
bool to_half_exactly(float value, uint16_t* half) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) {  // NaN
    *half = static_cast<uint16_t>(sign | 0x7e00);
  } else if (magnitude == 0x7f800000) {
    *half = static_cast<uint16_t>(sign | 0x7c00);
  } else if (magnitude == 0) {
    *half = static_cast<uint16_t>(sign);
  } else if (magnitude < 0x38800000 || magnitude > 0x477fe000 || (magnitude & 0x1fff) != 0) {
    return false;
  } else {
    *half = static_cast<uint16_t>(sign | ((magnitude - 0x38000000) >> 13));
  }
  return true;
}

}  // namespace

KVCache::KVCache(int num_storages, int64_t num_blocks, int64_t block_bytes, KVType type)
    : num_storages_(num_storages), num_blocks_(num_blocks), block_bytes_(block_bytes), type_(type) {
  const size_t bytes = static_cast<size_t>(num_storages * num_blocks * block_bytes) + kReadPastEnd;
  mapped_bytes_ = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* memory =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
#ifdef MADV_HUGEPAGE
  madvise(memory_, mapped_bytes_, MADV_HUGEPAGE);  // a wish: failure changes nothing
#endif
}

KVCache::~KVCache() { munmap(memory_, mapped_bytes_); }

void KVCache::check_block(int64_t block) const {
  if (block >= 0 && block < num_blocks_) return;
  throw std::invalid_argument("block " + std::to_string(block) + " is not one of the cache's " +
                              std::to_string(num_blocks_) + " blocks");
}

void KVCache::copy_blocks(const int32_t* src, const int32_t* dst, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    check_block(src[i]);
    check_block(dst[i]);
  }
  for (int s = 0; s < num_storages_; ++s) {
    for (int64_t i = 0; i < count; ++i) {
      if (src[i] != dst[i]) std::memcpy(block(s, dst[i]), block(s, src[i]), static_cast<size_t>(block_bytes_));
    }
  }
}

void KVCache::read_block(int64_t index, char* out) const {
  check_block(index);
  for (int s = 0; s < num_storages_; ++s) {
    std::memcpy(out + s * block_bytes_, block(s, index), static_cast<size_t>(block_bytes_));
  }
}

void KVCache::write_block(int64_t index, const char* data) {
  check_block(index);
  for (int s = 0; s < num_storages_; ++s) {
    std::memcpy(block(s, index), data + s * block_bytes_, static_cast<size_t>(block_bytes_));
  }
}

bool KVCache::take_memory() {
#ifdef MADV_POPULATE_WRITE
  constexpr int64_t kPiece = int64_t{2} << 20, kPage = 4096;
  const int64_t storage_bytes = num_blocks_ * block_bytes_;
  const int64_t piece = taken_ / num_storages_, storage = taken_ % num_storages_;
  if (piece * kPiece >= storage_bytes) return false;
  ++taken_;
  const int64_t begin = storage * storage_bytes + piece * kPiece;
  const int64_t end = storage * storage_bytes + std::min(storage_bytes, (piece + 1) * kPiece);
  char* from = memory_ + begin / kPage * kPage;
  return madvise(from, static_cast<size_t>(memory_ + end - from), MADV_POPULATE_WRITE) == 0;
#else
  return false;
#endif
}

void KVCache::fill_block(int64_t index, float value) {
  check_block(index);
  uint16_t half = 0;
  if (type_ == KVType::f16 && !to_half_exactly(value, &half)) {
    throw std::invalid_argument("fill value " + std::to_string(value) + " is not exact in float16; use another");
  }
  for (int s = 0; s < num_storages_; ++s) {
    char* to = block(s, index);
    const size_t width = type_ == KVType::f16 ? sizeof half : sizeof value;
    for (int64_t at = 0; at < block_bytes_; at += static_cast<int64_t>(width)) {
      std::memcpy(to + at, type_ == KVType::f16 ? static_cast<void*>(&half) : static_cast<void*>(&value), width);
    }
  }
}

}  // namespace octavo
