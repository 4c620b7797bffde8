// The state of drafter `auto` from step to step: it chooses the sources to ask for each request, and
// counts what they took and saved. A speculator in Python makes the calls of a step.
#include "plans.h"

#include <chrono>

namespace {

constexpr int64_t MAX_DEPTH = 64;  // depths of draft tokens
constexpr int64_t ROOM = 1 << 12;  // draft tokens of a step that are selected

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A root of a step, in the order of the step.
struct RootRow {
  Root* root;
  int64_t draft_limit, has_output, has_rules;
  const int32_t* text;
  int64_t size;
};

// What Python reads of a step. `due` [num_due, 3] has considered roots with estimates that Python
// makes: their places among these and in the step, and bits of the sources. `asked` [num_asked, 3]
// has roots that ask sources: their places in the step, bits of the sources that Python asks, and
// the most draft tokens to ask for. `found` [num_found, 5] has results: the place of a request, its
// source, and numbers of draft tokens, proposed in C++, verified, and accepted. `sums` [num_sums] has
// those of sources: their numbers, `SourceSums`, how many depths follow, and accepted tokens by
// depth.
struct Told {
  int64_t num_scopes, num_paused, num_due, num_asked, num_selected, num_found, num_sums;
  double kept;  // share of expected draft tokens that is accepted, of the roots
  double asking;  // seconds of sources in C++
  Prices prices;
  const int64_t *due, *asked, *found;
  const double* sums;
  double sizes[8];
  Outputs out;
};

// The result of a request: the size of its draft, and the numbers of accepted nodes and of tokens.
struct ResultRow {
  Root* root;
  int64_t size, num_accepted, num_tokens;
};

// What a step so far took, in seconds.
struct Taken {
  double planning;  // of all roots, sources and models aside
  double considering;
};

// A model that was run in the step.
struct ModelRun {
  int64_t source, is_trial_alone;
  double seconds, catching_up;
};

// Work of a source for some of the step's roots.
struct Work {
  int64_t source;
  bool is_extension;
  double each;  // seconds per request
  std::vector<Root*> roots;
};

// What was counted of a source in a step: draft tokens, and accepted ones by depth.
struct SourceSums {
  double proposed, seconds;  // of sources in C++
  double verified, accepted, saved_seconds;
  double by_depth[MAX_DEPTH];
};

struct Observed {
  void* trie;
  int64_t size;
};

class Plans {
 public:
  explicit Plans(const Settings& s) : settings(s) {
    told.out = {values.data(), selected[0].data(), selected[1].data(), nullptr, nullptr,
                {columns[0].data(), columns[1].data(), columns[2].data(), columns[3].data(),
                 codes.data()},
                told.sizes};
  }

  void use(int64_t source, SourceKind kind) {
    if (size_t(source) >= kinds.size()) kinds.resize(source + 1);
    sums.resize(kinds.size());
    kinds[source] = kind;
  }

  // Begin a step: find its roots that are considered, and estimate for them. If Python has no
  // estimates to make, ask sources.
  void begin(const RootRow* rows, int64_t n, int64_t number, const Step& begun,
             const Costs& costs) {
    clear();
    step = begun;
    due_rows.clear();
    asked_rows.clear();
    for (int64_t i = 0; i < n; i++) {
      Root& root = *rows[i].root;
      Scope& scope = root.scope;
      if (scope.number != number) {
        scope.next_step(number, asks_always);
        scopes.push_back(&scope);
      }
      scope.num_roots++;
      if (scope.is_paused) continue;
      if (rows[i].draft_limit) {
        root.begin_step(rows[i].draft_limit);
        root.has_output = rows[i].has_output != 0;
        root.has_rules = rows[i].has_rules != 0;
        root.text = rows[i].text;
        root.size = rows[i].size;
        considered.push_back(&root);
        places.push_back(i);
      }
      scope.may_pay = scope.may_pay || root.may_pay();
    }
    told.num_scopes = int64_t(scopes.size());
    told.num_paused = num_paused();
    if (told.num_paused < told.num_scopes) weigh_tokens(step, costs);
    for (size_t i = 0; i < considered.size(); i++)
      if (int64_t bits = estimate(*considered[i])) {
        for (int64_t value : {int64_t(i), places[i], bits}) due_rows.push_back(value);
      }
    tell();
    if (due_rows.empty()) ask();
  }

