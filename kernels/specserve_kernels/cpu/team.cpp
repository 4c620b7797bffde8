// The process's thread pool. Threads are created at first use and sleep without work.
#include "team.h"

#include <initializer_list>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "wait.h"

static void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  while (word.load(std::memory_order_seq_cst) == value)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static void wake(std::atomic<uint32_t>& word, int number) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, number, nullptr, nullptr, 0);
}

void Meeting::wait_for_others(uint32_t phase) {
  static thread_local Patience patience;
  if (patience.spin_while(this->phase, phase)) return;
  num_asleep.fetch_add(1, std::memory_order_seq_cst);
  sleep_while(this->phase, phase);
  num_asleep.fetch_sub(1, std::memory_order_relaxed);
}

void Meeting::wake_all() { wake(phase, INT_MAX); }

struct Job {
  void (*work)(Team&, void*);
  void* data;
  int size;
};

struct Pool;

struct Worker {
  alignas(64) std::atomic<uint32_t> called{0};  // number of jobs of this thread so far
  std::atomic<uint32_t> is_asleep{0};
  Job job;

  void run(Pool& pool, int id);
  void call(const Job& next) {
    job = next;
    called.fetch_add(1, std::memory_order_seq_cst);
    if (is_asleep.load(std::memory_order_seq_cst) != 0) wake(called, 1);
  }
};

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Worker>> workers;  // threads 1, 2, ... of every team
  Meeting meeting;

  void run(const Job& job) {
    std::lock_guard lock(mutex);
    Job possible = job;
    while (int(workers.size()) < job.size - 1 && start()) {}
    possible.size = std::min(job.size, int(workers.size()) + 1);
    join(possible, 0);
  }
  // Run a thread's share of a job. Each thread wakes two others, because a wake-up takes
  // microseconds.
  void join(const Job& job, int id) {
    for (int next : {2 * id + 1, 2 * id + 2})
      if (next < job.size) workers[next - 1]->call(job);
    Team team{id, job.size, meeting};
    job.work(team, job.data);
    team.wait();
  }
  // Start one more thread; false if the system refuses. Results do not depend on the number.
  bool start() {
    Worker* worker = workers.emplace_back(std::make_unique<Worker>()).get();
    try {
      std::thread(&Worker::run, worker, std::ref(*this), int(workers.size())).detach();
    } catch (const std::system_error&) {
      workers.pop_back();
      return false;
    }
    return true;
  }
};

void Worker::run(Pool& pool, int id) {
  for (uint32_t done = 0;; done++) {
    if (!spin_while(called, done, SPINS)) {
      is_asleep.store(1, std::memory_order_seq_cst);
      sleep_while(called, done);
      is_asleep.store(0, std::memory_order_relaxed);
    }
    pool.join(Job(job), id);
  }
}

static void run_alone(void (*work)(Team&, void*), void* data) {
  Meeting meeting;
  Team team{0, 1, meeting};
  work(team, data);
}

// Never freed, because threads may still wait on it at process exit. A forked child has none of its
// parent's threads, so it starts a new pool.
static Pool* pool = new Pool;
static const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

void run_team(int size, void (*work)(Team&, void*), void* data) {
  if (size == 1) return run_alone(work, data);
  pool->run({work, data, size});
}
