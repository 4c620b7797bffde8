// A linear map's arguments, the division of its work among threads, and what follows its sums.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "gemm.h"
#include "op.h"

enum Epilogue : int64_t { PLAIN, ADD, SILU_MUL, GELU_MUL };

struct Linear {
  int64_t is_bf16, domain;
  const void *x, *packed, *bias;  // [R, K]; the weight's panels; [N], [2 N] if gated, or null
  void* out;                      // [R, N]; the residual, if it is added to
  int64_t N, K, epilogue;
  int64_t bits, group, has_zeros, has_offsets;  // of a weight of codes: bits is 0 for another one
  int64_t rounds_rows;                          // whether rows become codes, too
  float factor;                                 // of what is added to the residual

  bool is_gated() const { return epilogue >= SILU_MUL; }
};

// A weight of codes: see gemm_codes.h.
void multiply_codes(const Linear& a, int64_t R, Team& team);
// One whose rows are rounded: see gemm_rounded.cpp.
void multiply_rounded(const Linear& a, int64_t R, Team& team);

// SiLU, x sigmoid(x), or GELU as 0.5 x (1 + tanh(u)) = x sigmoid(2 u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks, Gimpel 1606.08415).
template <int64_t EPILOGUE> static INLINE vf gate(vf x) {
  vf at = EPILOGUE == SILU_MUL ? x : x * fma(x * x, splat(0.0713548163f), splat(1.59576912f));
  return x / (1.0f + exp(-at));
}

// Write 16 columns of some rows, or the n that exist, rounded once. Inlined, as n is mostly 16.
template <class T, int64_t EPILOGUE>
static INLINE void finish_columns(const Linear& a, const float* sums, int64_t column, int n,
                                  Range rows) {
  const T* bias = (const T*)a.bias;
  vf first = bias ? load_up_to(bias + column, n) : vf{}, second{};
  if (EPILOGUE >= SILU_MUL && bias) second = load_up_to(bias + a.N + column, n);
  T* out = (T*)a.out + rows.begin * a.N + column;
  for (int64_t r = rows.begin; r < rows.end; r++, out += a.N, sums += COLUMNS) {
    vf y = load(sums) + first;
    if (EPILOGUE >= SILU_MUL) y = gate<EPILOGUE>(y) * (load(sums + COLUMNS / 2) + second);
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

// `sums` are those of the rows, [rows][32], in a panel.
template <class T>
static void finish(const Linear& a, const float* sums, int64_t panel, Range rows) {
  if (a.epilogue == SILU_MUL) finish_panel<T, SILU_MUL>(a, sums, panel, rows);
  else if (a.epilogue == GELU_MUL) finish_panel<T, GELU_MUL>(a, sums, panel, rows);
  else if (a.epilogue == ADD) finish_panel<T, ADD>(a, sums, panel, rows);
  else finish_panel<T, PLAIN>(a, sums, panel, rows);
}

// Memory that a thread keeps from op to op.
template <class T> struct Scratch {
  std::unique_ptr<T, decltype(&free)> memory{nullptr, free};
  int64_t size = 0;

  T* at_least(int64_t n) {
    if (n > size) {
      size = divide_up(n, 1 << 14) * (1 << 14);
      memory.reset((T*)aligned_alloc(64, size * sizeof(T)));
      if (!memory) {
        fprintf(stderr, "specserve: no memory for %lld bytes of a linear map's rows\n",
                (long long)(size * sizeof(T)));
        abort();
      }
    }
    return memory.get();
  }
};

constexpr int64_t ROWS_BYTES = 512 << 10;  // of packed rows that are multiplied by all panels

// How an op's rows and panels are divided: first into slabs of rows, which a thread packs as a
// whole, then into groups of panels. A slab and a group are what a thread takes at once.
struct Division {
  int64_t num_rows, num_panels, num_slabs, groups;

  // `largest` panels are a group at most; `are_long`: one item more for some threads than for
  // others would cost more than smaller items do.
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