  int64_t num_paused() const {
    return std::count_if(scopes.begin(), scopes.end(), [](Scope* s) { return s->is_paused; });
  }

  // Let sources in C++ estimate for a request. Return the bits of others whose estimates are due, by
  // their place.
  int64_t estimate(Root& root) const {
    int64_t found = 0;
    for (size_t k = 0; k < root.served.size(); k++) {
      Served& one = root.served[k];
      if (one.means != Means::ESTIMATES || !(one.account->is_due || asks_always)) continue;
      if (!one.native) {
        found |= int64_t(1) << k;
        continue;
      }
      double start = now();
      set_estimate(one, one.native->expect(root.id, root.text, root.size));
      one.account->spent += now() - start;
    }
    return found;
  }

  static void set_estimate(Served& one, double expected) {
    one.estimate = std::max(expected, 0.0);
    one.account->is_estimated = true;
  }

  void weigh_tokens(const Step& step, const Costs& costs) {
    StepTimes times(costs, step, false), plain(costs, without_prompts(step), false);
    double none = times.of(0), roots = plain.of(0);
    part = roots / double(std::max<int64_t>(step.num_roots, 1));
    double least = HUGE_VAL;
    for (int64_t k = 0; k < costs.num_few; k++) {
      double seconds = times.of(costs.few[k]);
      if (step.prompt_rows && step.num_roots)
        seconds = std::max(seconds, none + plain.of(costs.few[k]) - roots);
      least = std::min(least, (seconds - none) / double(costs.few[k]));
    }
    row_share = least / part;
  }

  // Return the seconds that draft tokens save beyond the time of their rows, if so many are
  // expected to be accepted. Each is right with the same probability if the one before is.
  double promise(double expected) const {
    double p = expected / (1 + expected), number = double(settings.max_nodes);
    if (p <= row_share) return 0;
    // Those whose probability, a power of p, is above what a row takes
    if (row_share > 0)
      number = std::min(std::ceil(std::log(row_share) / std::log(p)) - 1, number);
    return part * (expected * (1 - std::pow(p, number)) - number * row_share);
  }

  // Choose the sources to ask for each considered root, and ask those in C++.
  //
  // A source that estimates is asked if it promises to save more than it takes, and if one of them
  // promises more than planning takes. Others are asked if they have saved time. All are asked as a
  // trial if that is due. Sources are asked for about twice the draft tokens that were lately
  // verified, or for `least` if that is more.
  void ask() {
    roots.clear();
    std::vector<int64_t>& at = asked_rows;  // first the places of the roots
    at.clear();
    for (size_t i = 0; i < considered.size(); i++) {
      ask_for(*considered[i]);
      if (!considered[i]->num_asked) continue;
      roots.push_back(considered[i]);
      at.push_back(places[i]);
    }
    int64_t n = int64_t(roots.size()), least = settings.least_asked / std::max<int64_t>(n, 1);
    for (Root* root : roots) {
      int64_t usual = std::max(2 + 2 * int64_t(root->lately), least);
      root->limit = std::min({root->draft_limit, root->max_depth, usual});
      specserve_clear_tries(&root->trie, 1);
    }
    ask_native();
    at.resize(3 * n);
    for (int64_t i = n; i-- > 0;) {
      Root& root = *roots[i];
      int64_t bits = 0;
      for (size_t k = 0; k < root.served.size(); k++)
        if (root.served[k].is_asked && !root.served[k].is_answered) bits |= int64_t(1) << k;
      at[3 * i] = at[i];
      at[3 * i + 1] = bits;
      at[3 * i + 2] = root.limit;
    }
    tell();
  }

  // Select draft tokens, find the best number of them, and cut the drafts.
  void weigh(int64_t most, double spent, const Costs& costs) {
    step.spent = spent;
    step.kept = told.kept;
    limit();
    told.num_selected =
        specserve_weigh(limits.data(), behind.data(), int64_t(limits.size()), std::min(most, ROOM),
                        settings.least_value, settings.least_expected, &step, &costs, &told.out);
    keep();
  }

