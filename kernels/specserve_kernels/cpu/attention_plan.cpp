// Planning a step's attention, once per step and window, before the first layer.
#include "attention_plan.h"

#include <algorithm>
#include <climits>
#include <tuple>

constexpr int MIN_ITEM = 32;
constexpr int UNITS = 4;  // minimum items per thread, to balance the load
// Cost of reading a position and changing its layout, in query vectors.
constexpr int POSITION = 12;

static int part_of(int position) { return position / PART; }

void Work::view_rows(const Rows& rows) {
  views.clear();
  paths.clear();
  for (int64_t r = 0; r < rows.num_rows; r++) {
    uint64_t mask = rows.mask[r];
    int prefix = rows.prefix[r], length = prefix + __builtin_popcountll(mask);
    views.push_back({prefix, length, first_seen(window, length), int(paths.size())});
    for (; mask; mask &= mask - 1) paths.push_back(prefix + __builtin_ctzll(mask));
  }
}

// Add items of up to `size` query vectors, over all parts.
void Work::add_request(const Rows& rows, int request, int group, int size) {
  int row = rows.qo_indptr[request];
  int count = (rows.qo_indptr[request + 1] - row) * group;
  for (int first = 0; first < count; first += size) {
    Item item{request, first, std::min(size, count - first), 0, 0, 0, 0, INT_MAX, 0, 0, 0, -1};
    int length = 0;
    for (int r = row + first / group; r <= row + (first + item.count - 1) / group; r++) {
      const View& view = views[r];
      uint64_t mask = rows.mask[r];
      int end = mask ? view.prefix / TILE * TILE : view.prefix;
      item.begin = std::min(item.begin, view.low);
      item.end = std::max(item.end, end);
      if (mask) item.tail = std::max(item.tail, view.prefix + 64 - __builtin_clzll(mask));
      length = std::max(length, view.length);
    }
    item.first_part = part_of(item.begin);
    item.end_part = part_of(length - 1) + 1;
    item.cost = int64_t(length - item.begin) * (POSITION + item.count);
    whole.push_back(item);
  }
}

// LONG: minimum KV heads of an item with few query vectors, 1 KiB of a token. All heads are faster,
// but divide evenly only if a thread has EVEN parts.
constexpr int LONG = 4, EVEN = 4;

static int divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Divide an item for all heads into items of cost at most `most`, if possible. It is divided by
// heads while several are read together, then by parts, then by heads again. Threads get equal
// numbers of equal pieces if there is no other work.
void Work::divide(const Item& item, int num_heads, int64_t most, int threads) {
  int pieces = std::max(divide_up(item.cost, most), 1), parts = item.end_part - item.first_part;
  bool is_few = item.count <= FEW;
  int heads = is_few ? std::min(num_heads, MAX_SHARED / item.count) : 1;
  int least = parts >= EVEN * pieces ? heads : std::min(heads, LONG);
  heads = std::max(std::min(divide_up(num_heads, pieces), heads), least);
  int cuts_wanted = std::min(parts, divide_up(pieces, divide_up(num_heads, heads)));
  if (is_few) heads = std::min(heads, std::max(int(int64_t(num_heads) * cuts_wanted / pieces), 1));
  else if (whole.size() == 1 && cuts_wanted > 1)
    while (cuts_wanted < parts && cuts_wanted * num_heads % threads != 0) cuts_wanted++;
  int64_t partial = -1;
  if (cuts_wanted > 1) {
    partial = num_partials;
    cuts.push_back({item.request, item.first, item.count, item.first_part, parts, partial});
    num_partials += int64_t(parts) * item.count;
  }
  for (int p = 0; p < cuts_wanted; p++)
    for (int h = 0; h < num_heads; h += heads) {
      Item piece = item;
      piece.first_head = h;
      piece.num_heads = std::min(heads, num_heads - h);
      piece.first_part = item.first_part + parts * p / cuts_wanted;
      piece.end_part = item.first_part + parts * (p + 1) / cuts_wanted;
      if (partial >= 0)
        piece.partial = partial + int64_t(piece.first_part - item.first_part) * item.count;
      piece.cost = item.cost * piece.num_heads * (piece.end_part - piece.first_part) /
                   (num_heads * parts);
      items.push_back(piece);
    }
}

void Work::build(const Rows& rows, int num_heads, int threads) {
  view_rows(rows);
  int size = MAX_ITEM, group = num_heads / num_kv_heads;
  while (true) {
    whole.clear();
    for (int b = 0; b < rows.num_requests; b++) add_request(rows, b, group, size);
    if (size == MIN_ITEM || int64_t(whole.size()) * num_kv_heads >= UNITS * threads) break;
    size /= 2;
  }
  items.clear();
  cuts.clear();
  num_partials = 0;
  int64_t cost = 0;
  int most_vectors = 0;
  for (Item& item : whole) {
    item.cost *= num_kv_heads;
    cost += item.cost;
    most_vectors = std::max(most_vectors, item.count);
  }
  bool is_few = most_vectors <= FEW;
  int units = threads * (!is_few ? UNITS : whole.size() == 1 ? 1 : UNITS / 2);
  int64_t most = threads == 1 ? cost + 1 : std::max<int64_t>(cost / units, 1);
  for (const Item& item : whole) divide(item, num_kv_heads, most, threads);
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    if (a.cost != b.cost) return a.cost > b.cost;
    auto place = [](const Item& i) {
      return std::tuple(i.request, i.first, i.first_part, i.first_head);
    };
    return place(a) < place(b);
  });
}

const Work& AttentionPlan::of(int64_t window, int64_t num_kv_heads) const {
  for (const Work& work : works)
    if (work.window == window && work.num_kv_heads == num_kv_heads) return work;
  __builtin_trap();  // Python only requests planned windows
}

// Layers with one window and one number of KV heads; `head_dim` is their largest head size.
struct Kind {
  int64_t window, num_kv_heads, head_dim;  // window as for `first_seen`
};

struct PlanAttention {
  const Kind* kinds;
  int64_t num_kinds, num_heads;
};

extern "C" {
AttentionPlan* specserve_attention_plan() { return new AttentionPlan; }

void specserve_free_attention_plan(AttentionPlan* plan) { delete plan; }

void specserve_plan_attention(const void* args, const Step& step, Team& team) {
  if (team.id) return;
  const PlanAttention& a = *(const PlanAttention*)args;
  AttentionPlan& plan = *step.attention;
  plan.works.resize(a.num_kinds);
  int64_t most = plan.partials.size();
  for (int64_t i = 0; i < a.num_kinds; i++) {
    const Kind& kind = a.kinds[i];
    Work& work = plan.works[i];
    work.window = kind.window;
    work.num_kv_heads = kind.num_kv_heads;
    work.build(*step.rows, a.num_heads, team.size);
    most = std::max(most, work.num_partials * kind.num_kv_heads * partial_size(kind.head_dim));
  }
  plan.partials.resize(most);
}
}
