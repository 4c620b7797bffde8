// Runs ops for another process, in its own memory: on an emulated CPU, for instance.
//
// Requests come on standard input and answers go to standard output, as 64-bit numbers and bytes;
// tests/kernels/remote.py is the other side.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "op.h"

extern "C" void specserve_run(const Op* ops, int64_t num_ops, const Step* step, int threads);

static void read_bytes(void* to, size_t n) {
  if (n && fread(to, 1, n, stdin) != n) exit(0);  // the other process has ended
}
static void write_bytes(const void* from, size_t n) { fwrite(from, 1, n, stdout); }
static int64_t read_number() {
  int64_t x;
  read_bytes(&x, 8);
  return x;
}
static void write_number(int64_t x) { write_bytes(&x, 8); }
static void* read_function() {
  std::string name(read_number(), 0);
  read_bytes(&name[0], name.size());
  return dlsym(RTLD_DEFAULT, name.c_str());
}

// Bytes of the other process, copied here.
struct Blob {
  uint64_t address, size;
  bool is_struct;  // else a tensor, which is sent back
  char *room, *copy;

  void receive() {
    address = read_number();
    size = read_number();
    is_struct = read_number() != 0;
    room = (char*)malloc(size + 64);
    copy = room + (address - uint64_t(room)) % 64;  // as far behind a cache line's begin as there
    read_bytes(copy, size);
  }
};

static std::vector<Blob> receive_blobs() {
  std::vector<Blob> blobs(read_number());
  for (Blob& blob : blobs) blob.receive();
  return blobs;
}

static void* translated(const std::vector<Blob>& blobs, uint64_t address) {
  for (const Blob& blob : blobs)
    if (address >= blob.address && address < blob.address + blob.size)
      return blob.copy + (address - blob.address);
  return (void*)address;  // a number, or an address of this process
}

static void run() {
  std::vector<Blob> blobs = receive_blobs();
  for (Blob& blob : blobs)
    for (uint64_t i = 0; blob.is_struct && i + 8 <= blob.size; i += 8) {
      uint64_t word;
      memcpy(&word, blob.copy + i, 8);
      void* moved = translated(blobs, word);
      memcpy(blob.copy + i, &moved, 8);
    }
  Op* ops = (Op*)translated(blobs, read_number());
  int64_t num_ops = read_number();
  Step* step = (Step*)translated(blobs, read_number());
  specserve_run(ops, num_ops, step, int(read_number()));
  for (Blob& blob : blobs) {
    if (!blob.is_struct) write_bytes(blob.copy, blob.size);
    free(blob.room);
  }
}

static void call() {
  void* function = read_function();
  std::vector<Blob> blobs = receive_blobs();
  int64_t a[9] = {};  // the most that a function has
  int64_t n = read_number();
  for (int64_t i = 0; i < n; i++) a[i] = (int64_t)translated(blobs, read_number());
  typedef int64_t N;
  auto called = (N(*)(N, N, N, N, N, N, N, N, N))function;
  write_number(called(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8]));
  for (Blob& blob : blobs) free(blob.room);
}

static void text() {
  const char* found = ((const char* (*)())read_function())();
  write_number(strlen(found));
  write_bytes(found, strlen(found));
}

int main() {
  for (;;) {
    switch (read_number()) {
      case 0: write_number((int64_t)read_function()); break;
      case 1: call(); break;
      case 2: text(); break;
      case 3: run(); break;
    }
    fflush(stdout);
  }
}
