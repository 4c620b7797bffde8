// Trie, scoring and selection of specserve_drafters/trie.py, which defines and explains the
// computation. Tests compare its classes with this code, bit by bit.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafts.h"

namespace {

constexpr int NUM_BOUNDS = 10, DEPTHS = 8, NUM_BINS = (NUM_BOUNDS + 1) * DEPTHS;
constexpr int ROOT = 0, NONE = -1, DROPPED = -1;
constexpr int USUAL_SIZE = 64;  // nodes that a trie has room for at first
constexpr int MASK_BITS = 56;  // further sources share bits

struct Settings {
  double bounds[NUM_BOUNDS];
  double least, most, unscored, finds;
  double prior, memory, shift_prior, shift_memory, max_shift, worth, worth_rate;
};

// Decayed counts of the draft tokens of one source, bucket of score and depth.
struct Bin {
  double tries = 0, hits = 0, scores = 0, factor = 1;
};

struct Calibration {
  explicit Calibration(const Settings& settings) : settings(settings) {}

  double bounded(double p) const {
    return p < settings.least ? settings.least : p > settings.most ? settings.most : p;
  }

  void settle(Bin& bin) const {
    double score = bounded(bin.scores / bin.tries);
    double right = bounded((bin.hits + settings.prior * score) / (bin.tries + settings.prior));
    bin.factor = right * (1 - score) / ((1 - right) * score);
  }

  void count(Bin& bin, double score, bool is_right) const {
    bin.tries = bin.tries * settings.memory + 1;
    bin.hits = bin.hits * settings.memory + is_right;
    bin.scores = bin.scores * settings.memory + score;
    settle(bin);
  }

  double& gain(uint64_t bits) { return worth.try_emplace(bits, settings.worth).first->second; }

  const Settings settings;
  std::vector<std::array<Bin, NUM_BINS>> sources;
  std::unordered_map<uint64_t, double> worth;  // by the bits of the sources that agree
};

// A source's shift in one request.
struct Shift {
  double logit_shift = 0, weight = 0, factor = 1;
};

struct Score {
  int32_t source = 0, kind = 0;
  double score = 0, p = 0;
};

// The calibrators of one request, by the number of the source.
struct Calibrators {
  explicit Calibrators(Calibration& calibration) : calibration(calibration) {}

  Shift& shift(int source) {
    if (size_t(source) >= shifts.size()) shifts.resize(source + 1);
    return shifts[source];
  }

  Score weigh(int source, double score, int depth) {
    const Settings& s = calibration.settings;
    if (std::isnan(score)) score = s.unscored;
    score = calibration.bounded(score);
    int bucket = int(std::upper_bound(s.bounds, s.bounds + NUM_BOUNDS, score) - s.bounds);
    int kind = bucket * DEPTHS + std::min(depth, DEPTHS) - 1;
    double right = calibration.sources[source][kind].factor * shift(source).factor * score;
    return {source, kind, score, calibration.bounded(right / (right + 1 - score))};
  }

  void learn(const Score& score, bool is_right) {
    const Settings& s = calibration.settings;
    calibration.count(calibration.sources[score.source][score.kind], score.score, is_right);
    Shift& own = shift(score.source);
    own.weight += score.p * (1 - score.p);
    double moved = own.logit_shift + (is_right - score.p) / (own.weight + s.shift_prior);
    own.logit_shift = std::clamp(moved, -s.max_shift, s.max_shift);
  }

  void fade() {
    const Settings& s = calibration.settings;
    for (Shift& own : shifts) {
      double left = own.weight * s.shift_memory;
      own.logit_shift *= s.shift_memory * (own.weight + s.shift_prior) / (left + s.shift_prior);
      own.weight = left;
    }
  }

  void use() {
    for (Shift& own : shifts) own.factor = std::exp(own.logit_shift);
  }

