// The n-gram draft source of specserve_drafters/lookup.py. That file defines and explains the
// computation. Tests compare its class NgramSource with this code, bit by bit.
#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "drafts.h"

namespace {

constexpr int LENGTHS = 4;  // lengths of n-grams: 1 to 4
constexpr int MAX_LENGTH = 16, MAX_NODES = 63;

struct Settings {
  int64_t max_tokens, at_once, least_size, max_matches, max_visits, enough, sum_every;
  int64_t mix[LENGTHS];
  double prior, memory;
  double likely[MAX_LENGTH + 1], sure[MAX_LENGTH + MAX_NODES + 1];
};

struct Text {
  const int32_t* tokens;
  int64_t size;
  int32_t operator[](int64_t i) const { return tokens[i]; }
};

struct Match {
  int64_t place, n;
};

// Return how many tokens before the place equal the tokens at the text's end.
int64_t match_length(Text text, int64_t place) {
  int64_t most = std::min<int64_t>(place, MAX_LENGTH), n = 0;
  while (n < most && text[place - 1 - n] == text[text.size - 1 - n]) n++;
  return n;
}

// The tokens after a place. At the text's end, reading continues from the place.
struct Continuation {
  Text text;
  int64_t place, at = place;
  int32_t next() {
    if (at == text.size) at = place;
    return text[at++];
  }
};

// Return the length of the common prefix of two continuations, at most `limit`.
int64_t common(Text text, int64_t place, int64_t other, int64_t limit) {
  Continuation a{text, place}, b{text, other};
  int64_t n = 0;
  while (n < limit && a.next() == b.next()) n++;
  return n;
}

class Index {
 public:
  Index(const Settings& settings, int64_t num_tokens) : settings(settings) {
    int64_t size = 1;
    while (size <= num_tokens) size *= 2;
    size = std::min(settings.max_tokens, std::max(settings.least_size, size));
    slots = mask = size - 1;
    newest.resize(size * LENGTHS);
  }

  void grow(Text text) {
    while (text.size > mask && mask + 1 < settings.max_tokens) mask = 2 * mask + 1;
    before.resize(std::min(mask + 1, text.size));
    next = std::max(next, text.size - settings.max_tokens);
    for (int64_t end = std::min(text.size, next + settings.at_once); next < end; next++) add(text);
  }

  // Call take(match) until it returns false: the longest n-grams first, then the newest.
  template <class Take> void each_match(Text text, Take take) const {
    std::array<int64_t, LENGTHS> heads = heads_of(text, text.size);
    for (int64_t n = std::min<int64_t>(LENGTHS, text.size - 1); n > 0; n--) {
      const int32_t* tail = text.tokens + text.size - n;
      int64_t place = newest[heads[n - 1]];
      for (int64_t visits = 0; place && visits < settings.max_visits; visits++) {
        if (std::equal(tail, tail + n, text.tokens + place - n) && !take(Match{place, n})) return;
        place = before[place & mask][n - 1];
      }
    }
  }

 private:
  // Return the slots in `newest` of the n-grams that end before a place, by length.
  std::array<int64_t, LENGTHS> heads_of(Text text, int64_t place) const {
    std::array<int64_t, LENGTHS> heads{};
    int64_t mixed = 0;
    for (int64_t n = 1; n <= std::min<int64_t>(LENGTHS, place); n++) {
      mixed += text[place - n] * settings.mix[n - 1];
      heads[n - 1] = (n - 1) * (slots + 1) + ((mixed ^ mixed >> 17) & slots);
    }
    return heads;
  }

  void add(Text text) {
    std::array<int64_t, LENGTHS> heads = heads_of(text, next);
    for (int64_t n = 1; n <= std::min<int64_t>(LENGTHS, next); n++) {
      int32_t& head = newest[heads[n - 1]];
      before[next & mask][n - 1] = head;
      head = int32_t(next);
    }
  }

  const Settings& settings;
  std::vector<int32_t> newest;                       // [LENGTHS, slots + 1], 0 for none
  std::vector<std::array<int32_t, LENGTHS>> before;  // by place & mask
  int64_t slots, mask, next = 1;
};

class Odds {
 public:
  explicit Odds(const Settings& settings) : settings(settings) { reset(); }

  void reset() {
    for (int i = 0; i <= MAX_LENGTH; i++) {
      right[i] = settings.prior * settings.likely[i];
      tries[i] = settings.prior;
    }
    sum();
  }

  void add(int64_t length, bool is_right) {
    tries[length] = tries[length] * settings.memory + 1;
    right[length] = right[length] * settings.memory + is_right;
    if (--until_sum <= 0) sum();
  }

  double expected[MAX_LENGTH + 1];

 private:
  void sum() {
    double p = right[MAX_LENGTH] / tries[MAX_LENGTH];
    double more = p < 1 ? std::min(p / (1 - p), double(MAX_LENGTH)) : MAX_LENGTH;
    for (int i = MAX_LENGTH; i >= 0; i--)
      expected[i] = more = right[i] / tries[i] * (1 + more);
    until_sum = settings.sum_every;
  }

  const Settings& settings;
  double right[MAX_LENGTH + 1], tries[MAX_LENGTH + 1];
  int64_t until_sum;
};

class Followed {
 public:
  Followed(const Settings& settings, int64_t num_tokens)
      : index(settings, num_tokens), size(num_tokens) {}

