// Teams that meet at many barriers: what a thread wrote before one is seen by all after it.
#include "team.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

struct Check {
  int rounds;
  std::vector<int64_t> written, taken;  // of each thread
  std::atomic<int64_t> wrong{0};
};

// Now and then a thread comes so late that the others sleep, or just as they fall asleep.
static void dawdle(int id, int round) {
  unsigned random = unsigned(id * 7919 + round) * 2654435761u >> 16;
  if (random % 64 == 0) usleep(random % 200);
}

static void work(Team& team, void* data) {
  Check& check = *(Check*)data;
  for (int round = 1; round <= check.rounds; round++) {
    dawdle(team.id, round);
    check.written[team.id] = round;
    while (team.take() < 10) check.taken[team.id]++;
    team.wait();
    int64_t sum = 0;
    for (int id = 0; id < team.size; id++) {
      if (check.written[id] != round) check.wrong++;
      sum += check.taken[id];
    }
    if (sum != 10 * round) check.wrong++;
    team.wait();
  }
}

static int64_t run(int size, int rounds) {
  Check check{rounds, std::vector<int64_t>(size), std::vector<int64_t>(size)};
  run_team(size, work, &check);
  return check.wrong;
}

struct Held {
  std::atomic<bool> has_begun{false}, is_over{false};
  std::atomic<int64_t> waited{0};  // milliseconds, for the others to end
};

// A caller alone is at work while a team of two begins and ends.
static int64_t run_beside_one() {
  Held held;
  std::thread alone([&held] {
    run_team(1, [](Team&, void* data) {
      Held& held = *(Held*)data;
      held.has_begun = true;
      for (; !held.is_over && held.waited < 5000; held.waited++) usleep(1000);
    }, &held);
  });
  while (!held.has_begun) usleep(100);
  int64_t wrong = run(2, 10);
  held.is_over = true;
  alone.join();
  return wrong + (held.waited == 5000);
}

int main() {
  int64_t wrong = run_beside_one();
  for (int size : {1, 2, 3, 8, 2, 17, 1, 2}) wrong += run(size, 300);
  for (int list = 0; list < 300; list++) {  // so short that some threads come when it is over
    if (list % 50 == 0) usleep(3000);       // and the others have fallen asleep
    wrong += run(1 + list % 5, 1);
  }
  std::atomic<int64_t> of_callers{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; i++) callers.emplace_back([&] { of_callers += run(3, 200); });
  for (std::thread& caller : callers) caller.join();
  printf("%ld wrong\n", long(wrong + of_callers));
}
