// The threads that run a list of ops together: they meet at barriers, and sleep between lists.
#pragma once

#include <atomic>
#include <cstdint>

// What the threads of a team share. What different threads write often has a cache line of its own.
struct Meeting {
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};  // counts the barriers that all threads have reached
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

  // A barrier: returns when all threads have called it. What they wrote before is visible after.
  // One counter for all: up to some 32 threads that is cheap beside an op.
  void wait() {
    uint32_t phase = meeting.phase.load(std::memory_order_relaxed);
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) != uint32_t(size) - 1)
      return meeting.wait_for_others(phase);
    meeting.arrived.store(0, std::memory_order_relaxed);
    if (meeting.taken.load(std::memory_order_relaxed) != 0)
      meeting.taken.store(0, std::memory_order_relaxed);
    // In one order for all threads with wait_for_others: it has seen the new phase, or is counted.
    meeting.phase.store(phase + 1, std::memory_order_seq_cst);
    if (meeting.num_asleep.load(std::memory_order_seq_cst) != 0) meeting.wake_all();
  }
  // The lowest number, from 0, that no thread has taken since the last barrier: for pieces of work
  // that are long enough for another process to interrupt a thread. A piece of a few microseconds
  // is better a part: its memory is read in one go.
  int64_t take() { return meeting.taken.fetch_add(1, std::memory_order_relaxed); }
  // This thread's part of [0, n): all parts are of almost equal length.
  Range part(int64_t n) const { return {n * id / size, n * (id + 1) / size}; }
};

// Run work(team, data) on `size` threads, the caller's among them; returns when all have returned.
// One team of several runs at a time: another caller waits. A caller alone neither waits nor is waited
// for, so a model that is loaded beside steps does not hold them up.
void run_team(int size, void (*work)(Team& team, void* data), void* data);
