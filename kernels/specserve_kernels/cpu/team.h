// The threads that run a list of ops together: they meet at barriers, and sleep between lists.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
static inline void pause_briefly() { __builtin_ia32_pause(); }
#else
static inline void pause_briefly() { asm volatile("yield"); }
#endif

// Waits of a thread before it offers its CPU to others: about as long as a step's short ops take.
// A thread that spun on would burn the time slice that the thread it waits for needs.
constexpr int SPINS = 2000;

// What the threads of a team share, each on a cache line of its own.
struct Meeting {
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<int64_t> taken{0};
};

struct Range {
  int64_t begin, end;
};

// One thread's view of the team that runs an op.
struct Team {
  int id, size;
  Meeting& meeting;

  // A barrier: returns when all threads have called it. What they wrote before is visible after.
  void wait() {
    uint32_t phase = meeting.phase.load(std::memory_order_relaxed);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      meeting.arrived.store(0, std::memory_order_relaxed);
      meeting.taken.store(0, std::memory_order_relaxed);
      meeting.phase.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int i = 0; meeting.phase.load(std::memory_order_acquire) == phase; i++) {
      if (i < SPINS)
        pause_briefly();
      else
        sched_yield();
    }
  }
  // The lowest number, from 0, that no thread has taken since the last barrier.
  int64_t take() { return meeting.taken.fetch_add(1, std::memory_order_relaxed); }
  // This thread's part of [0, n): all parts are of almost equal length.
  Range part(int64_t n) const { return {n * id / size, n * (id + 1) / size}; }
};

// Run work(team, data) on `size` threads, the caller's among them; returns when all have returned.
// One team runs at a time: another caller waits.
void run_team(int size, void (*work)(Team& team, void* data), void* data);