  // Select draft tokens.
  void select(int64_t most) {
    limit();
    told.num_selected =
        specserve_select(limits.data(), behind.data(), int64_t(limits.size()), std::min(most, ROOM),
                         settings.least_value, &told.out);
  }

  // Cut the drafts of the first `size` selected draft tokens.
  void cut(int64_t size) {
    specserve_cut(limits.data(), int64_t(limits.size()), size, settings.least_expected, &told.out);
    keep();
  }

  // Return the average share of expected draft tokens that is accepted, of the step's roots.
  double kept() const {
    double sum = 0;
    for (Root* root : roots) sum += root->kept.value();
    return roots.empty() ? 1 : sum / double(roots.size());
  }

  // Note the work of a source for all roots that ask it, or that may extend paths by it.
  void took(int64_t source, double seconds, bool is_extension, bool is_native) {
    Work own{source, is_extension, 0, {}};
    for (Root* root : roots) {
      Served* its = root->find(source);
      if (its && (is_extension || (its->is_asked && its->is_answered == is_native)))
        own.roots.push_back(root);
    }
    if (own.roots.empty()) return;
    own.each = seconds / double(own.roots.size());
    if (!is_extension) {
      std::vector<Account*> known;
      for (Root* root : own.roots) {
        Account* account = root->find(source)->account;
        if (std::find(known.begin(), known.end(), account) != known.end()) continue;
        known.push_back(account);
        account->took(own.each);
      }
    }
    work.push_back(std::move(own));
  }

  // Count the results of requests, with the prices of the step.
  void learn(const ResultRow* rows, int64_t n, const int32_t* nodes, const int32_t* tokens) {
    const Prices prices = told.prices;
    found.clear();
    static thread_local std::vector<Observed> observed;
    observed.clear();
    const int32_t* after = tokens;
    for (int64_t i = 0; i < n; i++) {
      const ResultRow& row = rows[i];
      Root& root = *row.root;
      root.lately += settings.lately * (double(row.size) - root.lately);
      root.note_trials(*after, prices.saved);
      root.count(row.size, nodes, row.num_accepted, prices);
      add_sums(root, nodes, row.num_accepted);
      for (const Served& one : root.served)
        if (one.num_proposed || one.num_verified)
          for (int64_t x : {i, one.source, one.num_proposed, one.num_verified, one.num_accepted})
            found.push_back(x);
      if (root.expected != 0) root.kept.add(double(row.num_accepted), root.expected, false);
      else root.kept.fade();
      observed.push_back({root.trie, row.num_tokens});
      nodes += row.num_accepted;
      after += row.num_tokens;
    }
    specserve_observe_each(observed.data(), n, tokens);
    told.num_found = int64_t(found.size()) / 5;
    told.found = found.data();
    tell_sums();
  }

  // Find what an accepted draft token of the step saved, and what a row took.
  void price(const Costs& costs, int64_t num_drafts, double seconds) {
    StepTimes times(costs, step, false), plain(costs, without_prompts(step), false);
    double none = times.of(0), drafted = times.of(num_drafts), of_roots = plain.of(0);
    if (step.prompt_rows && step.num_roots && num_drafts)
      drafted = std::max(drafted, none + plain.of(num_drafts) - of_roots);
    double without = seconds * none / drafted;
    // Bound the first estimates: draft tokens took time, but not more per row than other rows.
    without = std::max(without, seconds * double(step.rows) / double(step.rows + num_drafts));
    without = std::min(without, seconds);
    // An accepted token spares later steps a root's part of them, but no rows of prompts.
    told.prices.saved = without * of_roots / none / double(step.num_roots);
    told.prices.row = num_drafts ? (seconds - without) / double(num_drafts) : 0;
  }

  // Update the accounts of sources after a step.
  void settle(const Taken& taken) {
    double of_token = part, saved = told.prices.saved;
    if (!roots.empty() && saved != 0) {
      of_token = saved;
      double planning = taken.planning / double(roots.size());
      settle_sources(planning, of_token);
      note_planning(planning);
      for (size_t k = 0; k < models.size(); k++) settle_model(models[k], k, planning, of_token);
    }
    int64_t num_roots = 0;
    for (Scope* scope : scopes)
      if (!scope->is_paused) num_roots += scope->num_roots;
    double each = taken.considering / double(std::max<int64_t>(num_roots, 1));
    for (Scope* scope : scopes)
      if (!scope->is_paused)
        scope->settle(of_token * double(scope->num_roots), each * double(scope->num_roots));
    clear();
  }

