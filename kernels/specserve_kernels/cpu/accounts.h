// Accounts of draft sources: what they take and save, and when trials are due.
// specserve/speculation/planner.py describes them, and has the constants.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

namespace {

// The constants of specserve/speculation/constants.py.
struct Settings {
  double free, free_estimates, rate, scope_rate, exploration, reinvested, fade, at_first, most_lost;
  double cold, lately, kept_least, kept_most, patience;
  double least_value, least_expected;
  int64_t pause, max_nodes, least_asked;
};

// Average share of a request's step time that draft tokens of a source save.
struct SavedShare {
  double saved, num_steps, rate, free;  // `rate`: weight of a step; `free`: share that may be lost
  int64_t num_own = 0;  // steps of its own; it begins with those of others

  bool pays() const { return num_steps > 0 && saved >= -free; }

  void add(double of_step) {
    num_own++;
    num_steps = pays() ? num_steps + 1 : 1;  // restart the average after a trial
    saved += std::max(1 / num_steps, rate) * (of_step - saved);
  }

  // Spread a loss over the steps of the average.
  void charge(double lost, double patience) {
    saved -= std::max(1 / std::max(num_steps, patience), rate) * lost;
  }
};

// Ratio of what was saved to what estimates promised, in seconds or tokens.
struct Trust {
  double rate, least, most;
  double saved = 0, promised = 0, num_steps = 0;

  double value() const {
    return num_steps == 0 ? 1 : std::min(std::max(saved / promised, least), most);
  }

  // Count a step; that of a trial replaces the earlier ones.
  void add(double kept, double expected, bool is_trial) {
    if (num_steps == 0) saved = promised = expected, num_steps = std::nearbyint(0.5 / rate);
    num_steps = is_trial ? 1 : num_steps + 1;
    double weight = std::max(1 / num_steps, rate);
    saved += weight * (kept - saved);
    promised += weight * (expected - promised);
  }

  // Trust a little more: only drafts show that less trust is due, and it prevents them.
  void fade() { saved += rate * (promised - saved); }
};

// A request's saved share of a step.
struct Outcome {
  SavedShare* share;
  double saved;
  bool is_trial;
};

// A source's savings in a scope, and the loss budget of its trials. A source that estimates has one
// average for all requests, because its estimates tell them apart.
class Account {
 public:
  // `share` of the budget of trials is this source's.
  Account(const Settings& s, double share, bool is_estimating)
      : all{0, 0, s.scope_rate, is_estimating ? s.free_estimates : s.free},
        trust{s.rate, 0, 1},
        left(s.at_first),
        settings(s),
        budget(s.exploration * share) {}

  // Return whether it saves time of a request, or has a large budget to find that out.
  bool may_pay(int64_t id) const {
    auto own = by_request.find(id);
    return left > settings.at_first / 2 || (own == by_request.end() ? all : *own->second).saved > 0;
  }

  // Begin a step, the last of so many.
  void next_step(int64_t num_steps) {
    left = std::min(left + double(num_steps) * budget, settings.at_first);
    loss *= std::pow(settings.fade, double(num_steps));
    trusted = trust.value();
    is_due = all.pays() || is_exploring();
  }

  // Return whether the budget allows a trial.
  bool is_exploring() const { return left >= least_budget(); }

  // Return whether this step tries a request that does not pay.
  bool may_try(const SavedShare& share) const {
    return is_exploring() || (share.num_own == 0 && earned >= least_budget());
  }

  // Return a request's savings. A new request starts with the average of all.
  std::shared_ptr<SavedShare> of(int64_t id) {
    std::shared_ptr<SavedShare>& own = by_request[id];
    if (!own) {
      double known = std::min(all.num_steps, settings.patience);
      own.reset(new SavedShare{all.saved, known, settings.rate, settings.free});
    }
    return own;
  }

  // Learn the seconds of asking for a request. Only a series of slow calls counts as slow.
  void took(double taken) {
    if (seconds == 0) seconds = taken;
    else seconds += settings.rate * (std::min(taken, 2 * seconds) - seconds);
  }

  // Count a step with `num_roots` roots. `more` counts further parts of the step's time that were
  // lost. If a source pays, other losses, such as catching up with a prompt, are spread over what
  // it saves: they decide about new requests, but not about those that go on. Trials and sources
  // that do not pay lose their budget.
  void add(const std::vector<Outcome>& outcomes, double num_roots, double more) {
    if (!is_warm) {
      is_warm = !outcomes.empty();
      return lose(more / num_roots, false, 0);
    }
    double of_trials = 0, once = 0, found_out = 0, gained = 0;
    bool is_trial = false;
    for (const Outcome& one : outcomes)
      if (one.is_trial) of_trials += one.saved, is_trial = true;
    double lost = more - of_trials;
    if (all.pays() && !is_trial)
      lost = 0, once = more / double(std::max<size_t>(outcomes.size(), 1));
    for (const Outcome& one : outcomes) {
      SavedShare& share = *one.share;
      bool did_pay = share.pays(), is_new = double(share.num_own) < settings.patience;
      if (one.is_trial && share.num_own == 0) found_out -= one.saved;
      if (!one.is_trial) gained += std::max(one.saved, 0.0);
      share.add(one.saved);
      all.add(one.saved - once);
      if (!did_pay || share.pays()) continue;
      // It only seemed to pay: count it as a trial.
      double seemed = -share.saved * std::min(share.num_steps, 1 / settings.rate);
      lost += seemed;
      if (is_new) found_out += seemed;
    }
    if (outcomes.empty()) all.charge(once, settings.patience), found_out = lost;
    double paid = std::min(std::max(std::min(found_out, lost), 0.0) / num_roots, earned);
    earned = std::min(earned - paid + settings.reinvested * gained / num_roots, settings.at_first);
    lose(lost / num_roots, is_trial, paid);
  }

