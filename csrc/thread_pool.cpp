#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>

namespace octavo {
namespace {

// Polls before the first yield, some 2 us. Where threads outnumber the free cores a waiting worker must give its core
// to the one it waits for: with 20 us (2000 polls) a contended decode step took 48 ms, with this 10 ms.
constexpr int kSpins = 50;
constexpr auto kPatience = std::chrono::microseconds(500);  // of polling and yielding before sleep

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Polls until is_done() or, where `deadline` is set, until it has passed; false if it has.
template <class Done>
bool spin(const Done& is_done, const std::chrono::steady_clock::time_point* deadline) {
  for (int i = 0; i < kSpins; ++i) {
    if (is_done()) return true;
    pause();
  }
  while (!is_done()) {
    if (deadline && std::chrono::steady_clock::now() > *deadline) return false;
    sched_yield();
  }
  return true;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads), pid_(getpid()) {
  for (int id = 1; id < num_threads_; ++id) threads_.emplace_back([this, id] { work(id); });
}

ThreadPool::~ThreadPool() {
  if (getpid() != pid_) {
    for (std::thread& thread : threads_) thread.detach();
    return;
  }
  is_stopping_.store(true);
  epoch_.fetch_add(1);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(const std::function<void(Worker)>& job) {
  std::lock_guard<std::mutex> caller(callers_);
  job_ = &job;
  epoch_.fetch_add(1);  // sequentially consistent with the sleepers' check under the lock
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  job({0, num_threads_});
  barrier();
}

void ThreadPool::barrier() {
  if (num_threads_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  spin([&] { return phase_.load(std::memory_order_acquire) != phase; }, nullptr);
}

// True once epoch_ differs from `seen`, false when the pool ends.
bool ThreadPool::wait_for_job(uint32_t seen) {
  const auto has_job = [&] { return epoch_.load() != seen; };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  if (!spin(has_job, &deadline)) {
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, has_job);
    sleepers_.fetch_sub(1);
  }
  return !is_stopping_.load();
}

void ThreadPool::work(int id) {
  uint32_t seen = 0;
  while (wait_for_job(seen)) {
    ++seen;
    (*job_)({id, num_threads_});
    barrier();
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
