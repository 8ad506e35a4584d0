// A pool of persistent threads that run one job together: segments one after another, each cut into a few parts a thread.
// The threads go through them side by side, or divided into strands, each of which goes through all segments by itself
// and waits for the others only before segments that say so.
//
// The calling thread is one of them. A thread takes its own parts of a segment in their order; one that has none left
// takes those at the other end of somebody else's, of its strand or, where there are none, of another. So a thread that
// is slower, comes late or still sleeps delays the others by no more than the part it has begun. Where threads outnumber
// the free cores, that part may stand still while another process has the core: a thread that waits yields, then sleeps,
// so that the system can move it to a free one.
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
  // Segment s of a strand, for one of its workers: count of them num_parts() / num_strands.
  struct Job {
    int num_segments, num_strands;  // strands divide the threads evenly
    std::function<void(int strand, int segment, Worker part)> run;
    std::function<bool(int segment)> is_joint;  // begins only when all strands have ended what precedes; may be empty
  };

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  int num_parts() const { return num_threads_ * kPieces; }

  // Runs every part of every segment of every strand once. Of a strand's parts [t * kPieces, (t + 1) * kPieces) are its
  // thread t's own. A segment begins when all parts of the one before have ended, and sees what they wrote, a joint one
  // what all strands wrote; returns when the last has. One caller at a time; others wait.
  void run(const Job& job);
  // The same of one segment.
  void run(const std::function<void(Worker)>& part);

 private:
  // Segments are numbered through, over all jobs, and a segment's parts have all been taken before the next begins. So a
  // thread that comes late can mistake none for another, and the claim of an earlier segment says that nothing of this
  // one has been taken.
  struct alignas(64) Claim {  // of a thread: which of its own parts are left, pieces [front, back)
    std::atomic<uint64_t> word{0};  // segment << 16 | front << 8 | back
  };
  struct alignas(64) Strand {
    std::atomic<uint64_t> segment{1};  // under way, or the next to be
    std::atomic<int> num_left{0};      // its parts that have not ended
  };
  struct Task {  // what a thread knows of a job without touching it: it may be over
    uint64_t end;
    int num_strands;
  };

  static Task task_of(uint64_t word) { return {word >> 16, static_cast<int>(word & 0xffff)}; }
  int threads_of_strand(Task task) const { return num_threads_ / task.num_strands; }
  struct Part {
    int strand, segment;
    Worker worker;
  };
  bool claim(Task task, int owner, bool is_own, Part* part);
  bool take(Task task, int owner, bool is_own);
  bool take_from_others(Task task, int own);
  void end_segment(Task task, int strand);
  uint64_t progress(Task task) const;
  bool is_over(Task task, int own) const;
  void help(Task task, int own);
  void work(int own);
  bool wait_for_task(uint64_t seen);
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
  std::unique_ptr<Claim[]> claims_;    // of each thread
  std::unique_ptr<Strand[]> strands_;  // as many as threads at most
  alignas(64) std::atomic<int> num_waiting_{0};  // strands that stand before a joint segment
  alignas(64) std::atomic<uint64_t> task_{uint64_t{1} << 16 | 1};  // the last given out: end << 16 | num_strands
  std::atomic<int> sleepers_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> threads_;
};

// The process's pool of that many threads: made on first use, ended with its last user.
std::shared_ptr<ThreadPool> shared_pool(int num_threads);

}  // namespace octavo
