#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>

namespace octavo {
namespace {

// Polls before a part that is not its own is taken, or the core is given up: some 2 us. Where threads outnumber the free cores a waiting worker must give its core
// to the one it waits for: with 20 us (2000 polls) a contended decode step took 48 ms, with this 10 ms.
constexpr int kPolls = 50;
constexpr auto kPatience = std::chrono::microseconds(500);  // of polling and yielding before sleep

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads), pid_(getpid()), claims_(new Claim[static_cast<size_t>(num_threads)]) {
  for (int id = 1; id < num_threads_; ++id) threads_.emplace_back([this, id] { work(id); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != pid_) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  is_stopping_.store(true);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int num_segments, const Job& job) {
  std::lock_guard<std::mutex> caller(callers_);
  job_ = &job;
  first_segment_ = end_.load();
  const uint64_t end = first_segment_ + static_cast<uint64_t>(num_segments);
  end_.store(end);  // sequentially consistent with the sleepers' check under the lock
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  help(0, end);
}

// Does a part of the segment that is under way, if nobody has taken it. The job lives until it is done.
bool ThreadPool::take(int part) {
  const auto threads = static_cast<uint64_t>(num_threads_);
  std::atomic<uint64_t>& next = claims_[static_cast<size_t>(part)].next;
  uint64_t segment = next.load(std::memory_order_acquire);
  if (segment >= end_.load(std::memory_order_acquire)) return false;
  if (num_done_.load(std::memory_order_acquire) < segment * threads) return false;
  if (!next.compare_exchange_strong(segment, segment + 1, std::memory_order_acq_rel)) return false;
  (*job_)(static_cast<int>(segment - first_segment_), {part, num_threads_});
  num_done_.fetch_add(1, std::memory_order_acq_rel);
  return true;
}

// Takes parts until all segments before `end` are done.
void ThreadPool::help(int own, uint64_t end) {
  int polls = 0;
  while (num_done_.load(std::memory_order_acquire) < end * static_cast<uint64_t>(num_threads_)) {
    if (take(own)) {
      polls = 0;
    } else if (++polls < kPolls) {
      pause();
    } else {
      bool has_helped = false;
      for (int part = 0; part < num_threads_ && !has_helped; ++part) has_helped = take(part);
      if (!has_helped) sched_yield();
    }
  }
}

// True once there are more than `seen` segments, false when the pool ends.
bool ThreadPool::wait_for_job(uint64_t seen) {
  const auto has_job = [&] { return end_.load() != seen || is_stopping_.load(); };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (int polls = 0; !has_job(); ++polls) {
    if (polls < kPolls) {
      pause();
    } else if (std::chrono::steady_clock::now() < deadline) {
      sched_yield();
    } else {
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, has_job);
      sleepers_.fetch_sub(1);
    }
  }
  return !is_stopping_.load();
}

void ThreadPool::work(int own) {
  uint64_t seen = 0;
  while (wait_for_job(seen)) {
    seen = end_.load();
    help(own, seen);
  }
}

std::shared_ptr<ThreadPool> shared_pool(int num_threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<ThreadPool>> pools;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<ThreadPool> pool = pools[num_threads].lock();
  if (!pool) {
    pool = std::make_shared<ThreadPool>(num_threads);
    pools[num_threads] = pool;
  }
  return pool;
}

}  // namespace octavo
