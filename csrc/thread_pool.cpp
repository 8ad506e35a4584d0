#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <map>

namespace octavo {
namespace {

constexpr int kOwnPolls = 10;  // before a part that is not its own is taken: its owner may be about to
// Before the core is given up: some 2 us. Where threads outnumber the free cores a waiting thread must give its core
// to the one it waits for: with 20 us (2000 polls) a contended decode step took 48 ms, with this 10 ms.
constexpr int kPolls = 50;
constexpr int kYields = 50;  // before it sleeps
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
    : num_threads_(num_threads),
      pid_(getpid()),
      claims_(new Claim[static_cast<size_t>(num_threads)]),
      num_left_(num_threads * kPieces) {
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
  end_.store(end);
  wake_sleepers();
  help(0, end);
}

// Does one of the owner's parts of the segment that is under way, if there is one left. The job lives until it is done.
bool ThreadPool::take(int owner, bool is_own) {
  const uint64_t segment = segment_.load(std::memory_order_acquire);
  if (segment >= end_.load(std::memory_order_acquire)) return false;
  std::atomic<uint64_t>& claim = claims_[static_cast<size_t>(owner)].word;
  uint64_t seen = claim.load(std::memory_order_acquire), piece, next;
  do {
    const bool is_new = seen >> 16 < segment;
    uint64_t front = is_new ? 0 : seen >> 8 & 255, back = is_new ? kPieces : seen & 255;
    if (seen >> 16 > segment || front == back) return false;
    piece = is_own ? front++ : --back;
    next = segment << 16 | front << 8 | back;
  } while (!claim.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire));
  (*job_)(static_cast<int>(segment - first_segment_), {owner * kPieces + static_cast<int>(piece), num_parts()});
  if (num_left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    num_left_.store(num_parts(), std::memory_order_relaxed);
    segment_.store(segment + 1);
    wake_sleepers();
  }
  return true;
}

bool ThreadPool::take_from_others(int own) {
  for (int i = 1; i < num_threads_; ++i) {
    if (take((own + i) % num_threads_, false)) return true;
  }
  return false;
}

// Takes parts until all segments before `end` are done.
void ThreadPool::help(int own, uint64_t end) {
  int polls = 0;
  for (;;) {
    const uint64_t segment = segment_.load(std::memory_order_acquire);
    if (segment >= end) return;
    if (take(own, true)) {
      polls = 0;
    } else if ((polls == kOwnPolls || polls >= kPolls) && take_from_others(own)) {
      // one at a time: its own parts of the next segment come first
    } else if (++polls < kPolls) {
      pause();
    } else if (polls < kPolls + kYields) {
      sched_yield();
    } else {
      sleep_until([&] { return segment_.load() != segment; });
      polls = 0;
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
      sleep_until(has_job);
    }
  }
  return !is_stopping_.load();
}

// The condition must read what is stored before wake_sleepers(), both sequentially consistent: then either it is seen to
// be over, or the sleeper is seen.
template <class Condition>
void ThreadPool::sleep_until(const Condition& is_over) {
  std::unique_lock<std::mutex> lock(sleep_);
  sleepers_.fetch_add(1);
  wake_.wait(lock, is_over);
  sleepers_.fetch_sub(1);
}

void ThreadPool::wake_sleepers() {
  if (sleepers_.load() == 0) return;
  std::lock_guard<std::mutex> lock(sleep_);
  wake_.notify_all();
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
