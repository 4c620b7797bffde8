// An op is a function that all threads of a team call, and its arguments.
#pragma once

#include "rows.h"
#include "team.h"

// What varies from step to step. Buffers have rows of a domain: those of the step, those of them
// whose logits are read, or those that have an adapter.
enum Domain : int64_t { STEP, READ, ADAPTED, DOMAINS };

struct AttentionPlan;

struct Step {
  int64_t num_rows[DOMAINS];
  const int64_t* token_ids;  // [STEP]
  const int64_t* read;       // [READ]  rows of the step
  const Rows* rows;
  AttentionPlan* attention;  // of these rows, once specserve_plan_attention has run
};

// Returns in each thread when that thread has done its share: the caller puts a barrier behind it.
typedef void (*OpFunction)(const void* args, const Step& step, Team& team);

struct Op {
  OpFunction run;
  const void* args;
  int64_t domain;  // the op is skipped where this domain has no rows
};
