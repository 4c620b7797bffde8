// Lookups of specserve_drafters/suffix.py in earlier outputs. That file defines and explains the
// computation. Tests compare its class OutputIndex with this code, bit by bit.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

namespace {

constexpr int LENGTHS = 4;  // lengths of indexed n-grams
constexpr int LONGEST = 16, MAX_LENGTH = 16, MAX_NODES = 63;

struct Settings {
  int64_t end, max_matches, max_visits;
  int64_t lengths[LENGTHS], mix[LONGEST];
  double sure[MAX_LENGTH + MAX_NODES + 1];
};

// Outputs one after the other, and the places of their n-grams, newest first; 0 is none.
struct Part {
  const int32_t *tokens, *newest[LENGTHS], *before[LENGTHS];
  int64_t size;  // slots, a power of 2
};

struct Place {
  int32_t part, at;
};

struct Outputs {
  const Settings& settings;
  const Part* parts;
  int64_t num_parts;

  int32_t token(Place place) const { return parts[place.part].tokens[place.at]; }

  // Find at most `most` places after the longest n-grams that match the last `size` tokens before
  // `end`; return their length.
  int64_t match(const int32_t* end, int64_t size, size_t most, std::vector<Place>& found) const {
    int64_t length = 0, mixed = 0;
    std::vector<Place> longer;
    found.clear();
    for (int k = 0; k < LENGTHS && settings.lengths[k] <= size; k++) {
      int64_t n = settings.lengths[k];
      for (int64_t j = length; j < n; j++) mixed += end[-1 - j] * settings.mix[j];
      longer.clear();
      for (int32_t part = 0; part < num_parts && longer.size() < most; part++)
        add_places(part, k, end - n, mixed, most, longer);
      if (longer.empty()) break;
      length = n;
      found.swap(longer);
    }
    return length;
  }

 private:
  void add_places(int32_t part, int k, const int32_t* tail, int64_t mixed, size_t most,
                  std::vector<Place>& found) const {
    const Part& own = parts[part];
    int64_t n = settings.lengths[k];
    int32_t at = own.newest[k][(mixed ^ mixed >> 17) & (own.size - 1)];
    for (int64_t visits = 0; at && visits < settings.max_visits; visits++) {
      if (std::equal(tail, tail + n, own.tokens + at - n)) found.push_back({part, at});
      if (found.size() == most) return;
      at = own.before[k][at];
    }
  }
};

// A token that may follow a draft token, and the places after it.
struct Branch {
  double key;  // negative probability of the path
  int64_t parent, rank;
  int32_t token;
  double p;
  int64_t depth;
  std::vector<Place> places;
  bool operator<(const Branch& other) const {  // the least is on top of the heap
    return std::tie(other.key, other.parent, other.rank) < std::tie(key, parent, rank);
  }
};

struct Tree {
  const Outputs& outputs;
  int64_t length;
  std::vector<Branch> heap;

  // Add the tokens that may follow a draft token; the newest places come first.
  void branch(const std::vector<Place>& places, int64_t parent, double value, int64_t depth) {
    std::vector<Branch> groups;
    for (Place place : places) {
      int32_t token = outputs.token(place);
      if (token == int32_t(outputs.settings.end)) continue;
      auto same = [&](const Branch& group) { return group.token == token; };
      auto group = std::find_if(groups.begin(), groups.end(), same);
      if (group == groups.end()) {
        groups.push_back({0, parent, int64_t(groups.size()), token, 0, depth, {}});
        group = groups.end() - 1;
      }
      group->places.push_back({place.part, place.at + 1});
    }
    double sure = outputs.settings.sure[std::min<int64_t>(length, MAX_LENGTH) + depth];
    for (Branch& group : groups) {
      group.p = (double(group.places.size()) + 0.5) / double(places.size() + 1) * sure;
      group.key = -value * group.p;
      heap.push_back(std::move(group));
      std::push_heap(heap.begin(), heap.end());
    }
  }

  int64_t draw(int64_t limit, int32_t* tokens, int32_t* parents, double* scores) {
    int64_t n = 0;
    while (!heap.empty() && n < limit) {
      std::pop_heap(heap.begin(), heap.end());
      Branch best = std::move(heap.back());
      heap.pop_back();
      tokens[n] = best.token;
      parents[n] = int32_t(best.parent);
      scores[n++] = best.p;
      if (n < limit) branch(best.places, n, -best.key, best.depth + 1);
    }
    return n;
  }
};

}  // namespace

// Write at most `most` matches of the tokens before `end` as pairs of part and place; return 64 *
// their number + their length.
extern "C" int64_t specserve_match_outputs(const Settings* settings, const Part* parts,
                                           int64_t num_parts, const int32_t* end, int64_t size,
                                           int64_t most, int32_t* out) {
  static thread_local std::vector<Place> found;
  int64_t length = Outputs{*settings, parts, num_parts}.match(end, size, size_t(most), found);
  for (size_t k = 0; k < found.size(); k++) {
    out[2 * k] = found[k].part;
    out[2 * k + 1] = found[k].at;
  }
  return 64 * int64_t(found.size()) + length;
}

// Write the most likely continuations, at most `limit` <= MAX_NODES; return their number.
extern "C" int64_t specserve_propose_outputs(const Settings* settings, const Part* parts,
                                             int64_t num_parts, const int32_t* end, int64_t size,
                                             int64_t limit, int32_t* tokens, int32_t* parents,
                                             double* scores) {
  static thread_local std::vector<Place> found;
  Outputs outputs{*settings, parts, num_parts};
  int64_t length = outputs.match(end, size, size_t(settings->max_matches), found);
  Tree tree{outputs, length, {}};
  tree.branch(found, 0, 1, 0);
  return tree.draw(limit, tokens, parents, scores);
}
