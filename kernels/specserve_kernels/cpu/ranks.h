// A rank's connections with the other processes that run the same model.
#pragma once

#include <atomic>
#include <cstdint>

// In memory that the ranks of one host share.
struct SharedMeeting {
  alignas(64) std::atomic<uint32_t> arrived;
  alignas(64) std::atomic<uint32_t> phase;  // number of completed barriers
  std::atomic<uint32_t> num_asleep;
};

struct Ranks {
  int64_t rank, size;
  const int32_t* sockets;   // [size]  connection with each rank; -1: none
  SharedMeeting* meeting;   // null if the ranks do not share memory
  char* slots;              // [2, slot_bytes]
  int64_t slot_bytes;       // at least the bytes of a row
  int64_t turn;             // slot of the next exchange, 0 or 1
  int64_t has_failed;       // 1 after a rank has ended: exchanges then do nothing
  int64_t num_bytes, num_exchanges, nanoseconds;  // sent so far, and the time of all exchanges
};
