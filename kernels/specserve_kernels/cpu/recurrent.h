// States of recurrent ops, and the rows of one head in a step.
#pragma once

#include <algorithm>
#include <vector>

#include "op.h"
#include "vec.h"

constexpr int64_t MAX_TAPS = 8;   // as in arguments.py
constexpr int64_t MAX_DIM = 256;  // of a head, as in arguments.py
constexpr int64_t CHANNELS = 64;  // that a thread convolves at once

enum StateKind : int64_t { CONV, DELTA, MAMBA };  // as in arguments.py

// One op's state. The ctypes struct in native.py has the same order.
struct State {
  char* memory;
  int64_t block_bytes;
  const int64_t* places;  // [num_pieces, 2]  index among the state's blocks, first byte
  int64_t num_pieces;
  char* kept;  // [places, kept_width]
  int64_t kept_width, kind, is_bf16, height, width, num_groups;

  char* piece(int64_t number, const int32_t* blocks) const {
    const int64_t* at = places + 2 * number;
    return memory + blocks[at[0]] * block_bytes + at[1];
  }
};

// One request's rows of a step, and the blocks of its state.
struct OwnRows {
  int64_t first, end, committed, kept, snapshot_at;
  bool is_new;
  const int32_t *blocks, *snapshot;  // null: no state is read or written
  const uint64_t* mask;

  OwnRows(const Rows& rows, int64_t b)
      : first(rows.qo_indptr[b]), end(rows.qo_indptr[b + 1]), committed(end - first), kept(0),
        snapshot_at(0), is_new(true), blocks(nullptr), snapshot(nullptr), mask(rows.mask + first) {
    if (!rows.state_blocks) return;
    committed = rows.committed[b], kept = rows.kept[b], snapshot_at = rows.snapshot_at[b];
    is_new = rows.positions[first] == 0;
    blocks = rows.state_blocks + b * rows.num_state_blocks;
    snapshot = rows.snapshots + b * rows.num_state_blocks;
  }
  int64_t size() const { return end - first; }
  // The row before row i; -1: the committed state.
  int64_t parent(int64_t i) const {
    if (!mask[i]) return i - 1;
    uint64_t before = mask[i] & ((uint64_t(1) << i) - 1);
    return before ? 63 - __builtin_clzll(before) : -1;
  }
};

constexpr int AT_ONCE = 4;  // vectors of columns

// Runs the rows of one head with a matrix of `size` floats. `Head::row` updates it by one row.
template <class Head> struct HeadRows {
  Head& head;
  const OwnRows& own;
  int64_t size;

  // Run the draft tokens below row i, depth first. S is the state after row i; it is overwritten.
  // `stack` has a place for each level below.
  void below(int64_t i, float* S, float* stack) {
    int64_t last = -1;
    for (int64_t j = own.committed; j < own.size(); j++)
      if (own.parent(j) == i) last = j;
    for (int64_t j = own.committed; j <= last; j++) {
      if (own.parent(j) != i) continue;
      if (j < last) memcpy(stack, S, size * 4);
      float* next = j < last ? stack : S;
      head.row(j, next);
      below(j, next, stack + size);
    }
  }
};

template <class Head>
static void run_head(Head& head, const State& s, const OwnRows& own, int64_t h) {
  static thread_local std::vector<float> memory;
  int64_t size = s.height * s.width, num_drafts = own.size() - own.committed;
  // Each level of a tree has its own place, and so has a state that is not stored.
  memory.resize((num_drafts + 2) * size);
  float* S = own.blocks ? (float*)s.piece(h, own.blocks) : memory.data();
  if (own.is_new) memset(S, 0, size * 4);
  for (int64_t i = 0; i < own.committed; i++) {
    head.row(i, S);
    if (i + 1 == own.snapshot_at) memcpy(s.piece(h, own.snapshot), S, size * 4);
  }
  if (num_drafts == 0) return;
  memcpy(memory.data() + size, S, size * 4);
  HeadRows<Head> drafts{head, own, size};
  drafts.below(own.committed - 1, memory.data() + size, memory.data() + 2 * size);
}

void replay_mamba(const State& s, int64_t h, const int32_t* blocks, const int32_t* places,
                  int64_t n, int64_t snapshot_at, const int32_t* snapshot);
