// The paged KV cache: `num_storages` arrays of `num_blocks` equal blocks in one mapping.
//
// The system zeroes a page when it is first touched, so a large cache costs memory only where blocks are used.
// Block ids are checked here; what lies inside a block is the business of the attention kernels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace octavo {

class KVCache {
 public:
  // Throws std::bad_alloc where the address space is not granted. A block is a whole number of floats.
  KVCache(int num_storages, int64_t num_blocks, int64_t block_bytes, KVType type);
  ~KVCache();
  KVCache(const KVCache&) = delete;
  KVCache& operator=(const KVCache&) = delete;

  int num_storages() const { return num_storages_; }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t bytes_of_all_storages() const { return num_storages_ * block_bytes_; }
  KVType type() const { return type_; }
  char* storage(int index) const { return memory_ + index * num_blocks_ * block_bytes_; }

  // In every storage array. All throw std::invalid_argument on an id outside [0, num_blocks).
  void copy_blocks(const int32_t* src, const int32_t* dst, int64_t count);
  void read_block(int64_t block, char* out) const;  // [storages][block_bytes]
  void write_block(int64_t block, const char* data);
  // Takes some more of the memory from the system, without changing what it holds, blocks of low ids first; false when
  // there is no more to take. Otherwise a step does so at the blocks it uses for the first time, which costs it more
  // than computing them.
  bool take_memory();
  // In an int8 cache all bytes are those of the float: scales and states get the value, integers anything.
  void fill_block(int64_t block, float value);

 private:
  void check_block(int64_t block) const;
  char* block(int storage, int64_t block) const { return this->storage(storage) + block * block_bytes_; }

  int num_storages_;
  int64_t num_blocks_, block_bytes_;
  KVType type_;
  char* memory_;
  size_t mapped_bytes_;
  int64_t taken_ = 0;  // calls of take_memory so far
};

}  // namespace octavo