  // Forget the step.
  void clear() {
    for (auto* each : {&considered, &roots}) each->clear();
    scopes.clear();
    places.clear();
    work.clear();
    models.clear();
    told.prices = {};
  }

  const Settings settings;
  std::vector<SourceKind> kinds;  // by source
  bool asks_always = false;  // whether or not draft tokens are worth the planning
  std::vector<Root*> considered, roots;  // of the step; `roots` are those that ask a source
  std::vector<Scope*> scopes;  // of the step
  std::vector<ModelRun> models;  // those that were run in it
  Step step{};
  Told told{};
  double part = 0;  // seconds that an accepted draft token saves, expected
  double row_share = 0;  // time of a row, relative to that

 private:
  void ask_for(Root& root) {
    double best = 0;
    static thread_local std::vector<Served*> unsure;
    unsure.clear();
    for (Served& one : root.served) {
      if (one.means != Means::ESTIMATES || one.estimate < 0) continue;
      if (one.estimate <= 0 && !asks_always) continue;
      double promised = promise(one.estimate);
      double net = one.account->trusted * promised - one.account->seconds;
      one.promised = promised;
      if (net > 0) {
        best = std::max(best, net);
        unsure.push_back(&one);
      } else if (asks_always || (promised > one.account->seconds && one.account->is_exploring())) {
        root.ask(one, true);
      }
    }
    ask_by_share(root, Means::SHARES);
    bool is_worth = root.num_asked || asks_always || best > root.scope.planning;
    if (root.has_output) ask_by_share(root, Means::MODEL);
    for (Served* one : unsure)
      // Planning may take more time than it saves, but only planning shows that.
      if (is_worth || one->account->is_exploring()) root.ask(*one, !is_worth);
  }

  // Ask sources and models that have an average for each request.
  void ask_by_share(Root& root, Means means) {
    for (Served& one : root.served) {
      if (one.means != means) continue;
      one.share = one.account->of(root.id);
      bool pays = one.share->pays();
      if (pays || one.account->may_try(*one.share)) root.ask(one, !pays);
    }
  }

  void tell() {
    told.num_due = int64_t(due_rows.size()) / 3;
    told.num_asked = int64_t(roots.size());
    told.due = due_rows.data();
    told.asked = asked_rows.data();
    told.kept = kept();
  }

  void tell_sums() {
    of_sources.clear();
    for (size_t k = 0; k < sums.size(); k++) {
      SourceSums& own = sums[k];
      if (own.seconds == 0 && own.verified == 0) continue;
      int64_t depths = MAX_DEPTH;
      while (depths && own.by_depth[depths - 1] == 0) depths--;
      for (double x : {double(k), own.proposed, own.seconds, own.verified, own.accepted,
                       own.saved_seconds, double(depths)})
        of_sources.push_back(x);
      of_sources.insert(of_sources.end(), own.by_depth, own.by_depth + depths);
      own = {};
    }
    told.num_sums = int64_t(of_sources.size());
    told.sums = of_sources.data();
  }

  void ask_native() {
    told.asking = 0;
    for (int64_t source = 0; source < int64_t(kinds.size()); source++) {
      bool is_any = false;
      double start = now();
      for (Root* root : roots) {
        Served* its = root->has_rules ? nullptr : root->find(source);
        if (!its || !its->is_asked || !its->native) continue;
        is_any = its->is_answered = true;
        its->num_proposed = its->native->add(root->id, root->text, root->size, root->limit,
                                             root->trie, its->number);
        sums[source].proposed += double(its->num_proposed);
      }
      if (!is_any) continue;
      double seconds = now() - start;
      told.asking += seconds;
      sums[source].seconds += seconds;
      took(source, seconds, false, true);
    }
  }