  Calibration& calibration;
  std::vector<Shift> shifts;
};

// A score in the list of a node.
struct Listed {
  Score score;
  int32_t next = NONE;
};

// A source that was asked for a node's children, when the trie had `size` nodes.
struct Asked {
  int32_t node, size, source;
  Score score;
};

struct Links {
  int32_t first_child = NONE, last_child = NONE, next_sibling = NONE;
  int32_t first_score = NONE, last_score = NONE;
};

class Trie {
 public:
  Trie(Calibrators& calibrators, int num_ids) : own(calibrators), num_ids(num_ids) {
    for (auto* column : {&tokens, &parents, &depths, &expanded}) column->reserve(USUAL_SIZE);
    p.reserve(USUAL_SIZE);
    values.reserve(USUAL_SIZE);
    links.reserve(USUAL_SIZE);
    listed.reserve(USUAL_SIZE);
    push(0, ROOT, 0, 1, 1);
  }

  // Keep the root only, and the room.
  void clear() {
    for (auto* column : {&tokens, &parents, &depths, &expanded}) column->clear();
    p.clear();
    values.clear();
    links.clear();
    listed.clear();
    asked.clear();
    is_settled = true;
    push(0, ROOT, 0, 1, 1);
  }

  int add(int parent, int token, double p, int source) {
    Score score = own.weigh(source, p, depths[parent] + 1);
    int node = child(parent, token);
    if (node == NONE) return put(parent, token, score);
    agree(node, score);
    return node;
  }

  int put(int parent, int token, const Score& score) {
    int node = push(token, parent, depths[parent] + 1, score.p, values[parent] * score.p);
    int last = links[parent].last_child;
    (last == NONE ? links[parent].first_child : links[last].next_sibling) = node;
    links[parent].last_child = node;
    list(node, score);
    return node;
  }

  void merge(int source, int64_t n, const int32_t* new_tokens, const int32_t* new_parents,
             const double* scores, const int32_t* numbers, int below, int32_t* nodes) {
    nodes[0] = below;
    for (int64_t k = 0; k < n; k++) {
      int at = nodes[new_parents[k]];
      bool is_dropped = at == DROPPED || new_tokens[k] >= num_ids;
      nodes[k + 1] = is_dropped ? DROPPED : add(at, new_tokens[k], scores[k], source);
      if (!is_dropped && numbers && numbers[k]) expanded[nodes[k + 1]] = numbers[k];
    }
  }

  int64_t branch(int node, int source, int64_t n, const int32_t* new_tokens, const double* scores,
                 int64_t room, double* before) {
    int64_t num_before = 0;
    for (int c = links[node].first_child; c != NONE && num_before < room; c = links[c].next_sibling)
      before[num_before++] = values[c];
    for (int64_t k = 0; k < n; k++) {
      Score score = own.weigh(source, scores[k], depths[node] + 1);
      int found = num_before ? child(node, new_tokens[k]) : NONE;
      if (found == NONE) put(node, new_tokens[k], score);
      else agree(found, score);
    }
    if (num_before)
      for (int c = links[node].first_child; c != NONE; c = links[c].next_sibling)
        values[c] = values[node] * p[c];
    return num_before;
  }

  int64_t num_children(int node) const {
    int64_t n = 0;
    for (int c = links[node].first_child; c != NONE; c = links[c].next_sibling) n++;
    return n;
  }

  bool has_id(int token) const { return token < num_ids; }

  void settle() {
    if (is_settled) return;
    for (size_t node = 1; node < tokens.size(); node++)
      values[node] = values[parents[node]] * p[node];
    is_settled = true;
  }

  // `by` is the number of the source as one that finds children.
  double reach(int node, int by) { return values[node] * children_by(by, node).p; }

  Score children_by(int by, int node) {
    double missing = 1;
    if (links[node].first_child != NONE) {
      double total = 0;
      for (int c = links[node].first_child; c != NONE; c = links[c].next_sibling) total += p[c];
      missing = 1 - std::min(total, 1.0);
    }
    return own.weigh(by, own.calibration.settings.finds * missing, depths[node] + 1);
  }

  void ask(int node, int by, int source) {
    asked.push_back({node, int32_t(tokens.size()), source, children_by(by, node)});
  }

  void observe(int64_t n, const int32_t* after) {
    own.fade();
    int node = ROOT;
    for (int64_t k = 0; k < n; k++) {
      int accepted = child(node, after[k]);
      learn(node, accepted);
      if (accepted == NONE) break;
      node = accepted;
    }
    own.use();
  }

