// What the attention of all layers of a step shares: what each row sees, and the list of work.
#pragma once

#include <vector>

#include "op.h"

constexpr int TILE = 32;       // positions: the unit of what is skipped, and of a matrix product
constexpr int PART = 256;      // positions of one step of the softmax: where a context may be cut
constexpr int MAX_ITEM = 128;  // query vectors of a work item, in all its heads
constexpr int MAX_FEW = 8;     // query vectors of one head that take less time than reading tokens
constexpr int FEW = 16;        // whose sums stay in L1 while tiles of several heads are read

// What a row sees: the positions [low, length). Position p has slot p below `prefix`, and from there
// slot path[p - prefix] of the plan's paths.
struct View {
  int prefix, length, low, path;
};

// Query vectors (row, query head) of one request that share a KV head, as rows of a matrix, and the
// parts of the context that they are multiplied with; of one KV head, or of several that are done
// together, as reading all heads of a token is faster than one.
struct Item {
  int request, first, count;        // query vectors [first, first + count) of the request
  int first_head, num_heads;        // KV heads
  int first_part, end_part;
  int begin, end;                   // positions that have one slot for all rows, and are visible
  int tail;                         // of a tree: the slots [end, tail) are on the rows' paths
  int64_t cost;
  int64_t partial;                  // where its parts' results are kept until all are there, or -1
};

// Query vectors whose parts are several items: their results are merged when all are there.
struct Cut {
  int request, first, count, first_part, num_parts;
  int64_t partial;
};

// The list for one window.
struct Work {
  int64_t window;
  std::vector<View> views;     // of rows
  std::vector<int> paths;      // slots
  std::vector<Item> whole;     // before they are divided: for all heads and parts
  std::vector<Item> items;     // costliest first
  std::vector<Cut> cuts;
  int64_t num_partials;        // for each KV head

  void build(const Rows& rows, int group, int num_kv_heads, int threads);

 private:
  void view_rows(const Rows& rows);
  void add_request(const Rows& rows, int request, int group, int size);
  void divide(const Item& item, int num_heads, int64_t most);
};

// The result of one query vector and part: its sum of values, the largest score and the sum of weights.
static inline int64_t partial_size(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }

// Kept from step to step, so that steps of sizes seen before allocate nothing.
struct AttentionPlan {
  std::vector<Work> works;  // by window
  std::vector<float> partials;

  const Work& with_window(int64_t window) const;
};
