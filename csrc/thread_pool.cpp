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
      strands_(new Strand[static_cast<size_t>(num_threads)]) {
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

void ThreadPool::run(const Job& job) {
  std::lock_guard<std::mutex> caller(callers_);
  job_ = &job;
  first_segment_ = task_of(task_.load()).end;
  const Task task{first_segment_ + static_cast<uint64_t>(job.num_segments), job.num_strands};
  for (int i = 0; i < job.num_strands; ++i) {
    strands_[static_cast<size_t>(i)].num_left.store(threads_of_strand(task) * kPieces, std::memory_order_relaxed);
    strands_[static_cast<size_t>(i)].segment.store(first_segment_, std::memory_order_relaxed);
  }
  task_.store(task.end << 16 | static_cast<uint64_t>(task.num_strands));
  wake_sleepers();
  help(task, 0);
}

void ThreadPool::run(const std::function<void(Worker)>& part) {
  run({1, 1, [&](int, int, Worker w) { part(w); }, {}});
}

// Takes one of the owner's parts of the segment that its strand is at, if there is one left. The job lives until the part
// has been counted as ended.
bool ThreadPool::claim(Task task, int owner, bool is_own, Part* part) {
  const int strand = owner / threads_of_strand(task);
  const uint64_t segment = strands_[static_cast<size_t>(strand)].segment.load(std::memory_order_acquire);
  if (segment >= task.end) return false;
  std::atomic<uint64_t>& claim = claims_[static_cast<size_t>(owner)].word;
  uint64_t seen = claim.load(std::memory_order_acquire), piece, next;
  do {
    const bool is_new = seen >> 16 < segment;
    uint64_t front = is_new ? 0 : seen >> 8 & 255, back = is_new ? kPieces : seen & 255;
    if (seen >> 16 > segment || front == back) return false;
    piece = is_own ? front++ : --back;
    next = segment << 16 | front << 8 | back;
  } while (!claim.compare_exchange_weak(seen, next, std::memory_order_acq_rel, std::memory_order_acquire));
  *part = {strand, static_cast<int>(segment - first_segment_),
           {owner % threads_of_strand(task) * kPieces + static_cast<int>(piece), threads_of_strand(task) * kPieces}};
  return true;
}

// Does one of the owner's parts, or all that are left of its own, which are counted together: the count is everybody's.
bool ThreadPool::take(Task task, int owner, bool is_own) {
  int count = 0;
  Part part;
  while (claim(task, owner, is_own, &part)) {
    job_->run(part.strand, part.segment, part.worker);
    ++count;
    if (!is_own) break;
  }
  if (count == 0) return false;
  std::atomic<int>& num_left = strands_[static_cast<size_t>(part.strand)].num_left;
  if (num_left.fetch_sub(count, std::memory_order_acq_rel) == count) end_segment(task, part.strand);
  return true;
}

// What the thread does that has ended the last part of the segment that a strand is at.
void ThreadPool::end_segment(Task task, int strand) {
  Strand& mine = strands_[static_cast<size_t>(strand)];
  mine.num_left.store(threads_of_strand(task) * kPieces, std::memory_order_relaxed);
  const uint64_t next = mine.segment.load(std::memory_order_relaxed) + 1;
  const bool is_joint = task.num_strands > 1 && next < task.end && job_->is_joint &&
                        job_->is_joint(static_cast<int>(next - first_segment_));
  if (!is_joint) {
    mine.segment.store(next);
  } else if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == task.num_strands) {
    num_waiting_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < task.num_strands; ++i) strands_[static_cast<size_t>(i)].segment.store(next);
  } else {
    return;
  }
  wake_sleepers();
}

bool ThreadPool::take_from_others(Task task, int own) {
  const int threads = threads_of_strand(task), begin = own / threads * threads;
  for (int i = 1; i < threads; ++i) {
    if (take(task, begin + (own - begin + i) % threads, false)) return true;
  }
  for (int i = threads; i < num_threads_; ++i) {
    if (take(task, (begin + i) % num_threads_, false)) return true;
  }
  return false;
}

// A number that changes whenever a strand of an unfinished task moves on.
uint64_t ThreadPool::progress(Task task) const {
  uint64_t sum = 0;
  for (int i = 0; i < task.num_strands; ++i) sum += strands_[static_cast<size_t>(i)].segment.load();
  return sum;
}

bool ThreadPool::is_over(Task task, int own) const {
  const int first = own / threads_of_strand(task);  // the own one first: it says least often that it is over
  for (int i = 0; i < task.num_strands; ++i) {
    const Strand& strand = strands_[static_cast<size_t>((first + i) % task.num_strands)];
    if (strand.segment.load(std::memory_order_acquire) < task.end) return false;
  }
  return true;
}

// Takes parts until all segments of the task are done.
void ThreadPool::help(Task task, int own) {
  int polls = 0;
  while (!is_over(task, own)) {
    if (take(task, own, true)) {
      polls = 0;
    } else if ((polls == kOwnPolls || polls >= kPolls) && take_from_others(task, own)) {
      // one at a time: its own parts of the next segment come first
    } else if (++polls < kPolls) {
      pause();
    } else if (polls < kPolls + kYields) {
      sched_yield();
    } else {
      const uint64_t before = progress(task);
      if (take(task, own, true) || take_from_others(task, own)) continue;
      sleep_until([&] { return progress(task) != before || is_over(task, own); });
      polls = 0;
    }
  }
}

// True once a task other than `seen` was given out, false when the pool ends.
bool ThreadPool::wait_for_task(uint64_t seen) {
  const auto has_task = [&] { return task_.load() != seen || is_stopping_.load(); };
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (int polls = 0; !has_task(); ++polls) {
    if (polls < kPolls) {
      pause();
    } else if (std::chrono::steady_clock::now() < deadline) {
      sched_yield();
    } else {
      sleep_until(has_task);
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
  uint64_t seen = uint64_t{1} << 16 | 1;
  while (wait_for_task(seen)) {
    seen = task_.load();
    help(task_of(seen), own);
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
