// What plans.cpp and tries.cpp share: the requests of a step, and the drafts chosen for them.
#pragma once
#include <cstdint>

#include "costs.h"

namespace {

// Limits of a request in the selection.
struct Limits {
  void* trie;
  int64_t limit, max_depth;
};

// Draft tokens of a trie in the order of their rows.
struct DraftOut {
  int32_t *tokens, *parents, *expanded, *order;
  uint64_t* sources;  // the number of the first source, and from bit 8 on a bit for each source
  DraftOut after(int64_t n) const {
    return {tokens + n, parents + n, expanded + n, order + n, sources + n};
  }
};

// Columns of a selection, of the drafts that are cut from it, and of the best sizes of it.
struct Outputs {
  double* values;
  int32_t *places, *nodes;
  int32_t* counts;   // draft tokens by request
  double* expected;  // sum of their likely values, by request
  DraftOut draft;
  double* sizes;  // see `Size`; by the known costs, and by the least possible ones
};

}  // namespace

// A draft source in C++, which plans.cpp asks without a call of Python.
class NativeSource {
 public:
  virtual ~NativeSource() = default;
  // Return the expected number of accepted draft tokens after a request's text.
  virtual double expect(int64_t id, const int32_t* tokens, int64_t size) = 0;
  // Add draft tokens to a trie, in which the source has a number. Return how many.
  virtual int64_t add(int64_t id, const int32_t* tokens, int64_t size, int64_t limit, void* trie,
                      int64_t number) = 0;
};

// In tries.cpp:
extern "C" void specserve_clear_tries(void* const* tries, int64_t n);
extern "C" int64_t specserve_child(const void* trie, int64_t node, int64_t token);
extern "C" int64_t specserve_sources(const void* trie, int64_t node, int64_t room, int32_t* out);
extern "C" void specserve_observe_each(const void* observed, int64_t n, const int32_t* tokens);
extern "C" int64_t specserve_select(const Limits* limits, const double* behind, int64_t n,
                                    int64_t most, double least, const Outputs* out);
extern "C" void specserve_cut(const Limits* limits, int64_t n, int64_t size, double likely,
                              const Outputs* out);
extern "C" int64_t specserve_weigh(const Limits* limits, const double* behind, int64_t n,
                                   int64_t most, double least, double likely, const Step* step,
                                   const Costs* costs, const Outputs* out);
// Add candidates of a source below a node; `nodes` [n + 1] gets the node of each, after `below`.
extern "C" void specserve_merge(void* trie, int64_t source, int64_t n, const int32_t* tokens,
                                const int32_t* parents, const double* p, const int32_t* expanded,
                                int64_t below, int32_t* nodes);