  int child(int node, int token) const {
    int c = links[node].first_child;
    while (c != NONE && tokens[c] != token) c = links[c].next_sibling;
    return c;
  }

  uint64_t bits(int node) const {
    uint64_t found = 0;
    for (int s = links[node].first_score; s != NONE; s = listed[s].next)
      found |= bit(listed[s].score);
    return found;
  }

  void draft(int64_t n, const int32_t* chosen, DraftOut out) {
    number.resize(tokens.size());
    int64_t size = 0;
    int end = ROOT;
    rest.clear();
    for (int64_t k = 0; k < n; k++) {
      int node = chosen[k];
      if (parents[node] == end) out.order[size++] = end = node;
      else rest.push_back(node);
    }
    for (int node : rest) out.order[size++] = node;
    number[ROOT] = 0;
    for (int64_t k = 0; k < size; k++) number[out.order[k]] = int32_t(k + 1);
    for (int64_t k = 0; k < size; k++) {
      int node = out.order[k];
      out.tokens[k] = tokens[node];
      out.parents[k] = number[parents[node]];
      out.expanded[k] = expanded[node];
      out.sources[k] = listed[links[node].first_score].score.source | bits(node) << 8;
    }
  }

  std::vector<int32_t> tokens, parents, depths, expanded;
  std::vector<double> p, values;
  std::vector<Links> links;
  std::vector<Listed> listed;

 private:
  int push(int token, int parent, int depth, double of_token, double of_path) {
    tokens.push_back(token);
    parents.push_back(parent);
    depths.push_back(depth);
    expanded.push_back(0);
    p.push_back(of_token);
    values.push_back(of_path);
    links.push_back({});
    return int(tokens.size()) - 1;
  }

  void list(int node, const Score& score) {
    int last = links[node].last_score, at = int(listed.size());
    listed.push_back({score});
    (last == NONE ? links[node].first_score : listed[last].next) = at;
    links[node].last_score = at;
  }

  void agree(int node, const Score& score) {
    int s = links[node].first_score;
    while (s != NONE && listed[s].score.source != score.source) s = listed[s].next;
    if (s == NONE) list(node, score);
    else if (score.p > listed[s].score.p) listed[s].score = score;
    const Listed& first = listed[links[node].first_score];
    p[node] = first.next == NONE ? first.score.p : combined(node);
    values[node] = values[parents[node]] * p[node];
    is_settled &= links[node].first_child == NONE;
  }

  double combined(int node) {
    double wrong = 1, best = 0;
    for (int s = links[node].first_score; s != NONE; s = listed[s].next) {
      wrong *= 1 - listed[s].score.p;
      best = std::max(best, listed[s].score.p);
    }
    const Calibration& all = own.calibration;
    auto known = all.worth.find(bits(node));
    double worth = known == all.worth.end() ? all.settings.worth : known->second;
    return std::min({1 - wrong, best + worth, all.settings.most});
  }

  static uint64_t bit(const Score& score) { return uint64_t(1) << (score.source % MASK_BITS); }

  void learn(int node, int accepted) {
    for (const Asked& one : asked)
      if (one.node == node)
        own.learn(one.score, accepted >= one.size && has(accepted, one.source));
    for (int c = links[node].first_child; c != NONE; c = links[c].next_sibling) {
      bool is_right = c == accepted;
      double best = 0;
      for (int s = links[c].first_score; s != NONE; s = listed[s].next) {
        own.learn(listed[s].score, is_right);
        best = std::max(best, listed[s].score.p);
      }
      if (listed[links[c].first_score].next == NONE) continue;
      double& worth = own.calibration.gain(bits(c));
      worth = std::max(0.0, worth + own.calibration.settings.worth_rate * (is_right - best - worth));
    }
  }

  bool has(int node, int source) const {
    for (int s = links[node].first_score; s != NONE; s = listed[s].next)
      if (listed[s].score.source == source) return true;
    return false;
  }

