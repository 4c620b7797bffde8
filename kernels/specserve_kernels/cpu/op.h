// Ops: a function that all threads of a team call, and its arguments.
#pragma once

#include "rows.h"
#include "team.h"

// The rows of a buffer belong to a domain: all rows of the step, rows whose logits are read, or
// rows with an adapter.
enum Domain : int64_t { STEP, READ, ADAPTED, DOMAINS };

struct AttentionPlan;

// The inputs that vary from step to step.
struct Step {
  int64_t num_rows[DOMAINS];
  const int64_t* token_ids;  // [STEP]
  const int64_t* read;       // [READ]  rows whose logits are read
  const Rows* rows;
  AttentionPlan* attention;  // plan of these rows, valid after specserve_plan_attention
};

// Returns in each thread after that thread's share. The caller adds a barrier.
typedef void (*OpFunction)(const void* args, const Step& step, Team& team);

struct Op {
  OpFunction run;
  const void* args;
  int64_t domain;  // the op is skipped if this domain has no rows
};