  // Set the limits of the roots.
  void limit() {
    limits.clear();
    behind.clear();
    for (Root* root : roots) {
      limits.push_back({root->trie, root->draft_limit, root->max_depth});
      behind.push_back(root->behind);
    }
    counts.resize(roots.size());
    expected.resize(roots.size());
    told.out.counts = counts.data();
    told.out.expected = expected.data();
  }

  // Keep the sources of the drafts' tokens.
  void keep() {
    const uint64_t* code = codes.data();
    for (size_t i = 0; i < roots.size(); code += counts[i++]) {
      roots[i]->codes.assign(code, code + counts[i]);
      roots[i]->expected = counts[i] ? expected[i] : 0;
    }
  }

  void add_sums(Root& root, const int32_t* nodes, int64_t num_accepted) {
    for (Served& one : root.served) one.num_verified = one.num_accepted = 0;
    for (const Group& group : root.groups) {
      double share = group.gain / double(root.num_sources(group.code));
      root.each_source(group.code, [&](Served& its, bool) {
        SourceSums& own = sums[its.source];
        its.num_verified += group.number;
        its.num_accepted += group.accepted;
        own.verified += double(group.number);
        own.accepted += double(group.accepted);
        own.saved_seconds += share;
        for (int64_t d = 0; d < num_accepted; d++)
          own.by_depth[d] += root.codes[nodes[d] - 1] == group.code;
      });
    }
  }

  // Count what sources took and saved. The sources that are asked for a request share its seconds
  // of planning.
  void settle_sources(double planning, double of_token) {
    struct Result {
      Account* account;
      Scope* scope;
      std::vector<Outcome> outcomes;
      double more;  // parts of the step that only trials lose
    };
    std::vector<Result> results;
    for (const Work& own : work)
      for (Root* root : own.roots) {
        Served& its = *root->find(own.source);
        Account& account = *its.account;
        Scope& scope = root->scope;
        if (own.is_extension && its.is_asked) {
          account.spent += own.each;
          scope.gain -= its.is_trial ? 0 : own.each;
          continue;
        }
        double taken = own.each + (its.is_asked ? planning / double(root->num_asked) : 0);
        bool is_trial = its.is_asked && its.is_trial;
        if (!is_trial) scope.gain += its.credit - taken;
        if (its.means == Means::ESTIMATES) {
          account.spent += taken;
          account.saved += its.saved_or_might();
          account.is_tried |= is_trial;
          if (its.is_asked && its.promised != 0) {
            account.promised += its.promised;
            account.kept += its.saved;
          }
        } else if (its.is_asked) {
          double usual = is_trial ? settings.cold * taken : taken;
          auto same = [&](const Result& one) { return one.account == &account; };
          auto at = std::find_if(results.begin(), results.end(), same);
          if (at == results.end()) at = results.insert(at, {&account, &scope, {}, 0});
          double net = (its.saved_or_might() - usual) / of_token;
          at->outcomes.push_back({its.share.get(), net, is_trial});
          at->more += (taken - usual) / of_token;
        }
      }
    for (Result& one : results)
      one.account->add(one.outcomes, double(one.scope->num_roots), one.more);
  }

  // Learn the planning time of scopes from roots for which no model was run.
  void note_planning(double planning) {
    std::vector<Scope*> known;
    for (Root* root : roots) {
      bool has_model = false;
      for (const Served& one : root->served)
        has_model |= one.is_asked && one.means == Means::MODEL;
      if (has_model || std::find(known.begin(), known.end(), &root->scope) != known.end()) continue;
      known.push_back(&root->scope);
      root->scope.note_planning(planning);
    }
  }

