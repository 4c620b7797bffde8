// Teams on a system that allows three threads: this program's pthread_create refuses a third one.
#include "team.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <cstdio>

typedef void* Start(void*);
typedef int Create(pthread_t*, const pthread_attr_t*, Start*, void*);

static int left = 2;

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, Start* start,
                              void* data) {
  static Create* const create = (Create*)dlsym(RTLD_NEXT, "pthread_create");
  if (left == 0) return EAGAIN;
  left--;
  return create(thread, attributes, start, data);
}

struct Taken {
  std::atomic<int> items{0}, size{0};
};

static void work(Team& team, void* data) {
  Taken& taken = *(Taken*)data;
  while (team.take() < 100) taken.items++;
  team.wait();
  taken.size = team.size;
}

int main() {
  for (int size : {2, 8, 8, 1}) {
    Taken taken;
    run_team(size, work, &taken);
    printf("%d of %d: %d\n", taken.size.load(), size, taken.items.load());
  }
}
