// A pool of persistent threads that run one job together: segments one after another, each cut into as many parts as
// there are threads.
//
// The calling thread is one of them. A thread takes its own part of a segment; if it has not come, because another
// process has its core or because it still sleeps, a thread that waits takes its part as well. So a processor that is
// lent for a moment costs its own work and does not stop the others'. Between jobs threads poll for a moment, then
// sleep: a step that follows soon starts in a fraction of a microsecond, an idle server uses no processor. Waiting
// threads poll and, where threads outnumber the free cores, yield. They never touch Python.
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

  int num_threads() const { return num_threads_; }

  // Calls job(s, part) for each segment s in [0, num_segments) and each part of it, once. A segment begins when all
  // parts of the one before have ended, and sees what they wrote; returns when the last has. One caller at a time;
  // others wait.
  void run(int num_segments, const Job& job);

 private:
  // Segments are numbered through, over all jobs: a thread that comes late can mistake no job for another.
  struct alignas(64) Claim {
    std::atomic<uint64_t> next{0};  // the segment whose part is to be taken next
  };

  bool take(int part);
  void help(int own, uint64_t end);
  void work(int own);
  bool wait_for_job(uint64_t seen);

  const int num_threads_;
  const int pid_;  // threads do not survive fork(): a copy of the pool in a child has none to join
  std::mutex callers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const Job* job_ = nullptr;
  uint64_t first_segment_ = 0;  // of the job
  std::unique_ptr<Claim[]> claims_;
  alignas(64) std::atomic<uint64_t> num_done_{0};  // parts
  alignas(64) std::atomic<uint64_t> end_{0};       // segments given out
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> threads_;
};

// The process's pool of that many threads: made on first use, ended with its last user.
std::shared_ptr<ThreadPool> shared_pool(int num_threads);

}  // namespace octavo
