// Estimates of a model's step times from measured steps. specserve/speculation/costs.py says what
// they are; tests/speculation/oracle_costs.py is the same in Python.
#include "costs.h"

#include <array>
#include <bit>
#include <cmath>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace {

// The constants of specserve/speculation/constants.py.
struct CostSettings {
  double first_seconds, least_seconds, ridge, hoped, hope, prior, least_share, changed, wrong;
  double too_high;
  int64_t window, rank, known, recent, tile, fine, band, long_ago, fit_every, stale;
};

// Seconds per token of context, per row and token of its context, and per request.
using Added = std::array<double, 3>;

// A measured step, with its time corrected for other load.
struct Sample {
  double context, attended, requests, seconds;

  double operator[](int i) const { return std::array{context, attended, requests, seconds}[i]; }

  // Return the seconds that context, attention and requests added.
  double added(const Added& by) const {
    return by[0] * context + by[1] * attended + by[2] * requests;
  }
};

// Return the seconds of a step's rows only.
double of_rows(const Sample& sample, const Added& by, const CostSettings& s) {
  return std::max(sample.seconds - sample.added(by), s.least_share * sample.seconds);
}

// The size classes of context per row, and of the number of requests.
struct CellKey {
  int context, requests;
  bool operator==(const CellKey&) const = default;
};

// The latest steps of a bucket with similar context per row and number of requests.
struct Cell {
  CellKey key;
  std::deque<Sample> samples = {};
  std::optional<Sample> point = {};  // the estimate, once it is known
  int64_t last, num_new = 0;  // number of the last step; samples since the last long gap

  void keep(int64_t most) {
    while (int64_t(samples.size()) > most) samples.pop_front();
  }

  // Add a step; return whether the estimate has changed. `known` new samples after a long gap
  // replace the old ones.
  bool add(const Sample& sample, const Added& by, int64_t number, const CostSettings& s) {
    num_new = number - last < s.long_ago ? num_new + 1 : 1;
    last = number;
    samples.push_back(sample);
    keep(num_new == s.known ? s.known : s.window);
    if (!point && int64_t(samples.size()) < s.known) return false;
    std::vector<std::pair<double, size_t>> ranked;
    for (size_t i = 0; i < samples.size(); i++)
      ranked.push_back({samples[i].seconds - samples[i].added(by), i});
    auto at = ranked.begin() + int64_t(samples.size()) * s.rank / s.window;
    std::nth_element(ranked.begin(), at, ranked.end());
    const Sample& found = samples[at->second];
    if (point) {
      double usual = of_rows(*point, by, s);
      if (std::abs(of_rows(found, by, s) - usual) <= s.changed * usual) return false;
    }
    point = found;
    return true;
  }
};

// The latest steps of one row bucket.
struct RowBucket {
  std::vector<std::unique_ptr<Cell>> cells = {};
  Cell* latest = nullptr;  // the known cell with the latest step
  double estimate = 0;  // seconds of the rows only; 0 until it is known
  int64_t last = 0;  // number of the step that was last added to `latest`
  double kept = 0;  // the estimate of an earlier start, or of start-up
  int64_t unproven = 0;  // number of further steps that must contradict `kept`
  std::optional<double> fastest = {};  // the result of `least`, until a change

  Cell* find(const CellKey& key) {
    for (auto& cell : cells)
      if (cell->key == key) return cell.get();
    return nullptr;
  }

  Cell& cell(const CellKey& key, const CostSettings& s) {
    if (Cell* found = find(key)) return *found;
    cells.push_back(std::make_unique<Cell>(Cell{.key = key, .last = -s.long_ago}));
    return *cells.back();
  }

  // Add a step with its number; return whether the estimate has changed.
  bool add(const CellKey& key, const Sample& sample, const Added& by, int64_t number,
           const CostSettings& s) {
    fastest.reset();
    Cell& own = cell(key, s);
    bool has_changed = own.add(sample, by, number, s);
    if (!own.point) return !latest;  // a few steps may count, see `StepCosts::fill`
    has_changed |= &own != latest;
    latest = &own;
    last = number;
    return has_changed;
  }

