// A linear map's arguments, the division of its work among threads, and its epilogues.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "gemm.h"
#include "op.h"

// FLOATS: the output is float for any row type.
enum Epilogue : int64_t { PLAIN, ADD, FLOATS, SILU_MUL, GELU_MUL, CLAMPED_MUL };

struct Linear {
  int64_t is_bf16, domain;
  const void *x, *packed, *bias;  // [R, K]; panels; [N] or [2 N] or null
  void* out;                      // [R, N]; the residual for ADD
  int64_t N, K, epilogue;
  int64_t bits, group, has_zeros, has_offsets;  // of coded weights; bits is 0 for plain ones
  int64_t rounds_rows, has_table;
  int64_t zero, scaling;  // of IntegerShape
  float factor;           // for ADD
  const int32_t* order;   // [R]  rows of x, or null: all
  const float* added;     // [A, columns]  adapter sums; null: none
  const int32_t* places;  // [R]  row of `added`, or -1
  float limit;            // of CLAMPED_MUL

  bool is_gated() const { return epilogue >= SILU_MUL; }
  bool rounds_whole_rows() const {
    return rounds_rows && bits == 8 && group == K && !has_zeros && !has_offsets;
  }
  int64_t num_columns() const { return is_gated() ? 2 * N : N; }
  const float* added_to(int64_t r) const {
    return added && places[r] >= 0 ? added + places[r] * num_columns() : nullptr;
  }
  template <class T> const T* row(int64_t r) const {
    return (const T*)x + (order ? order[r] : r) * K;
  }
  // Return the same map without the first n rows.
  Linear from(int64_t n) const {
    Linear rest = *this;
    int64_t value_bytes = is_bf16 ? 2 : 4;
    if (order) rest.order += n;
    else rest.x = (const char*)x + n * K * value_bytes;
    rest.out = (char*)out + n * N * (epilogue == FLOATS ? 4 : value_bytes);
    if (places) rest.places += n;
    return rest;
  }
};

// Several maps of equal shape, such as experts, each with its own contiguous rows; or a single map.
struct Maps {
  const Linear& each;                   // all rows and biases
  int64_t num_rows;                     // of a single map
  const void* const* packed = nullptr;  // [num_maps]  null: the map is skipped
  const int32_t* begins = nullptr;      // [num_maps + 1]  first rows, and the end
  int64_t num_maps = 1;

  int64_t rows_of(int64_t map) const {
    if (packed && !packed[map]) return 0;
    return begins ? begins[map + 1] - begins[map] : num_rows;
  }
  const void* packed_of(int64_t map) const { return packed ? packed[map] : each.packed; }
  Linear of(int64_t map) const {
    Linear one = begins ? each.from(begins[map]) : each;
    one.packed = packed_of(map);
    int64_t outputs = each.is_gated() ? 2 * each.N : each.N;
    if (each.bias) one.bias = (const char*)each.bias + map * outputs * (each.is_bf16 ? 2 : 4);
    return one;
  }
  int64_t num_used() const {
    int64_t n = 0;
    for (int64_t map = 0; map < num_maps; map++) n += rows_of(map) > 0;
    return n;
  }
};

void multiply(const Maps& maps, Team& team);
// Multiply by coded weights: see gemm_codes.h.
void multiply_codes(const Maps& maps, Team& team);
// Multiply quantized rows by coded weights: see gemm_rounded.cpp for rows that have one scale, else
// gemm_integers.cpp.
void multiply_rounded(const Maps& maps, Team& team);
void multiply_integers(const Maps& maps, Team& team);

// Compute SiLU, x sigmoid(x), or GELU, 0.5 x (1 + tanh(u)) = x sigmoid(2 u). Here u = sqrt(2 / pi)
// (x + 0.044715 x^3) (Hendrycks, Gimpel 1606.08415).
template <int64_t EPILOGUE> static INLINE vf gate(vf x) {
  vf at = EPILOGUE == SILU_MUL ? x : x * fma(x * x, splat(0.0713548163f), splat(1.59576912f));
  return x / (1.0f + exp(-at));
}

// The gate of gpt-oss experts: both halves are clamped, and 1 is added to up. NaN is kept, because
// it is the second argument of min and max.
static INLINE vf clamped(vf x, vf up, float limit) {
  x = min(splat(limit), x);
  up = min(splat(limit), max(splat(-limit), up));
  return (up + 1.0f) * (x / (1.0f + exp(-1.702f * x)));
}

