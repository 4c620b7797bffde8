// The threads of a process: created when a team first needs them, asleep while there is no work.
#include "team.h"

#include <pthread.h>

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

struct Job {
  void (*work)(Team&, void*);
  void* data;
  int size;
  Meeting* meeting;
};

struct Worker {
  alignas(64) std::atomic<uint32_t> called{0};  // counts the jobs that this thread was called for
  Job job;

  void run(int id) {
    for (uint32_t done = 0;; done++) {
      for (int i = 0; i < SPINS && called.load(std::memory_order_acquire) == done; i++)
        pause_briefly();
      called.wait(done, std::memory_order_acquire);
      Team team{id, job.size, *job.meeting};
      job.work(team, job.data);
      team.wait();
    }
  }
  void call(const Job& next) {
    job = next;
    called.fetch_add(1, std::memory_order_release);
    called.notify_one();
  }
};

struct Pool {
  std::mutex mutex;
  std::vector<std::unique_ptr<Worker>> workers;  // threads 1, 2, ... of every team
  Meeting meeting;

  void run(int size, void (*work)(Team&, void*), void* data) {
    std::lock_guard lock(mutex);
    while (int(workers.size()) < size - 1) start();
    for (int id = 1; id < size; id++) workers[id - 1]->call({work, data, size, &meeting});
    Team team{0, size, meeting};
    work(team, data);
    team.wait();
  }
  void start() {
    Worker* worker = workers.emplace_back(std::make_unique<Worker>()).get();
    std::thread(&Worker::run, worker, int(workers.size())).detach();
  }
};

// Never freed: threads may still wait for it when the process exits. A child process that was
// forked has none of its parent's threads, so it starts with a new pool.
static Pool* pool = new Pool;
static const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

void run_team(int size, void (*work)(Team&, void*), void* data) { pool->run(size, work, data); }