  // Use a step of an earlier start.
  void begin_with(const CellKey& key, const Sample& sample, const CostSettings& s) {
    fastest.reset();
    Cell& own = cell(key, s);
    own = Cell{.key = key, .samples = {sample}, .point = sample, .last = -s.long_ago};
    latest = &own;
  }

  // Return the seconds of its fastest step; 0 if there is none.
  double least(const Added& by, const CostSettings& s) {
    if (!fastest) {
      double found = HUGE_VAL;
      for (auto& cell : cells)
        for (const Sample& sample : cell->samples) found = std::min(found, of_rows(sample, by, s));
      fastest = found == HUGE_VAL ? 0 : found;
    }
    return *fastest;
  }

  // Drop cells with few steps that are old.
  void forget_stale(int64_t number, const CostSettings& s) {
    fastest.reset();
    std::erase_if(cells, [&](auto& cell) {
      return int64_t(cell->samples.size()) < s.window && number - cell->last >= s.stale;
    });
    latest = nullptr;
    for (auto& cell : cells)
      if (cell->point && (!latest || cell->last > latest->last)) latest = cell.get();
  }

  // Return whether this step completes a series of first steps that contradict stored costs.
  bool contradicts(double ratio, const CostSettings& s) {
    if (unproven == 0) return false;
    bool is_far = !(1 / s.wrong < ratio && ratio < s.wrong);
    unproven = is_far ? unproven - 1 : 0;
    return is_far && unproven == 0;
  }
};

// The normal equations of a fit; the last column is the right side.
using Sums = std::array<std::array<double, 4>, 3>;

// Add a bucket's part of the normal equations, and squares of the unknowns' sizes relative to the
// step's time. Each sample has a number of steps as weight.
void add_differences(Sums& sums, Added& sizes, const RowBucket& bucket) {
  double whole = 0;
  std::array<double, 4> usual{};
  auto each_known = [&](auto use) {
    for (auto& cell : bucket.cells)
      if (const auto& at = cell->point)
        use(double(cell->samples.size()) / (at->seconds * at->seconds), *at);
  };
  int64_t num = 0;
  each_known([&](double weight, const Sample& at) {
    num++;
    whole += weight;
    for (int i = 0; i < 4; i++) usual[i] += weight * at[i];
  });
  if (num < 2) return;
  for (double& value : usual) value /= whole;
  for (int i = 0; i < 3; i++) sizes[i] += (usual[i] / usual[3]) * (usual[i] / usual[3]);
  each_known([&](double weight, const Sample& at) {
    for (int i = 0; i < 3; i++)
      for (int k = 0; k < 4; k++) sums[i][k] += weight * (at[i] - usual[i]) * (at[k] - usual[k]);
  });
}

// Solve the equations of the unknowns in `kept` by elimination with pivots.
std::vector<double> eliminated(const Sums& sums, const std::vector<int>& kept) {
  size_t n = kept.size();
  std::vector<std::vector<double>> a(n, std::vector<double>(n + 1));
  for (size_t i = 0; i < n; i++) {
    for (size_t k = 0; k < n; k++) a[i][k] = sums[kept[i]][kept[k]];
    a[i][n] = sums[kept[i]][3];
  }
  for (size_t i = 0; i < n; i++) {
    size_t best = i;
    for (size_t k = i + 1; k < n; k++)
      if (std::abs(a[k][i]) > std::abs(a[best][i])) best = k;
    std::swap(a[i], a[best]);
    for (size_t k = i + 1; k < n; k++) {
      double factor = a[k][i] / a[i][i];
      for (size_t j = i; j <= n; j++) a[k][j] -= factor * a[i][j];
    }
  }
  std::vector<double> found(n);
  for (size_t i = n; i-- > 0;) {
    double rest = a[i][n];
    for (size_t k = i + 1; k < n; k++) rest -= a[i][k] * found[k];
    found[i] = rest / a[i][i];
  }
  return found;
}

// Solve the equations; leave out unknowns that would be below 0.
void solve(const Sums& sums, std::vector<int> kept, Added& out) {
  while (!kept.empty()) {
    std::vector<double> found = eliminated(sums, kept);
    auto worst = std::min_element(found.begin(), found.end());
    if (*worst >= 0) {
      for (size_t i = 0; i < kept.size(); i++) out[kept[i]] = found[i];
      return;
    }
    kept.erase(kept.begin() + (worst - found.begin()));
  }
}