// Write 16 columns of some rows, or the n that exist, rounded once. Inlined, because n is mostly
// 16.
template <class T, int64_t EPILOGUE>
static INLINE void finish_columns(const Linear& a, const float* sums, int64_t column, int n,
                                  Range rows) {
  const T* bias = (const T*)a.bias;
  vf first = bias ? load_up_to(bias + column, n) : vf{}, second{};
  if (EPILOGUE >= SILU_MUL && bias) second = load_up_to(bias + a.N + column, n);
  using Out = std::conditional_t<EPILOGUE == FLOATS, float, T>;
  Out* out = (Out*)a.out + rows.begin * a.N + column;
  for (int64_t r = rows.begin; r < rows.end; r++, out += a.N, sums += COLUMNS) {
    const float* more = a.added_to(r);
    vf y = load(sums) + first;
    if (more) y += load_up_to(more + column, n);
    if (EPILOGUE >= SILU_MUL) {
      vf up = load(sums + COLUMNS / 2) + second;
      if (more) up += load_up_to(more + a.N + column, n);
      y = EPILOGUE == CLAMPED_MUL ? clamped(y, up, a.limit) : gate<EPILOGUE>(y) * up;
    }
    if (EPILOGUE == ADD) y = load_up_to(out, n) + y * a.factor;
    store_up_to(out, y, n);
  }
}

template <class T, int64_t EPILOGUE>
static void finish_panel(const Linear& a, const float* sums, int64_t panel, Range rows) {
  int64_t width = panel_columns(a.is_gated()), begin = panel * width;
  for (int64_t i = begin; i < std::min(begin + width, a.N); i += LANES, sums += LANES) {
    if (a.N - i >= LANES) finish_columns<T, EPILOGUE>(a, sums, i, LANES, rows);
    else finish_columns<T, EPILOGUE>(a, sums, i, a.N - i, rows);
  }
}

// Finish the sums of rows in a panel, [rows][32].
template <class T>
static void finish(const Linear& a, const float* sums, int64_t panel, Range rows) {
  if (a.epilogue == SILU_MUL) finish_panel<T, SILU_MUL>(a, sums, panel, rows);
  else if (a.epilogue == GELU_MUL) finish_panel<T, GELU_MUL>(a, sums, panel, rows);
  else if (a.epilogue == CLAMPED_MUL) finish_panel<T, CLAMPED_MUL>(a, sums, panel, rows);
  else if (a.epilogue == ADD) finish_panel<T, ADD>(a, sums, panel, rows);
  else if (a.epilogue == FLOATS) finish_panel<T, FLOATS>(a, sums, panel, rows);
  else finish_panel<T, PLAIN>(a, sums, panel, rows);
}

// Memory that a thread reuses from op to op.
template <class T> struct Scratch {
  std::unique_ptr<T, decltype(&free)> memory{nullptr, free};
  int64_t size = 0;

  T* at_least(int64_t n) {
    if (n > size) {
      size = divide_up(n, 1 << 14) * (1 << 14);
      memory.reset((T*)aligned_alloc(64, size * sizeof(T)));
      if (!memory) {
        fprintf(stderr, "specserve: cannot allocate %lld bytes for the rows of a linear map\n",
                (long long)(size * sizeof(T)));
        abort();
      }
    }
    return memory.get();
  }
};

constexpr int64_t ROWS_BYTES = 512 << 10;  // maximum bytes of packed rows of a slab

// The division of an op's rows and panels: first into slabs of rows, which a thread packs as a
// whole, then into groups of panels. An item is one slab and one group.
struct Division {
  int64_t num_rows, num_panels, num_slabs, groups;

  // A group has at most `largest` panels. `are_long`: items are long, so an unequal number per
  // thread would cost more than smaller items.
  Division(int64_t R, int64_t slab_rows, int64_t num_panels, int64_t largest, bool are_long,
           int threads)
      : num_rows(R), num_panels(num_panels), num_slabs(divide_up(R, slab_rows)) {
    int64_t even = threads == 1 ? largest : num_panels * num_slabs / (4 * threads);
    groups = divide_up(num_panels, std::clamp<int64_t>(even, 1, largest));
    if (are_long) groups = std::min(divide_up(groups, threads) * threads, num_panels);
  }
  int64_t num_items() const { return num_slabs * groups; }
  Range slab(int64_t item) const {
    int64_t s = item / groups;
    return {num_rows * s / num_slabs, num_rows * (s + 1) / num_slabs};
  }
  Range panels(int64_t item) const {
    int64_t g = item % groups;
    return {num_panels * g / groups, num_panels * (g + 1) / groups};
  }
};

// One piece of a thread's work.
struct Item {
  int64_t map;  // -1 after the last item
  int64_t num_rows;  // of the map
  Range slab, panels;
};

// The items of all maps, in order. divide(rows, threads) returns a map's Division. Each thread has
// its own Items, and requests ascending items.
template <class Divide> struct Items {
  const Maps& maps;
  Divide divide;
  int threads;  // per map that has rows
  int64_t map = -1, first = 0, behind = 0;  // the map's items are [first, behind)
  Division division = divide(1, 1);

  Items(const Maps& maps, Divide divide, int threads)
      : maps(maps), divide(divide),
        threads(divide_up(threads, std::max<int64_t>(maps.num_used(), 1))) {}

  Item at(int64_t i) {
    while (i >= behind) {
      if (map + 1 == maps.num_maps) return {-1, 0, {0, 0}, {0, 0}};
      map++;
      if (maps.rows_of(map) == 0) continue;
      division = divide(maps.rows_of(map), threads);
      first = behind;
      behind += division.num_items();
    }
    return {map, division.num_rows, division.slab(i - first), division.panels(i - first)};
  }
};