  Calibrators& own;
  const int num_ids;
  bool is_settled = true;
  std::vector<Asked> asked;
  std::vector<int32_t> number, rest;
};

Trie& trie_of(const Limits& request) { return *static_cast<Trie*>(request.trie); }

// The requests of a step, and the tokens beyond the next that each needs in this step.
struct Requests {
  const Limits* limits;
  const double* behind;
  int64_t n;
};

// A draft token, with the probability of its path.
struct Chosen {
  double value;
  int32_t request, node;
};

bool falls(const Chosen& a, const Chosen& b) { return a.value > b.value; }

void by_value(Requests all, double least, std::vector<Chosen>& found) {
  const Limits* requests = all.limits;
  for (int64_t i = 0; i < all.n; i++) {
    Trie& trie = trie_of(requests[i]);
    trie.settle();
    size_t begin = found.size();
    for (size_t node = 1; node < trie.tokens.size(); node++)
      if (trie.values[node] >= least && trie.depths[node] <= requests[i].max_depth)
        found.push_back({trie.values[node], int32_t(i), int32_t(node)});
    std::stable_sort(found.begin() + begin, found.end(), falls);
    if (found.size() - begin > size_t(requests[i].limit))
      found.resize(begin + requests[i].limit);
  }
  if (all.n > 1) std::stable_sort(found.begin(), found.end(), falls);
}

double urgency(double value, double behind) { return behind > 0 ? value + 1 + behind : value; }

struct Waiting {
  double key;  // negative, so that the least is first
  Chosen chosen;
  bool operator<(const Waiting& other) const {  // the least is on top of the heap
    if (key != other.key) return key > other.key;
    if (chosen.request != other.chosen.request) return chosen.request > other.chosen.request;
    return chosen.node > other.chosen.node;
  }
};

void by_urgency(Requests all, double least, size_t most, std::vector<Chosen>& found) {
  std::vector<Limits> requests(all.limits, all.limits + all.n);
  std::vector<double> behind(all.behind, all.behind + all.n);
  std::vector<Waiting> heap;
  auto add = [&](int32_t i, int node, double above) {
    const Trie& trie = trie_of(requests[i]);
    for (int c = trie.links[node].first_child; c != NONE; c = trie.links[c].next_sibling) {
      double value = above * trie.p[c];
      if (node != ROOT && value < least) continue;
      heap.push_back({-urgency(value, behind[i]), {value, i, c}});
      std::push_heap(heap.begin(), heap.end());
    }
  };
  for (int32_t i = 0; i < all.n; i++)
    if (requests[i].limit > 0) add(i, ROOT, 1);
  while (!heap.empty() && found.size() < most) {
    Waiting first = heap.front();
    Limits& own = requests[first.chosen.request];
    double& lacks = behind[first.chosen.request];
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    double value = first.chosen.value;
    if (value < least || own.limit == 0) continue;
    if (lacks <= 0 && first.key < -value) {  // it was behind when this one was added
      heap.push_back({-value, first.chosen});
      std::push_heap(heap.begin(), heap.end());
      continue;
    }
    found.push_back(first.chosen);
    own.limit--;
    lacks -= value;
    if (trie_of(own).depths[first.chosen.node] != own.max_depth)
      add(first.chosen.request, first.chosen.node, value);
  }
}

// A number of draft tokens, with the sum of their values and the step's expected time and rate.
struct Size {
  int64_t size;
  double gain, seconds, rate;
  void write(double* out) const {
    out[0] = double(size);
    out[1] = gain, out[2] = seconds, out[3] = rate;
  }
};

struct Options {
  const std::vector<int64_t>& sizes;
  const std::vector<double>& gains;  // by size
};

Size best_of(const Step& step, const Options& options, const Costs& costs, bool is_hopeful) {
  StepTimes times(costs, step, is_hopeful), roots(costs, without_prompts(step), is_hopeful);
  bool has_both = step.prompt_rows && step.num_roots;
  double none = times.of(0), of_roots = roots.of(0);
  double prompts = none - of_roots, worth = 0, root_tokens = double(step.num_roots) / step.kept;
  double allowed = of_roots <= step.allowed ? step.allowed : HUGE_VAL;
  static thread_local std::vector<double> takes;
  takes.clear();
  for (int64_t size : options.sizes) {
    double seconds = times.of(size);
    if (has_both && size) seconds = std::max(seconds, none + roots.of(size) - of_roots);
    takes.push_back(step.spent + seconds);
  }
  if (has_both) {
    double most = 0;
    for (size_t i = 0; i < takes.size(); i++)
      if (takes[i] > prompts)
        most = std::max(most, (root_tokens + options.gains[i]) / (takes[i] - prompts));
    worth = prompts * most;
  }
  size_t best = 0;
  double highest = -1;
  for (size_t i = 0; i < takes.size(); i++) {
    double tokens = root_tokens + options.gains[i];
    double rate = takes[i] <= allowed ? (tokens + worth) / takes[i] : 0;
    if (rate > highest) highest = rate, best = i;
  }
  double gain = options.gains[best];
  return {options.sizes[best], gain, takes[best], (root_tokens + gain) / takes[best]};
}

// A trie, and the number of tokens that followed its root.
struct Observed {
  Trie* trie;
  int64_t size;
};

// A node that a model has run, and the model's numbers as a source and as a source of children.
struct Ran {
  Trie* trie;
  int64_t node, source, by;
};

// Columns of a level: values of the children that existed before; by node that was run, the numbers
// of likely and of all children; and each child with its value and reach.
struct Level {
  double *before, *values, *reaches;
  int32_t *num_likely, *num_children, *children;
};

struct Columns {
  const int32_t *tokens, *parents, *depths, *expanded;
  const double *p, *values;
};

}  // namespace

