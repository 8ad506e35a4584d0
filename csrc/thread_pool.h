// A pool of persistent threads that run one job together: segments one after another, each cut into a few parts a thread.
//
// The calling thread is one of them. A thread takes its own parts of a segment in their order; one that has none left
// takes those at the other end of somebody else's. So a thread that is slower, comes late or still sleeps delays the
// others by no more than the part it has begun. Where threads outnumber the free cores, that part may stand still while
// another process has the core: a thread that waits yields, then sleeps, so that the system can move it to a free one.
// Between jobs threads poll for a moment, then sleep: a step that follows soon starts in a fraction of a microsecond, an
// idle server uses no processor. They never touch Python.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace octavo {

class ThreadPool {
 public:
  using Job = std::function<void(int segment, Worker part)>;

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  static constexpr int kPieces = 4;  // parts a thread

  int num_threads() const { return num_threads_; }
  int num_parts() const { return num_threads_ * kPieces; }

  // Calls job(s, part) for each segment s in [0, num_segments) and each of its num_parts() parts, once. Parts
  // [t * kPieces, (t + 1) * kPieces) are thread t's own. A segment begins when all parts of the one before have ended,
  // and sees what they wrote; returns when the last has. One caller at a time; others wait.
  void run(int num_segments, const Job& job);

 private:
  // What is left of a thread's own parts of a segment: pieces [front, back). Segments are numbered through, over all
  // jobs, and a segment's parts have all been taken before the next begins. So a thread that comes late can mistake none
  // for another, and the claim of an earlier segment says that nothing of this one has been taken.
  struct alignas(64) Claim {
    std::atomic<uint64_t> word{0};  // segment << 16 | front << 8 | back
  };

  bool take(int owner, bool is_own);
  bool take_from_others(int own);
  void help(int own, uint64_t end);
  void work(int own);
  bool wait_for_job(uint64_t seen);
  template <class Condition>
  void sleep_until(const Condition& is_over);
  void wake_sleepers();

  const int num_threads_;
  const int pid_;  // threads do not survive fork(): a copy of the pool in a child has none to join
  std::mutex callers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const Job* job_ = nullptr;
  uint64_t first_segment_ = 1;  // of the job
  std::unique_ptr<Claim[]> claims_;
  alignas(64) std::atomic<int> num_left_;          // parts of the segment under way that have not ended
  alignas(64) std::atomic<uint64_t> segment_{1};   // under way, or the next to be
  alignas(64) std::atomic<uint64_t> end_{1};       // of the segments given out
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> threads_;
};

// The process's pool of that many threads: made on first use, ended with its last user.
std::shared_ptr<ThreadPool> shared_pool(int num_threads);

}  // namespace octavo
