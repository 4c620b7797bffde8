// A request's draft in a step: the sources asked for it, and what their draft tokens saved.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "accounts.h"
#include "drafts.h"

namespace {

constexpr int64_t MAX_SOURCES = 56;  // of a request; as in tries.cpp

enum class Means : int64_t { ESTIMATES, SHARES, MODEL };  // how it is decided whether to ask

// A source that serves a request.
struct Served {
  int64_t source, number;  // number: in the request's calibration
  Means means;
  NativeSource* native;  // null if Python asks it
  Account* account = nullptr;
  // Of the step:
  double estimate = -1;  // expected accepted tokens, if it is due
  bool is_asked = false, is_trial = false;
  bool is_answered = false;  // it was asked in C++
  int64_t num_proposed = 0;  // then
  std::shared_ptr<SavedShare> share{};  // of a source with an average for each request
  double promised = 0;  // seconds that it expects to save, if it estimates
  // Seconds saved by draft tokens, less those of their rows: of those that it proposed first, and
  // of all that it proposed. A verified first token might have saved more in a trial.
  double credit = 0, saved = 0, might_save = 0;
  bool might = false;
  int64_t num_verified = 0, num_accepted = 0;

  double saved_or_might() const { return might ? std::max(credit, might_save) : credit; }
};

// Draft tokens that the same sources proposed; the first of them is `first`.
struct Group {
  uint64_t code;
  int64_t number = 0, accepted = 0;
  double gain = 0;
};

// Seconds that an accepted draft token saves, and that a row takes.
struct Prices {
  double saved, row;
};

class Root {
 public:
  Root(Scope& scope, int64_t id, bool is_sampled, int64_t max_depth)
      : scope(scope), id(id), kept(scope.kept[is_sampled]), max_depth(max_depth) {}

  Served* find(int64_t source) {
    for (Served& one : served)
      if (one.source == source) return &one;
    return nullptr;
  }

  // Return whether any of its sources pays, or whether that is not known so far.
  bool may_pay() const {
    return std::any_of(served.begin(), served.end(),
                       [&](const Served& one) { return one.account->may_pay(id); });
  }

  void begin_step(int64_t limit) {
    draft_limit = limit;
    for (Served& one : served) {
      one.estimate = -1;
      one.is_asked = one.is_trial = one.is_answered = one.might = false;
      one.num_proposed = 0;
      one.promised = one.credit = one.saved = one.might_save = 0;
    }
    num_asked = 0;
    expected = behind = 0;
    codes.clear();
    is_tried = 0;
  }

  void ask(Served& one, bool is_trial) {
    num_asked += !one.is_asked;
    one.is_asked = true;
    one.is_trial = is_trial;
  }

  // Count the draft's tokens by the groups of their sources.
  void count(int64_t size, const int32_t* accepted, int64_t num_accepted, Prices prices) {
    groups.clear();
    for (int64_t k = 0; k < size; k++) group(codes[k]).number++;
    for (int64_t k = 0; k < num_accepted; k++) group(codes[accepted[k] - 1]).accepted++;
    for (Served& one : served) one.credit = one.saved = 0;
    for (Group& one : groups) {
      one.gain = prices.saved * double(one.accepted) - prices.row * double(one.number);
      each_source(one.code, [&](Served& its, bool is_first) {
        if (is_first) its.credit += one.gain;
        its.saved += one.gain;
      });
    }
  }

  template <class Take> void each_source(uint64_t code, Take take) {
    int64_t first = code & 0xFF;
    for (Served& one : served)
      if (one.number == first) take(one, true);
      else if (code >> 8 >> one.number & 1) take(one, false);
  }

  int64_t num_sources(uint64_t code) {
    int64_t n = 0;
    each_source(code, [&](Served&, bool) { n++; });
    return n;
  }

  // Note what a verified first token would have saved, for sources on trial that had it.
  void note_trials(int32_t token, double saved) {
    for (Served& one : served) {
      if (!one.is_trial || one.means == Means::ESTIMATES) continue;
      int64_t node = specserve_child(trie, 0, token);
      int32_t found[MAX_SOURCES];
      int64_t n = node < 0 ? 0 : specserve_sources(trie, node, MAX_SOURCES, found);
      if (std::count(found, found + std::min(n, MAX_SOURCES), one.number) == 0) continue;
      one.might = true;
      one.might_save = saved;
    }
  }

  Scope& scope;
  const int64_t id;
  Trust& kept;
  const int64_t max_depth;
  std::vector<Served> served;
  void* trie = nullptr;
  double lately = 0;  // draft tokens verified per step
  // Of the step:
  int64_t draft_limit = 0, num_asked = 0;
  int64_t limit = 0;  // most draft tokens to ask a source for
  bool has_output = false, has_rules = false;
  const int32_t* text = nullptr;
  int64_t size = 0;  // of the text
  double behind = 0;  // tokens beyond the next that it needs in this step to meet its target
  uint64_t is_tried = 0, is_catching_up = 0;  // bits of models, by their place in the settlement
  std::vector<uint64_t> codes;  // sources of the draft's tokens, see `DraftOut`
  double expected = 0;  // accepted tokens, by the estimates
  std::vector<Group> groups;

 private:
  Group& group(uint64_t code) {
    for (Group& one : groups)
      if (one.code == code) return one;
    groups.push_back({code});
    return groups.back();
  }
};

}  // namespace