extern "C" Calibration* specserve_calibration(const Settings* settings) {
  return new Calibration(*settings);
}

extern "C" void specserve_free_calibration(Calibration* calibration) { delete calibration; }

// Return the number of a new source.
extern "C" int64_t specserve_add_source(Calibration* calibration) {
  calibration->sources.emplace_back();
  return int64_t(calibration->sources.size()) - 1;
}

// Drop a source's bins.
extern "C" void specserve_clear_bins(Calibration* calibration, int64_t source) {
  calibration->sources[source] = {};
}

extern "C" void specserve_set_bin(Calibration* calibration, int64_t source, int64_t kind,
                                  double tries, double hits, double scores) {
  Bin& bin = calibration->sources[source][kind] = {tries, hits, scores};
  calibration->settle(bin);
}

// Write tries, hits and scores of each bin, [NUM_BINS, 3].
extern "C" void specserve_read_bins(const Calibration* calibration, int64_t source, double* out) {
  for (const Bin& bin : calibration->sources[source]) {
    *out++ = bin.tries;
    *out++ = bin.hits;
    *out++ = bin.scores;
  }
}

extern "C" Calibrators* specserve_calibrators(Calibration* calibration) {
  return new Calibrators(*calibration);
}

extern "C" void specserve_free_calibrators(Calibrators* calibrators) { delete calibrators; }

extern "C" void specserve_drop_shift(Calibrators* calibrators, int64_t source) {
  calibrators->shift(int(source)) = {};
}

extern "C" Trie* specserve_trie(Calibrators* calibrators, int64_t num_ids) {
  return new Trie(*calibrators, int(std::min<int64_t>(num_ids, INT32_MAX)));
}

extern "C" void specserve_free_trie(Trie* trie) { delete trie; }

extern "C" void specserve_clear_tries(void* const* tries, int64_t n) {
  for (int64_t i = 0; i < n; i++) static_cast<Trie*>(tries[i])->clear();
}

extern "C" int64_t specserve_trie_size(const Trie* trie) { return int64_t(trie->tokens.size()); }

// Write the addresses of the columns; each has a value per node until the next change.
extern "C" void specserve_trie_columns(const Trie* trie, Columns* out) {
  *out = {trie->tokens.data(),   trie->parents.data(), trie->depths.data(),
          trie->expanded.data(), trie->p.data(),       trie->values.data()};
}

extern "C" int64_t specserve_add_token(Trie* trie, int64_t parent, int64_t token, double p,
                                       int64_t source) {
  return trie->add(int(parent), int(token), p, int(source));
}

extern "C" void specserve_merge(void* trie, int64_t source, int64_t n, const int32_t* tokens,
                                const int32_t* parents, const double* p, const int32_t* expanded,
                                int64_t below, int32_t* nodes) {
  static_cast<Trie*>(trie)->merge(int(source), n, tokens, parents, p, expanded, int(below), nodes);
}