class StepCosts {
 public:
  StepCosts(const CostSettings& s, const int64_t* first, int64_t n, double per_token)
      : s(s), edges(first, first + n), per_token(per_token) {
    by_edge.resize(n);
    least_by_edge.resize(n);
    known.resize(n);
    by_rows.resize(edges.back() + 1);
    least_by_rows.resize(edges.back() + 1);
    reset();
  }

  // Drop all steps.
  void reset() {
    buckets.clear();
    buckets.resize(edges.size());
    has_steps = false;
    num_steps = fit_at = 0;
    added = {per_token, 0, 0};
    is_fitted = true;
    ratios.clear();
    slowdown = 1;
    fill();
  }

  bool is_sound(const Sample& one) const {
    auto fits = [](double value) { return 0 <= value && value < 1e15; };
    return fits(one.context) && fits(one.attended) && fits(one.requests) &&
           s.least_seconds <= one.seconds && one.seconds < 1e6;
  }

  // Learn from a measured step.
  void observe(int64_t rows, Sample sample) {
    if (!is_sound(sample)) return;
    sample = at_edge(rows, sample);
    RowBucket& bucket = buckets[place(rows)];
    if (bucket.kept != 0 && bucket.unproven &&
        bucket.contradicts(sample.seconds / (bucket.kept + sample.added(added)), s))
      reset();
    has_steps = true;
    num_steps++;
    if (num_steps % s.stale == 0) {
      // If few, old steps were slow by chance, plans have avoided the edge since, and no new step
      // would correct it.
      for (RowBucket& each : buckets) each.forget_stale(num_steps, s);
      fill();
    }
    learn(rows, sample);
  }

  // Use the steps of an earlier start; ignore unsound ones, and sizes that have no bucket.
  void begin_with(int64_t edge, const Sample& sample) {
    size_t at = place(edge);
    if (edges[at] != edge || !is_sound(sample)) return;
    has_steps = true;
    buckets[at].begin_with(key_of(edge, sample), sample, s);
  }

  void begin() {
    fit();
    fill();
    doubt();
  }

  // From now on, first steps that contradict the present estimates drop them.
  void doubt() {
    for (RowBucket& bucket : buckets)
      if (bucket.estimate != 0) bucket.kept = bucket.estimate, bucket.unproven = s.known;
  }

  // Write the edge and the columns of each known step, if there is room; return their number.
  int64_t points(int64_t room, double* out) const {
    int64_t found = 0;
    for (size_t i = 0; i < edges.size(); i++)
      for (auto& cell : buckets[i].cells)
        if (const auto& at = cell->point; at && found++ < room)
          for (double value : {double(edges[i]), at->context, at->attended, at->requests,
                               at->seconds})
            *out++ = value;
    return found;
  }

  // Return whether fewer than `known` steps have shown a known cost lately.
  bool is_stale(int64_t rows) const {
    const RowBucket& bucket = buckets[place(rows)];
    if (!bucket.latest) return false;
    int64_t num = bucket.latest->num_new;
    return num_steps - bucket.last >= s.long_ago || (0 < num && num < s.known);
  }

  Costs columns{};  // for plans; always up to date

  void publish() {
    columns = {by_rows.data(), least_by_rows.data(), edges.data(), known.data(), few.data(),
               int64_t(by_rows.size()) - 1, int64_t(edges.size()), int64_t(few.size()), s.fine,
               added[0], added[1], added[2], slowdown, by_edge.data(), num_steps, has_steps};
  }

  std::vector<int64_t> few;

 private:
  // More rows than the last edge count as the last.
  size_t place(int64_t rows) const {
    size_t found = std::lower_bound(edges.begin(), edges.end(), rows) - edges.begin();
    return std::min(found, edges.size() - 1);
  }

  CellKey key_of(int64_t rows, const Sample& one) const {
    auto size = uint64_t(one.attended / double(rows)) / uint64_t(s.band);
    return {int(std::bit_width(size)), int(std::bit_width(uint64_t(one.requests)))};
  }

  // The relative step time by rows that is assumed until steps show it.
  double shape(int64_t rows) const { return 1 + double(rows) / s.ridge; }

