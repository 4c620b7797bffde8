// The attention plan that all layers of a step share: each row's view, and the list of work.
#pragma once

#include <vector>

#include "op.h"

constexpr int TILE = 32;       // positions skipped or multiplied together
constexpr int PART = 256;      // positions per softmax step
constexpr int MAX_ITEM = 512;  // query vectors per work item of one KV head
constexpr int MAX_SHARED = 128;  // query vectors of all heads of an item with several
constexpr int MAX_FEW = 8;     // query vectors that few.h multiplies
constexpr int FEW = 16;        // query vectors with sums in L1

// A row's visible positions [low, length). Position p has slot p if p < `prefix`, else slot path[p
// - prefix] of the plan's paths.
struct View {
  int prefix, length, low, path;
};

// A work item: some query vectors (row, query head) of one request and one KV head, and some parts
// of the context. The vectors are the rows of a matrix. An item may have several KV heads, because
// reading adjacent heads of a token together is faster.
struct Item {
  int request, first, count;        // query vectors [first, first + count) of the request
  int first_head, num_heads;        // KV heads
  int first_part, end_part;
  int begin, end;                   // visible positions with the same slot for all rows
  int tail;                         // end of the tree slots [end, tail) on the rows' paths
  int64_t cost;
  int64_t partial;                  // index of its parts' partial results, or -1
};

// Query vectors whose parts are in several items. Their results are merged at the end.
struct Cut {
  int request, first, count, first_part, num_parts;
  int64_t partial;
};

// The first position that the last of `length` visible positions sees. A window is a number of
// positions, 0 for all, or -n for the chunks of n positions that begin at multiples of n.
static inline int first_seen(int64_t window, int length) {
  if (window < 0) return (length - 1) / -window * -window;
  return window && length > window ? length - window : 0;
}

// The work list of all layers with one window and one number of KV heads.
struct Work {
  int64_t window, num_kv_heads;
  std::vector<View> views;     // of rows
  std::vector<int> paths;      // slots
  std::vector<Item> whole;     // before division: all heads and parts
  std::vector<Item> items;     // in descending order of cost
  std::vector<Cut> cuts;
  int64_t num_partials;        // per KV head

  void build(const Rows& rows, int num_heads, int threads);

 private:
  void view_rows(const Rows& rows);
  void add_request(const Rows& rows, int request, int group, int size);
  void divide(const Item& item, int num_heads, int64_t most, int threads);
};

// Floats of a partial result of a query vector: its sum of values, maximum score and sum of
// weights.
static inline int64_t partial_size(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

// Reused in every step, so that steps of known sizes do not allocate.
struct AttentionPlan {
  std::vector<Work> works;
  std::vector<float> partials;

  const Work& of(int64_t window, int64_t num_kv_heads) const;
};
