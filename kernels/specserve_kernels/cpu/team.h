// Threads that run a list of ops together. They meet at barriers and sleep between lists.
#pragma once

#include <atomic>
#include <cstdint>

// State shared by the threads of a team. Frequently written fields have separate cache lines.
struct Meeting {
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};  // number of completed barriers
  std::atomic<uint32_t> num_asleep{0};
  alignas(64) std::atomic<int64_t> taken{0};

  void wait_for_others(uint32_t phase);
  void wake_all();
};

struct Range {
  int64_t begin, end;
};

// One thread's view of the team that runs an op.
struct Team {
  int id, size;
  Meeting& meeting;

  // A barrier: returns after all threads have called it. All earlier writes are visible afterwards.
  // One shared counter is cheap compared to an op, for up to about 32 threads.
  void wait() {
    uint32_t phase = meeting.phase.load(std::memory_order_relaxed);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) != uint32_t(size) - 1)
      return meeting.wait_for_others(phase);
    meeting.arrived.store(0, std::memory_order_relaxed);
    if (meeting.taken.load(std::memory_order_relaxed) != 0)
      meeting.taken.store(0, std::memory_order_relaxed);
    // Sequentially consistent with wait_for_others: a waiter sees the new phase or is counted in
    // num_asleep.
    meeting.phase.store(phase + 1, std::memory_order_seq_cst);
    if (meeting.num_asleep.load(std::memory_order_seq_cst) != 0) meeting.wake_all();
  }
  // Return the lowest number, from 0, that no thread has taken since the last barrier. Use it for
  // pieces that are long enough for another process to interrupt a thread. For pieces of a few
  // microseconds, use `part`, which reads contiguous memory.
  int64_t take() { return meeting.taken.fetch_add(1, std::memory_order_relaxed); }
  // Return this thread's part of [0, n). All parts have almost equal length.
  Range part(int64_t n) const { return {n * id / size, n * (id + 1) / size}; }
};

// Run work(team, data) on `size` threads, including the caller's; return after all have returned.
// Only one team of several threads runs at a time; other callers wait. A team of one thread never
// waits and blocks no team, so loading a model does not delay steps.
void run_team(int size, void (*work)(Team& team, void* data), void* data);
