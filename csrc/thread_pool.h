// A pool of persistent threads that run one function together (single program, multiple data).
//
// The calling thread is worker 0. Between jobs a worker spins for a moment, then sleeps: a step that follows soon
// starts in a fraction of a microsecond, an idle server uses no processor. Inside a job workers meet at barrier(),
// which spins and, where threads outnumber the free cores, yields. Workers never touch Python.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"

namespace octavo {

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs job(worker) on every worker and returns when all have ended. One caller at a time; others wait.
  void run(const std::function<void(Worker)>& job);

  // Returns once every worker of the running job has called it. What was written before is seen after.
  void barrier();

 private:
  void work(int id);
  bool wait_for_job(uint32_t seen);

  const int num_threads_;
  const int pid_;  // threads do not survive fork(): a copy of the pool in a child has none to join
  std::mutex callers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  const std::function<void(Worker)>* job_ = nullptr;
  // One cache line: the barrier writes and polls both.
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // number of jobs started
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> threads_;
};

// The process's pool of that many threads: made on first use, ended with its last user.
std::shared_ptr<ThreadPool> shared_pool(int num_threads);

}  // namespace octavo
