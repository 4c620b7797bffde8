// How many barriers two threads pass in a list of ops, of which some have no rows.
#include <cstdio>

#include "op.h"

extern "C" void specserve_run(const Op* ops, int64_t num_ops, const Step* step, int threads);

static void count(const void* barriers, const Step&, Team& team) {
  if (team.id == 0) *(uint32_t*)barriers = team.meeting.phase;
}

static void run(int64_t num_read, std::initializer_list<Domain> domains) {
  uint32_t barriers[8] = {};
  Op ops[8];
  int64_t num_ops = 0;
  for (Domain domain : domains) {
    ops[num_ops] = {count, &barriers[num_ops], domain};
    num_ops++;
  }
  Step step{{3, num_read}, nullptr, nullptr, nullptr, nullptr};
  specserve_run(ops, num_ops, &step, 2);
  printf("%u\n", barriers[num_ops - 1] - barriers[0]);
}

int main() {
  run(2, {STEP, READ, READ, STEP});
  run(0, {STEP, READ, READ, STEP});
  run(0, {STEP, STEP, READ, STEP});
}