// Return the number of values in `before`, as many as there is room for.
extern "C" int64_t specserve_branch(Trie* trie, int64_t node, int64_t source, int64_t n,
                                    const int32_t* tokens, const double* p, int64_t room,
                                    double* before) {
  return trie->branch(int(node), int(source), n, tokens, p, room, before);
}

// Add the likely children of nodes that a model has run. tokens, log_p [n, k]: `least` is the least
// value of a child. Return the number of children that existed before, or NONE if there is no room.
extern "C" int64_t specserve_branch_each(const Ran* rows, int64_t n, int64_t k,
                                         const int32_t* tokens, const double* log_p, double least,
                                         int64_t room, const Level* out) {
  static thread_local std::vector<double> of_path, p;
  static thread_local std::vector<int32_t> likely;
  int64_t most = n, num_before = 0, at = 0;
  of_path.clear();
  for (int64_t i = 0; i < n; i++) {
    most += rows[i].trie->num_children(int(rows[i].node)) + k;
    of_path.push_back(rows[i].trie->values[rows[i].node]);
  }
  if (most > room) return NONE;
  for (int64_t i = 0; i < n; i++) {
    const Ran& row = rows[i];
    double bound = least / std::max(of_path[i], least);
    row.trie->ask(int(row.node), int(row.by), int(row.source));
    likely.clear();
    p.clear();
    out->num_likely[i] = 0;
    for (int64_t j = i * k; j < (i + 1) * k; j++) {
      double score = std::exp(log_p[j]);
      if (!(score >= bound)) continue;
      out->num_likely[i]++;
      if (!row.trie->has_id(tokens[j])) continue;
      likely.push_back(tokens[j]);
      p.push_back(score);
    }
    num_before += row.trie->branch(int(row.node), int(row.source), int64_t(p.size()), likely.data(),
                                   p.data(), room, out->before + num_before);
  }
  for (int64_t i = 0; i < n; i++) {
    Trie& trie = *rows[i].trie;
    out->num_children[i] = int32_t(trie.num_children(int(rows[i].node)));
    for (int c = trie.links[rows[i].node].first_child; c != NONE; c = trie.links[c].next_sibling) {
      out->children[at] = c;
      out->values[at] = trie.values[c];
      out->reaches[at++] = trie.reach(c, int(rows[i].by));
    }
  }
  return num_before;
}

extern "C" void specserve_number_node(Trie* trie, int64_t node, int64_t number) {
  trie->expanded[node] = int32_t(number);
}

extern "C" void specserve_settle(Trie* trie) { trie->settle(); }

extern "C" void specserve_reaches(Trie* trie, int64_t n, const int32_t* nodes, int64_t by,
                                  double* out) {
  for (int64_t k = 0; k < n; k++) out[k] = trie->reach(nodes[k], int(by));
}

extern "C" void specserve_ask(Trie* trie, int64_t node, int64_t by, int64_t source) {
  trie->ask(int(node), int(by), int(source));
}

// Learn from the tokens that followed each root, one request after the other.
extern "C" void specserve_observe_each(const void* observed, int64_t n, const int32_t* tokens) {
  const Observed* each = static_cast<const Observed*>(observed);
  for (int64_t i = 0; i < n; tokens += each[i++].size) each[i].trie->observe(each[i].size, tokens);
}

extern "C" int64_t specserve_child(const void* trie, int64_t node, int64_t token) {
  return static_cast<const Trie*>(trie)->child(int(node), int(token));
}

// Return the number of children; write as many as there is room for.
extern "C" int64_t specserve_children(const Trie* trie, int64_t node, int64_t room, int32_t* out) {
  int64_t n = 0;
  for (int c = trie->links[node].first_child; c != NONE; c = trie->links[c].next_sibling, n++)
    if (n < room) out[n] = c;
  return n;
}

// Write the numbers of a node's sources, in the order of their scores; return how many.
extern "C" int64_t specserve_sources(const void* of, int64_t node, int64_t room, int32_t* out) {
  const Trie* trie = static_cast<const Trie*>(of);
  int64_t n = 0;
  for (int s = trie->links[node].first_score; s != NONE; s = trie->listed[s].next, n++)
    if (n < room) out[n] = trie->listed[s].score.source;
  return n;
}

