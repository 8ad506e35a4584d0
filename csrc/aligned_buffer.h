// Owned memory that starts on a cache line, in 2 MB pages where it is large enough to be streamed.
//
// A weight matrix is often smaller than such a page, so middle-sized buffers are carved out of common slabs;
// a slab lives as long as any buffer in it. Not an allocator: only what was cut last is used again, as the parts a
// large matrix is packed in are; all else waits until the whole slab is free.
#pragma once
#include <cstddef>
#include <memory>

namespace octavo {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes);  // contents are undefined; throws std::bad_alloc
  AlignedBuffer(AlignedBuffer&&) = default;
  AlignedBuffer& operator=(AlignedBuffer&&) = default;

  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<void> memory_;
  size_t bytes_ = 0;
};

}  // namespace octavo