  // Note the share of the step's time that a model's levels have saved; `bit` is that of the model.
  void settle_model(const ModelRun& model, int64_t bit, double planning, double of_token) {
    std::vector<Root*> asked, run;
    double seconds = 0;
    auto is_tried = [&](Root* root) { return root->is_tried >> bit & 1; };
    for (Root* root : roots) {
      Served* its = root->find(model.source);
      if (!its || !its->is_asked) continue;
      asked.push_back(root);
      seconds += planning / double(root->num_asked);
      // Levels for a single request, as a trial, take about as long as levels for all requests.
      // They show nothing about the others, so the request is charged its part of a run for all.
      if (is_tried(root) || !model.is_trial_alone) run.push_back(root);
    }
    if (asked.empty()) return;
    seconds += model.seconds;
    double level = seconds / double(asked.size()), num_run = double(run.size());
    double lost = (model.catching_up + seconds - level * num_run) / std::max(num_run, 1.0);
    lost /= of_token;
    std::vector<Scope*> known;
    for (Root* first : run) {
      Scope& scope = first->scope;
      if (std::find(known.begin(), known.end(), &scope) != known.end()) continue;
      known.push_back(&scope);
      std::vector<Outcome> outcomes;
      double more = 0;
      for (Root* root : run) {
        if (&root->scope != &scope) continue;
        Served& its = *root->find(model.source);
        double usual = its.is_trial ? settings.cold * level : level;
        more += lost + (level - usual) / of_token;
        if (root->is_catching_up >> bit & 1) {
          more += usual / of_token;
          continue;
        }
        bool is_trial = its.is_trial || is_tried(root);
        double saved = its.saved_or_might() - usual;
        outcomes.push_back({its.share.get(), saved / of_token, is_trial});
        scope.gain += is_trial ? 0 : saved;
      }
      scope.account(model.source).add(outcomes, double(scope.num_roots), more);
    }
  }

  std::vector<int64_t> places;  // of `considered` in the step
  std::vector<Work> work;
  std::vector<int64_t> due_rows, asked_rows, found;  // see `Told`, also the next ones
  std::vector<double> of_sources;
  std::vector<SourceSums> sums;  // by source, until they are told
  std::vector<Limits> limits;  // by root, as the next ones
  std::vector<double> behind, expected;
  std::vector<int32_t> counts;
  std::vector<double> values = std::vector<double>(ROOM);
  std::vector<int32_t> selected[2] = {std::vector<int32_t>(ROOM), std::vector<int32_t>(ROOM)};
  std::vector<int32_t> columns[4] = {std::vector<int32_t>(ROOM), std::vector<int32_t>(ROOM),
                                     std::vector<int32_t>(ROOM), std::vector<int32_t>(ROOM)};
  std::vector<uint64_t> codes = std::vector<uint64_t>(ROOM);
};

}  // namespace

extern "C" Plans* specserve_plans(const Settings* settings) { return new Plans(*settings); }

extern "C" void specserve_free_plans(Plans* plans) { delete plans; }

// Use a source from now on; `share` is its part of the budget of trials.
extern "C" void specserve_use_source(Plans* plans, int64_t source, int64_t is_estimating,
                                     double share) {
  plans->use(source, {is_estimating != 0, share});
}

extern "C" Scope* specserve_scope(Plans* plans) { return new Scope(plans->settings, plans->kinds); }

extern "C" void specserve_free_scope(Scope* scope) { delete scope; }

extern "C" void specserve_drop_account(Scope* scope, int64_t source) { scope->drop(source); }

extern "C" void specserve_forget_shares(Scope* scope, int64_t id) { scope->forget(id); }

// Read an account, and a request's share: 16 numbers.
extern "C" void specserve_read_account(Scope* scope, int64_t source, int64_t id, double* out) {
  Account& own = scope->account(source);
  auto found = own.by_request.find(id);
  const SavedShare& share = found == own.by_request.end() ? own.all : *found->second;
  for (double value : {own.left, own.earned, own.loss, own.seconds, own.trust.value(),
                       double(own.is_exploring()), double(own.may_pay(id)), own.all.saved,
                       own.all.num_steps, share.saved, share.num_steps, double(share.num_own),
                       own.spent, own.saved, own.trust.saved, own.trust.promised})
    *out++ = value;
}

// Set the budget of trials of an account, and its average of all requests.
extern "C" void specserve_set_account(Scope* scope, int64_t source, double left, double saved) {
  Account& own = scope->account(source);
  own.left = left;
  own.all.saved = saved;
}

// Consider sources in the next step, because a new request may differ from earlier ones.
extern "C" void specserve_expect_more(Scope* scope) { scope->may_pay = true; }