  // Return a sample of many rows as one of its bucket's right edge.
  Sample at_edge(int64_t rows, Sample sample) const {
    if (rows <= s.fine || rows >= edges.back()) return sample;
    double longer = shape(edges[place(rows)]) / shape(rows) - 1;
    sample.seconds += longer * std::max(sample.seconds - sample.added(added), 0.0);
    return sample;
  }

  void learn(int64_t rows, Sample sample) {
    size_t at = place(rows);
    CellKey key = key_of(rows, sample);
    RowBucket& bucket = buckets[at];
    Cell* cell = bucket.find(key);
    bool was_known = cell && cell->point;
    // A cell that was not measured lately shows the cost of context, but no load. Slower steps of
    // fewer rows may have raised the estimate, which shows nothing about load either.
    if (cell && cell->num_new >= s.known)
      compare(sample.seconds / (std::min(by_edge[at], bucket.estimate) + sample.added(added)));
    sample.seconds /= slowdown;
    bool has_changed = bucket.add(key, sample, added, num_steps, s);
    is_fitted = is_fitted && !has_changed;
    bool is_new = !was_known && bucket.find(key)->point;
    if (!is_fitted && (is_new || num_steps >= fit_at)) {
      fit();
      has_changed = true;
    }
    if (has_changed) fill();
  }

  // Update the slowdown from a step's measured to estimated seconds. It is the lowest ratio of the
  // latest steps: it rises late and falls at once. It is never below 1: then all estimates are too
  // high, and are scaled.
  void compare(double ratio) {
    ratios.push_back(ratio);
    if (int64_t(ratios.size()) > s.recent) ratios.pop_front();
    bool is_full = int64_t(ratios.size()) == s.recent;
    slowdown = is_full ? std::max(1.0, *std::min_element(ratios.begin(), ratios.end())) : 1;
    if (ratio >= s.too_high || int64_t(ratios.size()) < s.known) return;
    double most = *std::max_element(ratios.end() - s.known, ratios.end());
    if (most >= s.too_high) return;
    scale(most);
    ratios.clear();
    fill();
  }

  void scale(double factor) {
    auto scaled = [&](Sample& one) {
      one.seconds = std::max(s.least_seconds, one.seconds * factor);
    };
    for (RowBucket& bucket : buckets)
      for (auto& cell : bucket.cells) {
        for (Sample& one : cell->samples) scaled(one);
        if (cell->point) scaled(*cell->point);
      }
    change_added({added[0] * factor, added[1] * factor, added[2] * factor});
  }

  // Set the seconds of context and requests, on which all seconds of rows depend.
  void change_added(const Added& by) {
    added = by;
    for (RowBucket& bucket : buckets) bucket.fastest.reset();
  }

  // Fit the cost of context and requests by least squares of relative errors, with no value below
  // 0. Only steps of one bucket are compared, so the cost of rows has no effect. Values that no
  // bucket shows remain. Each measured step keeps at least `least_share` for rows.
  void fit() {
    fit_at = num_steps + s.fit_every;
    is_fitted = true;
    Sums sums{};
    Added sizes{}, found = added;
    for (const RowBucket& bucket : buckets) add_differences(sums, sizes, bucket);
    std::vector<int> shown;
    for (int i = 0; i < 3; i++)
      if (sums[i][i] > 0) shown.push_back(i), found[i] = 0;
    double prior = s.prior * (sizes[0] + sizes[1] / (s.ridge * s.ridge));
    sums[0][0] += prior;
    sums[1][1] += prior * s.ridge * s.ridge;
    sums[2][2] += s.prior * sizes[2];
    solve(sums, shown, found);
    double most = 1;
    for (const RowBucket& bucket : buckets)
      for (auto& cell : bucket.cells)
        if (double by = cell->point ? cell->point->added(found) : 0; by > 0)
          most = std::min(most, (1 - s.least_share) * cell->point->seconds / by);
    change_added({found[0] * most, found[1] * most, found[2] * most});
  }

  // An edge whose seconds are known.
  struct Known {
    int64_t edge, last;
    double seconds, lowest;
  };

