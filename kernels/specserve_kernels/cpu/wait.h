// How a thread waits for a word to change: it spins first, and then sleeps.
#pragma once

#include <atomic>
#include <cstdint>

// A waiting thread spins first, because a sleep and wake-up takes 7 us, or 50 us in some virtual
// machines. If another process is busy, the awaited thread may have no CPU, and can use the CPU of
// a sleeping thread. After a few useless spins, a thread therefore sleeps at once, and only
// occasionally spins again. It never yields: the other process would get a whole time slice.

constexpr int SPINS = 1000;       // pauses: 20 to 50 us
constexpr int FEW_SPINS = 50;     // pauses while spinning is useless
constexpr int PATIENCE = 3;       // consecutive sleeps that end spinning
constexpr int TRY_AGAIN = 128;    // waits between spinning attempts

static inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("isb" ::: "memory");  // `yield` takes only one cycle
#endif
}

static inline bool spin_while(const std::atomic<uint32_t>& word, uint32_t value, int spins) {
  for (int i = 0; i < spins; i++) {
    if (word.load(std::memory_order_acquire) != value) return true;
    pause_briefly();
  }
  return false;
}

struct Patience {
  int in_vain = 0;  // consecutive useless spins

  // Return whether the word changed while this thread was spinning; else it should sleep.
  bool spin_while(const std::atomic<uint32_t>& word, uint32_t value) {
    if (::spin_while(word, value, FEW_SPINS)) return true;
    bool is_worth_it = in_vain < PATIENCE || in_vain % TRY_AGAIN == 0;
    if (is_worth_it && ::spin_while(word, value, SPINS)) {
      in_vain = 0;
      return true;
    }
    in_vain++;
    return false;
  }
};