// Read a scope: 6 numbers.
extern "C" void specserve_read_scope(const Scope* scope, double* out) {
  for (double value : {scope->kept[0].value(), scope->kept[1].value(), scope->planning, scope->gain,
                       double(scope->is_paused), double(scope->may_pay)})
    *out++ = value;
}

extern "C" Root* specserve_root(Scope* scope, int64_t id, int64_t is_sampled, int64_t max_depth) {
  return new Root(*scope, id, is_sampled != 0, max_depth);
}

extern "C" void specserve_free_root(Root* root) { delete root; }

// Set the sources that serve a request: [n, 4] of source, number in the calibration, `Means`, and
// the source in C++, if so. Those that have served it keep what they did in a step that is not
// settled.
extern "C" void specserve_bind_root(Root* root, int64_t n, const int64_t* sources) {
  std::vector<Served> served;
  for (int64_t k = 0; k < n; k++, sources += 4) {
    auto* native = reinterpret_cast<NativeSource*>(sources[3]);
    Served* known = root->find(sources[0]);
    served.push_back(known ? *known : Served{sources[0], sources[1], Means(sources[2]), native});
    served.back().account = &root->scope.account(sources[0]);
  }
  root->served = std::move(served);
}

extern "C" void specserve_set_trie(Root* root, void* trie) { root->trie = trie; }

extern "C" const Told* specserve_told(const Plans* plans) { return &plans->told; }

// Update all accounts after the step before, and begin a step.
extern "C" void specserve_begin_step(Plans* plans, double planning, double considering,
                                     const RootRow* rows, int64_t n, int64_t number,
                                     int64_t is_always, const Step* step, const Costs* costs) {
  plans->settle({planning, considering});
  plans->asks_always = is_always != 0;
  plans->begin(rows, n, number, *step, *costs);
}

// Set estimates of a source for considered roots, each of which took so many seconds.
extern "C" void specserve_set_estimates(Plans* plans, int64_t source, int64_t n,
                                        const int64_t* places, const double* expected,
                                        double each) {
  for (int64_t k = 0; k < n; k++) {
    Served& its = *plans->considered[places[k]]->find(source);
    plans->set_estimate(its, expected[k]);
    its.account->spent += each;
  }
}

extern "C" void specserve_ask_sources(Plans* plans) { plans->ask(); }

// Set how far each root that asks sources is behind its target.
extern "C" void specserve_set_behind(Plans* plans, const double* behind) {
  for (Root* root : plans->roots) root->behind = *behind++;
}

extern "C" void specserve_weigh_roots(Plans* plans, int64_t most, double spent, const Costs* costs) {
  plans->weigh(most, spent, *costs);
}

extern "C" void specserve_select_of_roots(Plans* plans, int64_t most) { plans->select(most); }

extern "C" void specserve_cut_roots(Plans* plans, int64_t size) { plans->cut(size); }

extern "C" double specserve_promise(Plans* plans, double part, double row_share, double expected) {
  plans->part = part;
  plans->row_share = row_share;
  return plans->promise(expected);
}

extern "C" void specserve_source_took(Plans* plans, int64_t source, double seconds,
                                      int64_t is_extension) {
  plans->took(source, seconds, is_extension != 0, false);
}

// Count results of a step with so many draft tokens, which took `seconds`.
extern "C" void specserve_learn(Plans* plans, const ResultRow* rows, int64_t n,
                                const int32_t* nodes, const int32_t* tokens, const Costs* costs,
                                int64_t num_drafts, double seconds) {
  plans->price(*costs, num_drafts, seconds);
  plans->learn(rows, n, nodes, tokens);
}

// Note the models that were run in the step, and bits of its roots: for which models they were run
// as a trial only, and which models are still catching up. [n, 2], in the order of the roots.
extern "C" void specserve_note_models(Plans* plans, const ModelRun* models, int64_t n,
                                      const int64_t* bits) {
  plans->models.assign(models, models + n);
  for (Root* root : plans->roots) {
    root->is_tried = uint64_t(*bits++);
    root->is_catching_up = uint64_t(*bits++);
  }
}

extern "C" void specserve_settle_step(Plans* plans, double planning, double considering) {
  plans->settle({planning, considering});
}

extern "C" void specserve_clear_step(Plans* plans) { plans->clear(); }