  // Estimate every edge: known, between neighbors, or beyond the last known one with `ridge`. Below
  // the first known edge a few steps also count, because prompt steps show little about steps with
  // only roots.
  void fill() {
    std::vector<Known> found;
    bool has_known = false;
    for (size_t i = 0; i < edges.size(); i++) {
      RowBucket& bucket = buckets[i];
      bucket.estimate = bucket.latest ? of_rows(*bucket.latest->point, added, s) : 0;
      known[i] = bucket.estimate > 0;
      double least = bucket.least(added, s);
      if (known[i]) found.push_back({edges[i], bucket.last, bucket.estimate, least});
      else if (!has_known && least != 0) found.push_back({edges[i], num_steps, least, least});
      has_known |= known[i] != 0;
    }
    set_in_order(found);
    if (found.empty()) found.push_back({1, 0, s.first_seconds, 0});
    double hoped = HUGE_VAL;
    for (size_t i = edges.size(); i-- > 0;) {
      by_edge[i] = between(edges[i], found);
      hoped = std::min({hoped, least(i, found), by_edge[i]});
      least_by_edge[i] = hoped;
    }
    spread(by_edge, by_rows);
    spread(least_by_edge, least_by_rows);
  }

  // Let seconds never fall with rows, nor be below the edge's `lowest`.
  //
  // Other load makes no step faster. An estimate above another of more rows is too high, or the
  // other is too low; the latest measurement wins. Measured steps bound the result: more rows cost
  // at least as much as the fastest steps of fewer rows.
  static void set_in_order(std::vector<Known>& found) {
    std::vector<Known*> latest, set;  // latest first; those set so far, by edge
    for (Known& one : found) latest.push_back(&one);
    auto is_later = [](Known* a, Known* b) { return a->last > b->last; };
    std::stable_sort(latest.begin(), latest.end(), is_later);
    for (Known* one : latest) {
      auto is_below = [](Known* a, Known* b) { return a->edge < b->edge; };
      auto above = std::lower_bound(set.begin(), set.end(), one, is_below);
      if (above != set.begin()) one->seconds = std::max(one->seconds, (*(above - 1))->seconds);
      if (above != set.end()) one->seconds = std::min(one->seconds, (*above)->seconds);
      set.insert(above, one);
    }
    double least = 0;
    for (Known& one : found) {
      least = std::max({least, one.seconds, one.lowest});
      one.seconds = least;
    }
  }

  double between(int64_t edge, const std::vector<Known>& found) const {
    size_t at = 0;
    while (at < found.size() && found[at].edge < edge) at++;
    if (at == found.size()) return found.back().seconds * shape(edge) / shape(found.back().edge);
    const Known& above = found[at];
    if (above.edge == edge) return above.seconds;
    if (at == 0) return above.seconds * shape(edge) / shape(above.edge);
    const Known& below = found[at - 1];
    double part = double(edge - below.edge) / double(above.edge - below.edge);
    return below.seconds + part * (above.seconds - below.seconds);
  }

  // Return the least possible cost of an edge that is not known.
  //
  // Below all known edges, a row costs no less than a row of the next known one. Between two known
  // edges, rows of the same tile are free, and others cost half of the expected difference. Beyond
  // the last known edge, rows cost half of the previous slope, up to `hope` times the known rows.
  double least(size_t i, const std::vector<Known>& found) {
    int64_t edge = edges[i];
    size_t at = 0;
    while (at < found.size() && found[at].edge <= edge) at++;
    double seen = buckets[i].least(added, s) * s.hoped;
    if (at == 0)
      return std::max(seen, found[0].seconds * double(edge) / double(found[0].edge));
    const Known& below = found[at - 1];
    if (edge == below.edge) return below.seconds;
    if (at < found.size()) {
      auto tile = [&](int64_t rows) { return (rows + s.tile - 1) / s.tile; };
      bool is_free = tile(edge) == tile(below.edge);  // not certain
      double most = is_free ? below.seconds : between(edge, found);
      return std::max(seen, (below.seconds + most) / 2);
    }
    if (double(edge) > s.hope * double(below.edge))
      return below.seconds * shape(edge) / shape(below.edge);
    double slope = 0;
    if (at > 1)
      slope = (below.seconds - found[at - 2].seconds) / double(below.edge - found[at - 2].edge);
    return std::max(seen, below.seconds + slope / 2 * double(edge - below.edge));
  }

