// Running a list of ops one after the other. An eager op is a list of one.
#include "op.h"

struct List {
  const Op* ops;
  int64_t num_ops;
  const Step* step;
};

static void run_list(Team& team, void* data) {
  const List& list = *(const List*)data;
  bool is_first = true;
  for (int64_t i = 0; i < list.num_ops; i++) {
    const Op& op = list.ops[i];
    if (list.step->num_rows[op.domain] == 0) continue;
    if (!is_first) team.wait();
    is_first = false;
    op.run(op.args, *list.step, team);
  }
}

extern "C" void specserve_run(const Op* ops, int64_t num_ops, const Step* step, int threads) {
  List list{ops, num_ops, step};
  run_team(threads, run_list, &list);
}