extern "C" void specserve_draft(Trie* trie, int64_t n, const int32_t* chosen, int32_t* tokens,
                                int32_t* parents, int32_t* expanded, int32_t* order,
                                uint64_t* sources) {
  trie->draft(n, chosen, {tokens, parents, expanded, order, sources});
}

// Select up to `most` draft tokens, by falling value, or those of late requests first. Return how
// many; each output has room for `most`.
extern "C" int64_t specserve_select(const Limits* limits, const double* behind, int64_t n,
                                    int64_t most, double least, const Outputs* out) {
  static thread_local std::vector<Chosen> found;
  Requests all{limits, behind, n};
  found.clear();
  bool is_late = std::any_of(behind, behind + n, [](double tokens) { return tokens > 0; });
  if (is_late) by_urgency(all, least, size_t(most), found);
  else by_value(all, least, found);
  int64_t size = std::min<int64_t>(most, int64_t(found.size()));
  for (int64_t k = 0; k < size; k++) {
    out->values[k] = found[k].value;
    out->places[k] = found[k].request;
    out->nodes[k] = found[k].node;
  }
  return size;
}

// Write the drafts of the first `size` selected nodes, one request after the other. `counts` [n]
// gets the number of nodes of each, and `expected` [n] the sum of their values above `likely`.
extern "C" void specserve_cut(const Limits* limits, int64_t n, int64_t size, double likely,
                              const Outputs* out) {
  static thread_local std::vector<int32_t> own;
  static thread_local std::vector<int64_t> ends;
  std::fill(out->counts, out->counts + n, 0);
  std::fill(out->expected, out->expected + n, 0.0);
  for (int64_t k = 0; k < size; k++) {
    int32_t place = out->places[k];
    out->counts[place]++;
    if (out->values[k] > likely) out->expected[place] += out->values[k];
  }
  ends.assign(1, 0);
  for (int64_t i = 0; i + 1 < n; i++) ends.push_back(ends.back() + out->counts[i]);
  own.resize(size);
  for (int64_t k = 0; k < size; k++) own[ends[out->places[k]]++] = out->nodes[k];
  for (int64_t i = 0, at = 0; i < n; at += out->counts[i++])
    if (out->counts[i]) trie_of(limits[i]).draft(out->counts[i], own.data() + at, out->draft.after(at));
}

// Select draft tokens as above, find the number of them with the highest expected rate, and write
// the drafts of so many by the known costs.
extern "C" int64_t specserve_weigh(const Limits* limits, const double* behind, int64_t n,
                                   int64_t most, double least, double likely, const Step* step,
                                   const Costs* costs, const Outputs* out) {
  static thread_local std::vector<int64_t> sizes;
  static thread_local std::vector<double> sums, gains;
  int64_t num = specserve_select(limits, behind, n, most, least, out);
  const int64_t *edges = costs->edges, *end = edges + costs->num_edges;
  sizes.assign(1, 0);
  for (auto edge = std::upper_bound(edges, end, step->rows); edge != end; edge++) {
    if (*edge >= step->rows + num) break;
    sizes.push_back(*edge - step->rows);
  }
  for (int64_t k = 0; k < costs->num_few && step->rows >= costs->fine; k++)
    if (costs->few[k] < num) sizes.push_back(costs->few[k]);
  if (num) sizes.push_back(num);
  sums.assign(1, 0);
  for (int64_t k = 0; k < num; k++) sums.push_back(sums.back() + out->values[k]);
  bool is_known = true;
  gains.clear();
  for (int64_t size : sizes) {
    gains.push_back(sums[size]);
    int64_t bucket = std::lower_bound(edges, end, step->rows + size) - edges;
    is_known &= costs->known[std::min(bucket, costs->num_edges - 1)] != 0;
  }
  Options options{sizes, gains};
  Size known = best_of(*step, options, *costs, false);
  known.write(out->sizes);
  (is_known ? known : best_of(*step, options, *costs, true)).write(out->sizes + 4);
  specserve_cut(limits, n, known.size, likely, out);
  return num;
}
