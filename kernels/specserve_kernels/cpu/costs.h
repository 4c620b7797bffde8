// Estimated seconds of a step. costs.cpp learns them.
#pragma once
#include <algorithm>
#include <cstdint>

namespace {

// Columns of `StepCosts`.
struct Costs {
  const double *by_rows, *least_by_rows;  // seconds by number of rows
  const int64_t* edges;  // right edges of row buckets
  const int8_t* known;  // by edge: such steps were measured
  const int64_t* few;  // sizes that steps of at least `fine` rows compare besides the edges
  int64_t last_row, num_edges, num_few, fine;
  double per_token, per_row, per_request, slowdown;
  const double* by_edge;  // seconds of an edge's rows
  int64_t num_steps, has_steps;  // measured steps
};

// A step before its draft tokens are chosen.
struct Step {
  int64_t rows, num_roots, prompt_rows;
  double context, requests, attended, root_context, spent, allowed, kept;
};

// The part of a step's time that depends on the number of its rows.
class StepTimes {
 public:
  StepTimes(const Costs& costs, const Step& step, bool is_hopeful)
      : costs(costs), step(step), by_rows(is_hopeful ? costs.least_by_rows : costs.by_rows) {
    added = costs.per_token * step.context + costs.per_row * step.attended +
            costs.per_request * step.requests;
    per_draft = costs.per_row * step.root_context / double(std::max<int64_t>(step.num_roots, 1));
  }

  double of(int64_t drafts) const {
    if (step.rows == 0) return drafts ? of_rows(drafts) * costs.slowdown : 0;
    return (of_rows(step.rows + drafts) + added + double(drafts) * per_draft) * costs.slowdown;
  }

 private:
  double of_rows(int64_t rows) const { return by_rows[std::min(rows, costs.last_row)]; }

  const Costs& costs;
  const Step step;
  const double* by_rows;
  double added, per_draft;
};

inline Step without_prompts(Step step) {
  if (step.prompt_rows == 0) return step;
  step.rows -= step.prompt_rows;
  step.prompt_rows = 0;
  step.context = step.attended = step.root_context;
  step.requests = double(step.rows);
  return step;
}

}  // namespace
