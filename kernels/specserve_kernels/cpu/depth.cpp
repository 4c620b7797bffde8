// Chooses the nodes of a step's trees that a draft model runs, level by level.
// specserve/speculation/draft_depth.py explains it; tests/speculation/oracle_depth.py has the same in
// Python.
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "costs.h"

namespace {

using Values = std::vector<double>;

class DepthPolicy {
 public:
  DepthPolicy(const Costs& costs, const Step& step, const double* first, int64_t n)
      : times(costs, step, false),
        plain(costs, without_prompts(step), false),
        has_both(step.prompt_rows && step.num_roots),
        none(times.of(0)),
        roots(plain.of(0)),
        allowed((step.prompt_rows ? roots : none) <= step.allowed ? step.allowed : HUGE_VAL),
        root_tokens(double(step.num_roots) / step.kept),
        values(first, first + n) {
    std::sort(values.begin(), values.end());
    const int64_t *edges = costs.edges, *end = edges + costs.num_edges;
    for (auto at = std::upper_bound(edges, end, step.rows); at != end; at++)
      sizes.push_back(*at - step.rows);
    if (step.prompt_rows) note_worth();
    look();
  }

  // Return how many nodes to run, best first; `seconds` is by number of nodes, from 1 on.
  int64_t size(const Values& reach, double hold, int64_t depth, const double* seconds) {
    double best = 0, net = 0;
    int64_t found = 0;
    for (int64_t n = 0; n < int64_t(reach.size()) && reach[n] > least; n++) {
      net += reach[n] - least;
      double won = net - rate * seconds[n];
      if (won > best) best = won, found = n + 1;
    }
    Values chosen(reach.begin(), reach.begin() + found);
    return found && pays(chosen, hold, depth, 0, seconds[found - 1]) ? found : 0;
  }

  // Return whether some number of levels raises the rate. Each takes `level` seconds, after `once`
  // seconds. The first level may pay only with later ones, for example in a wide row bucket.
  bool pays(Values reach, double hold, int64_t depth, double once, double level) {
    // Upper bound: the gain of all levels in the time of one. Usually it is too low already.
    double gain = std::accumulate(reach.begin(), reach.end(), 0.0);
    double most = root_tokens + sum + worth + gain / (1 - hold);
    if (most <= rate * (spent + once + level + none)) return false;
    Values more;
    double taken = once;
    for (; depth > 0; depth--) {
      more.insert(more.end(), reach.begin(), reach.end());
      taken += level;
      if (is_better(more, taken)) return true;
      for (double& value : reach) value *= hold;
    }
    return false;
  }

  // Note a level's run time, the values of its nodes' children, and those of children that existed.
  void add(const double* added, int64_t n, const double* before, int64_t num_before, double seconds) {
    for (int64_t i = 0; i < num_before; i++) {
      auto at = std::lower_bound(values.begin(), values.end(), before[i]);
      if (at != values.end() && *at == before[i]) values.erase(at);
    }
    values.insert(values.end(), added, added + n);
    std::sort(values.begin(), values.end());
    spent += seconds;
    look();
  }

  double least = 0;  // least value of a draft token that improves the plan

 private:
  // Compute the times up to the right edge for `num` draft tokens; return its index.
  size_t place(int64_t num) {
    size_t at = size_t(std::lower_bound(sizes.begin(), sizes.end() - 1, num) - sizes.begin());
    while (takes.size() <= at) {
      int64_t size = sizes[takes.size()];
      double seconds = times.of(size);
      if (has_both && size) seconds = std::max(seconds, none + plain.of(size) - roots);
      takes.push_back(seconds);
    }
    return at;
  }

  // Call use(tokens, seconds) with the expected tokens and the target's seconds of the most likely
  // draft tokens up to each right edge, and of all. `sorted` rises.
  void each_size(const Values& sorted, const std::function<void(double, double)>& use) {
    size_t last = place(int64_t(sorted.size())), k = 0;
    double tokens = root_tokens + worth;
    auto value = sorted.rbegin();
    for (size_t at = 0; at < last; at++) {
      for (; k < size_t(sizes[at]); k++) tokens += *value++;
      use(tokens, takes[at]);
    }
    for (; k < sorted.size(); k++) tokens += *value++;
    use(tokens, takes[last]);
  }

  // Set the value of the prompts' rows in tokens: as many as streams would get in the same time.
  void note_worth() {
    double prompts = none - roots, most = 0;
    each_size(values, [&](double tokens, double seconds) {
      if (seconds > prompts) most = std::max(most, tokens / (seconds - prompts));
    });
    worth = prompts * most;
  }

  // Find the best plan of the existing candidates.
  void look() {
    int64_t index = 0, found = 0, count = int64_t(values.size());
    rate = -1;
    each_size(values, [&](double tokens, double seconds) {
      if (double own = tokens / (spent + seconds); own > rate)
        rate = own, expected = tokens, found = index;
      index++;
    });
    sum = std::accumulate(values.begin(), values.end(), 0.0);
    best = found < index - 1 ? sizes[found] : count;
    least = best < count ? values[count - best - 1] : 0;
  }

  // Return whether further candidates raise the rate in a step within the allowed time. Usually the
  // best plan with them proves it, or the target's time without draft tokens disproves it.
  bool is_better(const Values& more, double seconds) {
    double taken = spent + seconds, gain = std::accumulate(more.begin(), more.end(), 0.0);
    if (taken + none > allowed) return false;
    size_t at = place(best + int64_t(more.size()));
    if (expected + gain > rate * (taken + takes[at])) return true;
    if (root_tokens + sum + gain + worth <= rate * (taken + none)) return false;
    Values all = values;
    all.insert(all.end(), more.begin(), more.end());
    std::sort(all.begin(), all.end());
    bool is_any = false;
    each_size(all, [&](double tokens, double of) { is_any |= tokens > rate * (taken + of); });
    return is_any;
  }

  const StepTimes times, plain;
  const bool has_both;
  const double none, roots, allowed, root_tokens;
  Values values;  // of the existing candidates; they rise
  std::vector<int64_t> sizes{0};  // draft tokens up to right edges of row buckets
  Values takes;  // seconds of the target by size, as far as they are computed
  double spent = 0, worth = 0;
  // Of the best plan of the existing candidates:
  double rate = 0, expected = 0, sum = 0;
  int64_t best = 0;
};

}  // namespace

extern "C" DepthPolicy* specserve_depth_policy(const Costs* costs, const Step* step,
                                               const double* values, int64_t n) {
  return new DepthPolicy(*costs, *step, values, n);
}

extern "C" void specserve_free_depth_policy(DepthPolicy* policy) { delete policy; }

extern "C" double specserve_least_value(const DepthPolicy* policy) { return policy->least; }

extern "C" int64_t specserve_level_size(DepthPolicy* policy, const double* reach, int64_t n,
                                        double hold, int64_t depth, const double* seconds) {
  return policy->size(Values(reach, reach + n), hold, depth, seconds);
}

extern "C" int64_t specserve_levels_pay(DepthPolicy* policy, const double* reach, int64_t n,
                                        double hold, int64_t depth, double once, double level) {
  return policy->pays(Values(reach, reach + n), hold, depth, once, level);
}

extern "C" void specserve_add_level(DepthPolicy* policy, const double* values, int64_t n,
                                    const double* before, int64_t num_before, double seconds) {
  policy->add(values, n, before, num_before, seconds);
}