  double follow(Text text, Odds& odds) {
    for (; place && size < text.size; size++) {
      bool is_right = text[place] == text[size];
      odds.add(length, is_right);
      length = std::min<int64_t>(length + 1, MAX_LENGTH);
      place = is_right ? place + 1 : 0;
    }
    size = text.size;
    index.grow(text);
    if (!place) {
      index.each_match(text, [&](Match match) {
        place = match.place;
        return false;
      });
      length = place ? match_length(text, place) : 0;
    }
    return place ? odds.expected[length] : 0;
  }

  Index index;

 private:
  int64_t size, place = 0, length = 0;
};

// Scores of the tokens after a match.
struct Scores {
  Scores(const Settings& settings, Text text, const std::vector<Match>& found, int64_t place)
      : sure(settings.sure + match_length(text, place)) {
    int alike = 0, all = 0;
    for (const Match& match : found)
      if (match.n == found[0].n) {
        all++;
        alike += text[match.place] == text[place];
      }
    first = (alike + 0.5) / (all + 1) * sure[0];
  }
  double operator[](int64_t k) const { return k ? sure[k] : first; }

  const double* sure;
  double first;
};

// Draft tokens, with room for two continuations.
struct Out {
  int32_t *tokens, *parents;
  double* scores;
  int64_t size = 0;
  void add(int32_t token, int64_t parent, double score) {
    tokens[size] = token;
    parents[size] = int32_t(parent);
    scores[size++] = score;
  }
};

class Source final : public NativeSource {
 public:
  explicit Source(const Settings& s) : settings(s), odds(settings) {}

  double expect(int64_t id, const int32_t* tokens, int64_t size) override {
    return follow(id, {tokens, size});
  }

  int64_t add(int64_t id, const int32_t* text, int64_t size, int64_t limit, void* trie,
              int64_t number) override {
    constexpr int ROOM = 2 * MAX_NODES;
    int32_t tokens[ROOM], parents[ROOM], nodes[ROOM + 1];
    double scores[ROOM];
    int64_t n = propose(id, {text, size}, std::min<int64_t>(limit, MAX_NODES), {tokens, parents, scores});
    specserve_merge(trie, number, n, tokens, parents, scores, nullptr, 0, nodes);
    return n;
  }

  double follow(int64_t id, Text text) { return followed(id, text).follow(text, odds); }

  int64_t propose(int64_t id, Text text, int64_t limit, Out out) {
    Index& index = followed(id, text).index;
    index.grow(text);
    int64_t other = look_up(index, text, limit);
    if (found.empty()) return 0;
    int64_t best = found[0].place;
    Scores scores(settings, text, found, best);
    Continuation follows{text, best};
    for (int64_t k = 0; k < limit; k++) out.add(follows.next(), k, scores[k]);
    if (other) fork(text, other, common(text, best, other, limit), limit, out);
    return out.size;
  }

  void forget(int64_t id) { texts.erase(id); }

  void reset() {
    texts.clear();
    odds.reset();
  }

 private:
  Followed& followed(int64_t id, Text text) {
    return texts.try_emplace(id, settings, text.size).first->second;
  }

  // Fill `found`; return the place of the first continuation that differs from the best one, or 0.
  int64_t look_up(const Index& index, Text text, int64_t limit) {
    int64_t other = 0;
    found.clear();
    if (limit == 0) return other;
    index.each_match(text, [&](Match match) {
      for (const Match& seen : found)
        if (seen.place == match.place) return true;
      found.push_back(match);
      int64_t size = int64_t(found.size());
      if (other && size >= settings.enough) return false;
      if (!other && common(text, found[0].place, match.place, limit) < limit) other = match.place;
      return size < settings.max_matches;
    });
    return other;
  }

  // Add another continuation's tokens from `at` on, the first that differs.
  void fork(Text text, int64_t other, int64_t at, int64_t limit, Out& out) const {
    Scores scores(settings, text, found, other);
    Continuation follows{text, other};
    for (int64_t k = 0; k < at; k++) follows.next();
    double p = scores[at];
    if (at) p *= (1 - out.scores[at]) / 2;
    for (int64_t k = at; k < std::min(limit, at + limit / 4); k++)
      out.add(follows.next(), k > at ? out.size : at, k > at ? scores[k] : p);
  }

  const Settings settings;
  Odds odds;
  std::unordered_map<int64_t, Followed> texts;  // by request id
  std::vector<Match> found;
};

}  // namespace

extern "C" Source* specserve_ngram_source(const Settings* settings) {
  return new Source(*settings);
}

extern "C" void specserve_free_ngram_source(Source* source) { delete source; }

extern "C" double specserve_follow_text(Source* source, int64_t id, const int32_t* tokens,
                                        int64_t size) {
  return source->follow(id, {tokens, size});
}

// Return the number of draft tokens. `limit` is at most MAX_NODES; each output has room for 2 *
// MAX_NODES.
extern "C" int64_t specserve_propose_ngrams(Source* source, int64_t id, const int32_t* tokens,
                                          int64_t size, int64_t limit, int32_t* out_tokens,
                                          int32_t* parents, double* scores) {
  return source->propose(id, {tokens, size}, limit, {out_tokens, parents, scores});
}

extern "C" void specserve_forget_text(Source* source, int64_t id) { source->forget(id); }

extern "C" void specserve_reset_ngram_source(Source* source) { source->reset(); }

extern "C" NativeSource* specserve_native_source(Source* source) { return source; }
