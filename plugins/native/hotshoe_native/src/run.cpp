// Runs ops on torch's OpenMP threads: the only place that knows about threads.
//
// A second runtime in the process would spin against torch's, so this library is linked with the one that torch has loaded and
// enters it through GOMP_parallel, which every Linux OpenMP runtime exports; no compiler support for OpenMP is needed.
#include "op.h"

#include <atomic>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

extern "C" void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

namespace hs {

// Waits by spinning, then by giving the core away: with more threads than free cores the others need it to arrive.
class Barrier {
 public:
  void wait(int64_t num_threads) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpinsBeforeYield) {
        relax();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpinsBeforeYield = 500;  // about 10 us; a yield costs little where nobody else wants the core

  static void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  alignas(64) std::atomic<int64_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

void Team::barrier() const {
  if (num_threads > 1) meeting->wait(num_threads);
}

namespace {

struct Job {
  const Op* ops;
  int64_t count;
  Barrier meeting;
};

void work(void* data) {
  Job& job = *static_cast<Job*>(data);
  // the runtime may grant fewer threads than asked for
  const Team team{omp_get_thread_num(), omp_get_num_threads(), &job.meeting};
  for (int64_t i = 0; i < job.count; ++i) {
    if (i > 0) team.barrier();
    job.ops[i].run(job.ops[i].args, team);
  }
}

}  // namespace

void run(const Op* ops, int64_t count, int64_t num_threads) {
  if (num_threads == 1) {
    for (int64_t i = 0; i < count; ++i) ops[i].run(ops[i].args, Team{0, 1, nullptr});
    return;
  }
  Job job{ops, count, {}};
  GOMP_parallel(work, &job, unsigned(num_threads), 0);
}

}  // namespace hs

HS_EXPORT void hs_run(const hs::Op* ops, int64_t count, int64_t num_threads) { hs::run(ops, count, num_threads); }