  // Count the step of a source that estimates; `part` is the scope's part of the step, in seconds.
  void settle(double part) {
    if (!is_estimated) return;
    double net = (saved - spent) / part;
    bool is_trial = is_tried || !all.pays();
    if (is_warm) {
      all.add(net);
      if (is_trial) lose(-net, is_trial, 0);
    }
    if (promised != 0) trust.add(kept, promised, is_tried);
    is_warm = true;
    is_estimated = is_tried = false;
    spent = saved = promised = kept = 0;
  }

  SavedShare all;
  std::unordered_map<int64_t, std::shared_ptr<SavedShare>> by_request;
  Trust trust;
  double trusted = 1;  // its value in this step
  double seconds = 0;  // usual seconds of asking for a request
  double left;  // steps' time that trials may lose
  double earned = 0;  // the same, for finding out about new requests
  double loss = 0;  // recent average loss of a trial
  bool is_warm = false;  // false until the first result, which takes far more time than later ones
  // Of the step, in seconds:
  bool is_due = true, is_estimated = false, is_tried = false;
  double spent = 0, saved = 0;  // of a source that estimates
  double promised = 0, kept = 0;  // what it promised and saved, if it was asked

 private:
  double least_budget() const { return std::min(loss, settings.at_first); }

  // Charge the budget, except for what is paid from gains.
  void lose(double lost, bool is_trial, double paid) {
    if (is_trial) loss += (std::max(lost, 0.0) - loss) / 2;
    left = std::max(left - lost + paid, -settings.most_lost);
  }

  const Settings& settings;
  double budget;
};

// A source of the speculator.
struct SourceKind {
  bool is_estimating = false;
  double share = 1;  // of the budget of trials
};

// Statistics of one tenant scope's requests.
class Scope {
 public:
  Scope(const Settings& s, const std::vector<SourceKind>& kinds)
      : kept{{s.scope_rate, s.kept_least, s.kept_most}, {s.scope_rate, s.kept_least, s.kept_most}},
        settings(s),
        kinds(kinds),
        nets{s.free, s.free} {}

  Account& account(int64_t source) {
    if (size_t(source) >= accounts.size()) accounts.resize(source + 1);
    if (!accounts[source]) {
      const SourceKind& kind = kinds[source];
      accounts[source].reset(new Account(settings, kind.share, kind.is_estimating));
    }
    return *accounts[source];
  }

  // Start the account of a model that is replaced by another one again.
  void drop(int64_t source) {
    if (size_t(source) < accounts.size() && accounts[source]) {
      std::destroy_at(accounts[source].get());
      std::construct_at(accounts[source].get(), settings, 1.0, false);
    }
  }

  void forget(int64_t id) {
    for (auto& one : accounts)
      if (one) one->by_request.erase(id);
  }

  void next_step(int64_t step, bool asks_always) {
    int64_t passed = step - considered;
    bool is_worth = may_pay && (std::max(nets[0], nets[1]) > 0 || has_gained);
    number = step, num_roots = 0;
    is_paused = passed < settings.pause && !(is_worth || asks_always);
    if (is_paused) return;
    considered = step, may_pay = false;
    for (auto& one : accounts)
      if (one) one->next_step(passed);
  }

  // Count a step in which sources were considered: `part` is the scope's part of its time,
  // `considering` the time of choosing the sources to ask, both in seconds.
  void settle(double part, double considering) {
    for (auto& one : accounts)
      if (one) one->settle(part);
    double net = (gain - considering) / part;
    gain = 0;
    nets[0] += settings.scope_rate * (net - nets[0]);
    nets[1] += settings.rate * (net - nets[1]);
    has_gained = net > 0;
  }

  // Learn the planning time per request from a step.
  void note_planning(double seconds) {
    if (planning != 0) {
      double weight = 1 - std::pow(1 - settings.rate, double(num_roots));
      planning += (std::min(seconds, 2 * planning) - planning) * weight;
    } else if (is_warm) {
      planning = seconds;
    }
    is_warm = true;
  }

  // Of greedy and of sampled requests: the share of the expected draft tokens that was accepted.
  // Plans prefer tokens whose probability is estimated too high.
  Trust kept[2];
  // Usual seconds per request of planning. The time depends on which sources are asked and on the
  // number of draft tokens, so it is kept per scope.
  double planning = 0;
  double gain = 0;  // seconds that all sources saved in this step, trials aside
  int64_t number = 0, num_roots = 0;  // number of the current step, and its roots
  // If no source may pay, sources are considered only in every `pause`-th step. Likewise if all of
  // them save less than considering them takes, after a step that saved nothing.
  bool may_pay = true, is_paused = false;

 private:
  const Settings& settings;
  const std::vector<SourceKind>& kinds;
  std::vector<std::unique_ptr<Account>> accounts;  // by source
  bool is_warm = false;  // false until the first planning, which takes far longer
  int64_t considered = 0;  // number of the step in which sources were considered last
  // Long and short average share of a step's time that they save, less all that they take
  double nets[2];
  bool has_gained = true;  // in the step in which they were considered last
};

}  // namespace
