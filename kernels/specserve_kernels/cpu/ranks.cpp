// Exchanges between the processes that run one model: all-gathers, and tensors from rank to rank.
//
// Ranks of one host exchange columns through shared memory. Ranks of several hosts send them over
// sockets. Nothing is summed, so results do not depend on the number of ranks.
#include "ranks.h"

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "linear.h"
#include "wait.h"

constexpr long CHECK_EVERY = 100;  // milliseconds between two looks for ranks that have ended

static int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

// Close all connections, so that the other ranks end, too.
static void fail(Ranks& a) {
  a.has_failed = 1;
  for (int64_t r = 0; r < a.size; r++)
    if (a.sockets[r] >= 0) shutdown(a.sockets[r], SHUT_RDWR);
}

static bool has_ended(const Ranks& a) {
  for (int64_t r = 0; r < a.size; r++) {
    pollfd one{a.sockets[r], POLLRDHUP, 0};
    if (one.fd >= 0 && poll(&one, 1, 0) > 0 && one.revents) return true;
  }
  return false;
}

static void futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, &word, op, value, limit, nullptr, 0);  // not private: other processes wait
}

// A barrier of all ranks. It spins first, like the barrier of a team's threads.
static void meet(Ranks& a) {
  if (a.has_failed) return;
  SharedMeeting& m = *a.meeting;
  uint32_t phase = m.phase.load(std::memory_order_relaxed);
  if (m.arrived.fetch_add(1, std::memory_order_acq_rel) == uint32_t(a.size) - 1) {
    m.arrived.store(0, std::memory_order_relaxed);
    // Sequentially consistent with the waiters, as in Team::wait.
    m.phase.store(phase + 1, std::memory_order_seq_cst);
    if (m.num_asleep.load(std::memory_order_seq_cst) != 0)
      futex(m.phase, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
  static thread_local Patience patience;
  if (patience.spin_while(m.phase, phase)) return;
  m.num_asleep.fetch_add(1, std::memory_order_seq_cst);
  timespec limit{CHECK_EVERY / 1000, CHECK_EVERY % 1000 * 1000000};
  while (m.phase.load(std::memory_order_seq_cst) == phase && !a.has_failed) {
    futex(m.phase, FUTEX_WAIT, phase, &limit);
    if (m.phase.load(std::memory_order_seq_cst) == phase && has_ended(a)) fail(a);
  }
  m.num_asleep.fetch_sub(1, std::memory_order_relaxed);
}

struct Transfer {
  int socket;
  char* data;
  int64_t size;
  bool is_sent;

  // Transfer what is possible without waiting; false after an error.
  bool advance() {
    while (size > 0) {
      int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
      ssize_t n = is_sent ? send(socket, data, size, flags) : recv(socket, data, size, flags);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
      if (n == 0) return false;
      data += n;
      size -= n;
    }
    return true;
  }
};

// Do all transfers at once, because two ranks that only send would wait for each other.
static void run_transfers(Ranks& a, std::vector<Transfer>& transfers) {
  std::vector<pollfd> waiting;
  while (!a.has_failed) {
    waiting.clear();
    for (Transfer& t : transfers) {
      if (!t.advance()) return fail(a);
      if (t.size > 0) waiting.push_back({t.socket, short(t.is_sent ? POLLOUT : POLLIN), 0});
    }
    if (waiting.empty()) return;
    poll(waiting.data(), waiting.size(), CHECK_EVERY);
  }
}

struct AllGather {
  int64_t domain, rows_per_row;  // rows of x per row of the domain
  Ranks* ranks;
  const char* x;           // [R, own columns]
  char* out;               // [R, all columns]
  const int64_t* begins;   // [size + 1]  first byte of each rank's columns in a row, and the end
  int64_t reader;          // the only rank that needs the result; -1: all need it

  bool is_read() const { return reader < 0 || reader == ranks->rank; }
  int64_t width() const { return begins[ranks->size]; }
  int64_t width_of(int64_t rank) const { return begins[rank + 1] - begins[rank]; }
};

// Two slots alternate, so that one barrier per piece is enough: a rank that writes to a slot again
// has passed the barrier that all ranks reach after they have read it.
static void gather_in_memory(const AllGather& a, int64_t R, Team& team) {
  Ranks& ranks = *a.ranks;
  int64_t width = a.width(), own = a.width_of(ranks.rank), first = a.begins[ranks.rank];
  int64_t most = ranks.slot_bytes / width, turn = ranks.turn;
  for (int64_t done = 0; done < R; turn ^= 1) {
    char* slot = ranks.slots + turn * ranks.slot_bytes;
    int64_t rows = std::min(most, R - done);
    Range part = team.part(rows);
    for (int64_t r = part.begin; r < part.end; r++)
      memcpy(slot + r * width + first, a.x + (done + r) * own, own);
    team.wait();
    if (team.id == 0) meet(ranks);
    team.wait();
    if (a.is_read())
      memcpy(a.out + (done + part.begin) * width, slot + part.begin * width,
             (part.end - part.begin) * width);
    done += rows;
  }
  team.wait();  // all threads have read `turn`
  if (team.id == 0) ranks.turn = turn;
}

static void scatter(const AllGather& a, int64_t rank, const char* x, int64_t R) {
  int64_t own = a.width_of(rank);
  for (int64_t r = 0; r < R; r++) memcpy(a.out + r * a.width() + a.begins[rank], x + r * own, own);
}

static void gather_over_sockets(const AllGather& a, int64_t R) {
  Ranks& ranks = *a.ranks;
  static thread_local Scratch<char> scratch;
  char* received = scratch.at_least(R * a.width());
  std::vector<Transfer> transfers;
  for (int64_t r = 0; r < ranks.size; r++) {
    if (r == ranks.rank) continue;
    if (a.is_read())
      transfers.push_back({ranks.sockets[r], received + R * a.begins[r], R * a.width_of(r), false});
    if (a.reader < 0 || a.reader == r)
      transfers.push_back({ranks.sockets[r], (char*)a.x, R * a.width_of(ranks.rank), true});
  }
  run_transfers(ranks, transfers);
  if (!a.is_read() || ranks.has_failed) return;
  for (int64_t r = 0; r < ranks.size; r++)
    scatter(a, r, r == ranks.rank ? a.x : received + R * a.begins[r], R);
}

// The rows of pairs, [pairs, row_bytes]: rank r has the pairs of the experts that it holds.
struct GatherPairs {
  int64_t domain;
  Ranks* ranks;
  char* sums;              // in the order of places, so that each rank has an interval
  const int32_t* begins;   // [E + 1]  first place of each expert, and the end
  const int64_t* experts;  // [size + 1]  first expert of each rank, and the end
  int64_t row_bytes;

  int64_t num_pairs() const { return begins[experts[ranks->size]]; }
  Range pairs_of(int64_t rank) const {
    return {begins[experts[rank]], begins[experts[rank + 1]]};
  }
};

// As in gather_in_memory.
static void gather_pairs_in_memory(const GatherPairs& a, Team& team) {
  Ranks& ranks = *a.ranks;
  int64_t width = a.row_bytes, most = ranks.slot_bytes / width, turn = ranks.turn;
  Range own = a.pairs_of(ranks.rank);
  for (int64_t done = 0; done < a.num_pairs(); turn ^= 1) {
    char* slot = ranks.slots + turn * ranks.slot_bytes;
    int64_t rows = std::min(most, a.num_pairs() - done);
    Range part = team.part(rows);
    int64_t begin = std::clamp(own.begin - done, part.begin, part.end);
    int64_t end = std::clamp(own.end - done, part.begin, part.end);
    memcpy(slot + begin * width, a.sums + (done + begin) * width, (end - begin) * width);
    team.wait();
    if (team.id == 0) meet(ranks);
    team.wait();
    char* to = a.sums + done * width;
    memcpy(to + part.begin * width, slot + part.begin * width, (begin - part.begin) * width);
    memcpy(to + end * width, slot + end * width, (part.end - end) * width);
    done += rows;
  }
  team.wait();  // all threads have read `turn`
  if (team.id == 0) ranks.turn = turn;
}

static void gather_pairs_over_sockets(const GatherPairs& a) {
  Ranks& ranks = *a.ranks;
  std::vector<Transfer> transfers;
  for (int64_t r = 0; r < ranks.size; r++) {
    if (r == ranks.rank) continue;
    for (bool is_sent : {false, true}) {
      Range pairs = a.pairs_of(is_sent ? ranks.rank : r);
      int64_t size = (pairs.end - pairs.begin) * a.row_bytes;
      transfers.push_back({ranks.sockets[r], a.sums + pairs.begin * a.row_bytes, size, is_sent});
    }
  }
  run_transfers(ranks, transfers);
}

// Some columns of a tensor, which are copied from it or to it.
struct Columns {
  int64_t domain;
  const char* x;
  char* out;
  int64_t row_bytes, begin, end;  // bytes of a row of all columns, and the interval of some
};

struct Message {
  int64_t domain;
  Ranks* ranks;
  char* x;
  int64_t row_bytes, other;  // the rank at the other end
};

static void transfer(const Message& a, const Step& step, Team& team, bool is_sent) {
  if (team.id != 0) return;
  int64_t begin = now(), size = step.num_rows[a.domain] * a.row_bytes;
  std::vector<Transfer> one{{a.ranks->sockets[a.other], a.x, size, is_sent}};
  run_transfers(*a.ranks, one);
  a.ranks->nanoseconds += now() - begin;
  if (is_sent) a.ranks->num_bytes += size;
}

extern "C" {
void specserve_all_gather(const void* args, const Step& step, Team& team) {
  const AllGather& a = *(const AllGather*)args;
  int64_t R = step.num_rows[a.domain] * a.rows_per_row, begin = team.id == 0 ? now() : 0;
  if (a.ranks->meeting) gather_in_memory(a, R, team);
  else if (team.id == 0) gather_over_sockets(a, R);
  if (team.id != 0) return;
  a.ranks->nanoseconds += now() - begin;
  a.ranks->num_bytes += R * a.width_of(a.ranks->rank);
  a.ranks->num_exchanges++;
}

void specserve_gather_pairs(const void* args, const Step&, Team& team) {
  const GatherPairs& a = *(const GatherPairs*)args;
  int64_t begin = team.id == 0 ? now() : 0;
  if (a.ranks->meeting) gather_pairs_in_memory(a, team);
  else if (team.id == 0) gather_pairs_over_sockets(a);
  if (team.id != 0) return;
  Range own = a.pairs_of(a.ranks->rank);
  a.ranks->nanoseconds += now() - begin;
  a.ranks->num_bytes += (own.end - own.begin) * a.row_bytes;
  a.ranks->num_exchanges++;
}

void specserve_columns(const void* args, const Step& step, Team& team) {
  const Columns& a = *(const Columns*)args;
  Range part = team.part(step.num_rows[a.domain]);
  int64_t size = a.end - a.begin;
  for (int64_t r = part.begin; r < part.end; r++)
    memcpy(a.out + r * size, a.x + r * a.row_bytes + a.begin, size);
}

void specserve_put_columns(const void* args, const Step& step, Team& team) {
  const Columns& a = *(const Columns*)args;
  Range part = team.part(step.num_rows[a.domain]);
  int64_t size = a.end - a.begin;
  for (int64_t r = part.begin; r < part.end; r++)
    memcpy(a.out + r * a.row_bytes + a.begin, a.x + r * size, size);
}

void specserve_send(const void* args, const Step& step, Team& team) {
  transfer(*(const Message*)args, step, team, true);
}

void specserve_receive(const void* args, const Step& step, Team& team) {
  transfer(*(const Message*)args, step, team, false);
}
}