  // Set the seconds by number of rows: equal within a bucket up to `fine` rows, and beyond on a
  // line between two edges.
  void spread(const std::vector<double>& from, std::vector<double>& out) const {
    size_t at = 0;
    for (int64_t rows = 0; rows < int64_t(out.size()); rows++) {
      if (rows > edges[at]) at++;
      out[rows] = from[at];
      if (rows <= s.fine || rows == edges[at]) continue;
      double slope = (from[at] - from[at - 1]) / double(edges[at] - edges[at - 1]);
      out[rows] = slope * double(rows - edges[at - 1]) + from[at - 1];
    }
  }

  const CostSettings s;
  const std::vector<int64_t> edges;
  const double per_token;  // seconds of a token of context, until steps show it
  std::vector<RowBucket> buckets;  // by edge
  std::vector<double> by_edge, least_by_edge, by_rows, least_by_rows;
  std::vector<int8_t> known;
  bool has_steps = false;  // true once a step was measured
  int64_t num_steps = 0;
  Added added{};
  bool is_fitted = true;  // `added` fits the known steps
  int64_t fit_at = 0;  // number of the step after which the next fit may run
  std::deque<double> ratios;  // measured to estimated seconds of the latest steps
  double slowdown = 1;  // current slowdown by other load, at least 1
};

}  // namespace

extern "C" StepCosts* specserve_costs(const CostSettings* settings, const int64_t* edges,
                                      int64_t num_edges, const int64_t* few, int64_t num_few,
                                      double per_token) {
  auto found = new StepCosts(*settings, edges, num_edges, per_token);
  found->few.assign(few, few + num_few);
  found->publish();
  return found;
}

extern "C" void specserve_free_costs(StepCosts* costs) { delete costs; }

// Return the estimates; the address stays the same.
extern "C" const Costs* specserve_cost_columns(const StepCosts* costs) { return &costs->columns; }

extern "C" void specserve_reset_costs(StepCosts* costs) {
  costs->reset();
  costs->publish();
}

extern "C" void specserve_observe_step(StepCosts* costs, int64_t rows, double context,
                                       double attended, double requests, double seconds) {
  costs->observe(rows, {context, attended, requests, seconds});
  costs->publish();
}

// Begin with steps of an earlier start: [n, 5] of edge, context, attended, requests and seconds.
extern "C" void specserve_begin_costs(StepCosts* costs, int64_t n, const double* steps) {
  for (; n > 0; n--, steps += 5)
    costs->begin_with(int64_t(steps[0]), {steps[1], steps[2], steps[3], steps[4]});
  costs->begin();
  costs->publish();
}

extern "C" void specserve_doubt_costs(StepCosts* costs) { costs->doubt(); }

extern "C" int64_t specserve_cost_points(const StepCosts* costs, int64_t room, double* out) {
  return costs->points(room, out);
}

extern "C" int64_t specserve_is_stale(const StepCosts* costs, int64_t rows) {
  return costs->is_stale(rows);
}

// Return the estimated seconds of a step with these rows.
extern "C" double specserve_cost_of(const Costs* costs, int64_t rows, double context,
                                    double attended, double requests, int64_t is_hopeful) {
  if (rows == 0) return 0;
  Step step{};
  step.rows = rows;
  step.context = context;
  step.requests = requests;
  step.attended = attended;
  return StepTimes(*costs, step, is_hopeful != 0).of(0);
}

// Write the estimated seconds of a step with each of some numbers of draft tokens.
extern "C" void specserve_cost_of_each(const Costs* costs, const Step* step, int64_t n,
                                       const int64_t* sizes, int64_t is_hopeful, double* out) {
  StepTimes times(*costs, *step, is_hopeful != 0);
  StepTimes plain(*costs, without_prompts(*step), is_hopeful != 0);
  bool has_prompts = step->prompt_rows && step->num_roots;
  double none = times.of(0), roots = plain.of(0);
  for (int64_t i = 0; i < n; i++) {
    out[i] = times.of(sizes[i]);
    if (has_prompts && sizes[i]) out[i] = std::max(out[i], none + plain.of(sizes[i]) - roots);
  }
}
